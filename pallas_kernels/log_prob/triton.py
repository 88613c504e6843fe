"""Log-probabilities of tokens and their gradients on a GPU. Let M be rows, D the model width, V the vocabulary.

**Forward.** Logits are those of `matmul`, in float32. One program reads one chunk of a row's vocabulary and leaves its maximum,
the sum of exp(logit - maximum) and the same sum weighted with (logit - maximum); a second kernel, one program a row, puts the
chunks of the row together in one order. The chunks depend on V alone, so a row has the same bits in whatever batch; a single row
still keeps many processors busy. The sampler (a few rows) and the learner (many) run these same kernels. Sums are of exponentials
that are right to about 2^-22 + 2^-23 |logit - maximum|; the logarithm, the maximum and the token's logit are joined in float32.

**Backward.** The row's maximum, the logarithm of its sum, its entropy and its cut (`triton_sampling`) are kept from the forward;
logits are computed again, a slice of the vocabulary at a time for all rows. They have the bits that they had in the forward,
since an element of `matmul` does not know its neighbours, so that the cut drops the same tokens. A slice's gradient of the head
is final when it is written, and what is added up over slices is the gradient of `hidden`: [M, D], not [V, D]. The gradient of the
logits is in the operands' type.

**Memory.** Forward: logits of `LOGITS_BYTES` at most (or of 128 rows), and a quarter of that where tokens are dropped. Backward:
logits of `LOGITS_BYTES` at most (or of 1024 columns) and their gradient (half as much in bfloat16), that slice of the head, the
gradient of a slice of the head, two [M, D] float32 and the result, [V, D] float32. Never [M, V].
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from pallas_kernels import gpu, operands
from pallas_kernels.log_prob.triton_sampling import (
    cut,
    geometry,
    is_kept,
    kept_of_cut,
    kept_tokens,
    map_chunks,
    processed,
    sample_tokens,
    temperature_of,
)
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad
from pallas_kernels.triton_numerics import round_to

__all__ = ["kept_tokens", "log_prob_of_logits", "sample_tokens", "token_log_prob", "token_log_prob_gradients"]

# Most bytes of float32 logits that are held at once.
LOGITS_BYTES = 2**29
_LEAST_ROWS, _LEAST_COLUMNS = 128, 1024
_COLUMNS = 1024  # of one program of the backward

_LN2_HIGH, _LN2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.4286068203094173e-06)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_A3, _A5, _A7, _A9, _A11 = (tl.constexpr(2 / n) for n in (3, 5, 7, 9, 11))


@triton.jit
def _log(x):
    """Natural logarithm of normal numbers from 1, to about one unit in the last place. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    significand = (bits - (exponent << 23)).to(tl.float32, bitcast=True)  # from sqrt(1/2) to sqrt(2)
    s = tl.div_rn(significand - 1.0, significand + 1.0)
    square = s * s
    # log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + 2/5 s^5 + ...
    series = ((((_A11 * square + _A9) * square + _A7) * square + _A5) * square + _A3) * square * s
    power = exponent.to(tl.float32)
    result = power * _LN2_HIGH + (2.0 * s + (series + power * _LN2_LOW))
    return tl.where(x == x, result, x)


@triton.jit
def _chunk_kernel(
    logits, kept, maxima, sums, weighted,
    TRUNCATED: tl.constexpr, TEMPERATURE: tl.constexpr, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    column = (tl.program_id(0) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = column < VOCABULARY
    x = processed(tl.load(logits + row * VOCABULARY + column, mask=inside, other=float("-inf")), TEMPERATURE)
    if TRUNCATED:
        x = tl.where(tl.load(kept + row * VOCABULARY + column, mask=inside, other=0) != 0, x, float("-inf"))
    maximum = tl.max(x, axis=0)
    shifted = x - tl.where(maximum == float("-inf"), 0.0, maximum)
    power = tl.exp(shifted)
    tl.store(maxima + tl.program_id(0), maximum)
    tl.store(sums + tl.program_id(0), tl.sum(power, axis=0))
    # What is dropped, or too small, is 0 x -inf: it counts as 0. NaN stays.
    tl.store(weighted + tl.program_id(0), tl.sum(tl.where(power > 0.0, power * shifted, 0.0 * power), axis=0))


@triton.jit
def _row_kernel(
    logits, kept, tokens, maxima, sums, weighted,
    log_probs, entropies, row_maxima, log_sums,
    TRUNCATED: tl.constexpr, TEMPERATURE: tl.constexpr, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SIZE)
    inside = number < CHUNKS
    chunk_maximum = tl.load(maxima + row * CHUNKS + number, mask=inside, other=float("-inf"))
    chunk_sum = tl.load(sums + row * CHUNKS + number, mask=inside, other=0.0)
    chunk_weighted = tl.load(weighted + row * CHUNKS + number, mask=inside, other=0.0)
    maximum = tl.max(chunk_maximum, axis=0)
    behind = chunk_maximum - maximum
    factor = tl.exp(behind)
    total = tl.sum(chunk_sum * factor, axis=0)
    moved = tl.where(chunk_sum > 0.0, chunk_weighted + chunk_sum * behind, 0.0 * chunk_sum) * factor
    log_sum = _log(total)
    # A token outside the vocabulary has no log-prob.
    token = tl.load(tokens + row + tl.zeros((1,), tl.int32))
    place = logits + row * VOCABULARY + token
    known = (token >= 0) & (token < VOCABULARY)
    chosen = processed(tl.load(place, mask=known, other=float("nan")), TEMPERATURE)
    if TRUNCATED:
        keep = tl.load(kept + row * VOCABULARY + token, mask=known, other=1)
        chosen = tl.where(keep != 0, chosen, float("-inf"))
    tl.store(log_probs + row + tl.zeros((1,), tl.int32), (chosen - maximum) - log_sum)
    tl.store(entropies + row, log_sum - tl.div_rn(tl.sum(moved, axis=0), total))
    tl.store(row_maxima + row, maximum)
    tl.store(log_sums + row, log_sum)


@triton.jit
def _gradient_kernel(
    logits, tokens, row_maxima, log_sums, entropies, dlog_probs, dentropies, cut_keys, cut_indices, slice_start, counted_from,
    dlogits,
    WIDTH: tl.constexpr, TRUNCATED: tl.constexpr, TEMPERATURE: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Logits and their gradients are [M, WIDTH], columns of the vocabulary from `slice_start`; those before `counted_from` get
    gradient 0."""
    row = tl.program_id(0).to(tl.int64) // BLOCKS
    column = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = processed(tl.load(logits + row * WIDTH + column, mask=inside, other=0.0), TEMPERATURE)
    token = tl.load(slice_start) + column  # of the vocabulary
    log_prob = (x - tl.load(row_maxima + row)) - tl.load(log_sums + row)
    prob = tl.exp(log_prob)
    if TRUNCATED:
        prob = tl.where(is_kept(x, token, tl.load(cut_keys + row), tl.load(cut_indices + row)), prob, 0.0)
    is_chosen = (token == tl.load(tokens + row)).to(tl.float32)
    surprise = tl.where(prob > 0.0, log_prob, 0.0) + tl.load(entropies + row)
    gradient = tl.load(dlog_probs + row) * (is_chosen - prob) - tl.load(dentropies + row) * prob * surprise
    gradient = tl.where(token >= tl.load(counted_from), processed(gradient, TEMPERATURE), 0.0)
    tl.store(dlogits + row * WIDTH + column, round_to(gradient, dlogits.dtype.element_ty), mask=inside)


# --- launches ------------------------------------------------------------------------------------------------------------------


def chunk_launch(num_rows: int, vocab_size: int, temperature: float, *, truncated: bool) -> gpu.Launch:
    """Inputs: logits [M, V] float32, kept [M, V] int8 (any where not `truncated`). Outputs: maxima, sums and weighted sums of the
    chunks, each [M, CHUNKS] float32."""
    constants = geometry(vocab_size)
    del constants["SIZE"]
    chunks = constants["CHUNKS"]
    out_shape = gpu.outputs(*[((num_rows, chunks), jnp.float32)] * 3)
    constants |= dict(TRUNCATED=truncated, TEMPERATURE=temperature)
    return gpu.Launch(_chunk_kernel, out_shape, (num_rows * chunks,), constants, num_warps=4)


def row_launch(num_rows: int, vocab_size: int, temperature: float, *, truncated: bool) -> gpu.Launch:
    """Inputs: those of `chunk_launch` and tokens [M] int32 behind them, then its outputs. Outputs: log-probs, entropies, maxima
    and logarithms of the sums, each [M] float32."""
    constants = geometry(vocab_size)
    del constants["CHUNK"]
    out_shape = gpu.outputs(*[((num_rows,), jnp.float32)] * 4)
    constants |= dict(TRUNCATED=truncated, TEMPERATURE=temperature)
    return gpu.Launch(_row_kernel, out_shape, (num_rows,), constants, num_warps=1)


def gradient_launch(num_rows: int, width: int, dtype, temperature: float, *, truncated: bool) -> gpu.Launch:
    """Inputs: logits [M, WIDTH] float32; tokens [M] int32; maxima, logarithms of the sums, entropies and the gradients of
    log-probs and entropies, each [M] float32; cut [M] int32 twice (any where not `truncated`); the vocabulary's column of the
    first of WIDTH, and the first that counts, each [1] int32. Output: gradient of the logits [M, WIDTH]."""
    columns = min(_COLUMNS, max(64, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, columns)
    constants = dict(WIDTH=width, TRUNCATED=truncated, TEMPERATURE=temperature, COLUMNS=columns, BLOCKS=blocks)
    out_shape = gpu.outputs(((num_rows, width), dtype))
    return gpu.Launch(_gradient_kernel, out_shape, (num_rows * blocks,), constants, num_warps=4)


# --- the operations ------------------------------------------------------------------------------------------------------------


def row_statistics(logits_MV, tokens_M, truncation, kept_MV, *, run=gpu.run) -> list[jax.Array]:
    """Log-probs, entropies, maxima and logarithms of the sums, each [M]; kept [M, V] int8 or None."""
    temperature, truncated = temperature_of(truncation), kept_MV is not None
    kept = kept_MV if truncated else jnp.zeros((1,), jnp.int8)
    chunks = run(chunk_launch(*logits_MV.shape, temperature, truncated=truncated), logits_MV, kept)
    launch = row_launch(*logits_MV.shape, temperature, truncated=truncated)
    return run(launch, logits_MV, kept, tokens_M.astype(jnp.int32), *chunks)


def log_prob_of_logits(logits_MV, tokens_M, truncation, kept_MV):
    kept_MV = None if kept_MV is None else kept_MV.astype(jnp.int8)
    log_prob_M, entropy_M, _, _ = row_statistics(logits_MV, tokens_M, truncation, kept_MV)
    return log_prob_M, entropy_M


def token_log_prob(hidden_MD, head, tokens_M, truncation):
    """Log-probs and entropies; and for the backward the maxima, the logarithms of the sums, the entropies and the cuts."""
    vocab_size = head.shape[0]

    def chunk(rows):
        hidden_RD, tokens_R = rows
        logits_RV = matmul(hidden_RD, head, out_dtype=jnp.float32)
        cut_R = kept_RV = None
        if not truncation.keeps_all(vocab_size):
            cut_R = cut(logits_RV, truncation)
            kept_RV = kept_of_cut(logits_RV, cut_R, truncation)
        return row_statistics(logits_RV, tokens_R, truncation, kept_RV), cut_R

    rows = max(_LEAST_ROWS, LOGITS_BYTES // (4 * vocab_size) // _LEAST_ROWS * _LEAST_ROWS)
    (log_prob_M, entropy_M, maximum_M, log_sum_M), cut_M = map_chunks(chunk, (hidden_MD, tokens_M), rows)
    return (log_prob_M, entropy_M), (maximum_M, log_sum_M, entropy_M, cut_M)


def _slice(head, start, width):
    """Rows start .. start + width of the head, which may be NVFP4."""
    if isinstance(head, jax.Array):
        return lax.dynamic_slice_in_dim(head, start, width)
    return operands.take_rows(head, start + jnp.arange(width))


def token_log_prob_gradients(hidden_MD, head, tokens_M, truncation, saved, dlog_prob_M, dentropy_M, *, wants_head):
    """Gradients of `hidden` and, if wanted, of `head`, both float32."""
    maximum_M, log_sum_M, entropy_M, cut_M = saved
    num_rows, vocab_size = hidden_MD.shape[0], head.shape[0]
    unused = jnp.zeros((1,), jnp.int32)
    rows = (tokens_M.astype(jnp.int32), maximum_M, log_sum_M, entropy_M, dlog_prob_M, dentropy_M, *(cut_M or (unused, unused)))
    settings = hidden_MD.dtype, temperature_of(truncation)

    def gradients(start, counted_from, width):
        head_WD = _slice(head, start, width)
        logits_MW = matmul(hidden_MD, head_WD, out_dtype=jnp.float32)
        launch = gradient_launch(num_rows, width, *settings, truncated=cut_M is not None)
        (dlogits_MW,) = gpu.run(launch, logits_MW, *rows, start.reshape(1), counted_from.reshape(1))
        dhead_WD = matmul_wgrad(hidden_MD, dlogits_MW) if wants_head else None
        return matmul_dgrad(dlogits_MW, head_WD, out_dtype=jnp.float32), dhead_WD

    width = max(_LEAST_COLUMNS, LOGITS_BYTES // (4 * max(1, num_rows)) // _LEAST_COLUMNS * _LEAST_COLUMNS)
    if width >= vocab_size:
        return gradients(jnp.int32(0), jnp.int32(0), vocab_size)
    # The last slice comes first: it begins earlier, so as to be as wide as the others, and the rows that it has from the slice
    # before it are written over by that one.
    firsts = jnp.arange(0, vocab_size, width, dtype=jnp.int32)
    firsts = jnp.roll(firsts, 1)
    starts = jnp.minimum(firsts, vocab_size - width)

    def body(carry, places):
        dhidden_MD, dhead_VD = carry
        start, counted_from = places
        more_MD, dhead_WD = gradients(start, counted_from, width)
        if wants_head:
            dhead_VD = lax.dynamic_update_slice_in_dim(dhead_VD, dhead_WD, start, axis=0)
        return (dhidden_MD + more_MD, dhead_VD), None

    zeros = jnp.zeros(hidden_MD.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32) if wants_head else None
    return lax.scan(body, zeros, (starts, firsts))[0]
