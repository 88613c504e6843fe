"""Top-k, top-p and the draw of a token on a GPU, without a sort. Let M be rows, V the vocabulary.

**The kept set.** Tokens of a row are ordered by falling logit (after temperature), equal ones by rising index. A token is kept
while the weight of what lies before it is below a target: for top-k a token weighs 1 and the target is k; for top-p it weighs
exp(logit - largest), 0 if top-k dropped it, and the target is top_p times the sum. What is kept is a beginning of that order, so
two numbers say it: the logit of the last kept token, as an integer of the same order, and the index of the last one that is kept
among its equals. That pair is a row's *cut*.

**Finding it.** Eight passes fix the integer's eight hexadecimal digits, the highest first. A pass adds, for each of the 16 values
of a digit, the weights of the tokens that agree with the digits found so far; the next pass takes the lowest value before which
the weight is still below the target. A program owns one chunk of a row's vocabulary and leaves its 16 sums in memory; every
program of the next pass adds up its row's sums again, in one order, and those of chunks with nothing under the chosen digit have
nothing to read. No atomics; every sum is of one row, cut at places that depend on V alone, so that a row has the same cut in
whatever batch: that of the sampler and that of the learner.

**Against the reference.** Top-k is exact in both. For top-p the reference compares a float32 cumulative sum over sorted tokens
with the target, these kernels a float32 sum by digits and chunks. The two can disagree only about tokens before which the exact
weight lies within the rounding of those sums of the target. Here that is at most 2^-18 of the sum: no number passes through more
than 64 additions, and an exponential that matters is right to 2^-20. There it grows with the number of tokens, at worst 2^-24 for
each. Among equal logits the weight is a product here and a sum there.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import padded, sortable

# A row is cut into chunks of so many columns, each with a program of its own: sums are cut there too, so this is part of a row's
# bits and nothing to tune.
_CHUNK = 4096
# Logits that a draw holds at once: beyond so many bytes rows are drawn in groups.
_DRAW_BYTES = 2**29

# A smaller top_p is 0 in float32, and nothing lies before that. The most probable token of all has more, so this keeps it too.
_SMALLEST_MASS = 2.0**-100

_SIGN = tl.constexpr(0x80000000)
_DIGITS = 8
_LAST = tl.constexpr(_DIGITS)


def geometry(vocab_size: int) -> dict[str, int]:
    """How a row is cut: the constants VOCABULARY, CHUNK (columns), CHUNKS, and SIZE (CHUNKS up to a power of two)."""
    chunk = min(_CHUNK, max(64, padded(vocab_size)))
    chunks = triton.cdiv(vocab_size, chunk)
    return dict(VOCABULARY=vocab_size, CHUNK=chunk, CHUNKS=chunks, SIZE=max(2, padded(chunks)))


def temperature_of(truncation) -> float:
    """What logits are divided by: 1 for greedy decoding."""
    return 1.0 if truncation.greedy else float(truncation.temperature)


@triton.jit
def processed(x, TEMPERATURE: tl.constexpr):
    """Logits after temperature, correctly rounded."""
    if TEMPERATURE == 1.0:
        return x
    else:
        return tl.div_rn(x, tl.full(x.shape, TEMPERATURE, tl.float32))


@triton.jit
def is_kept(x, column, cut_key, cut_index):
    """Whether tokens lie before a row's cut. NaN always does: it makes the row's log-probs NaN."""
    key = sortable(x)
    return (key > cut_key) | ((key == cut_key) & (column <= cut_index)) | (x != x)


@triton.jit
def _maxima_kernel(
    logits, maxima,
    VOCABULARY: tl.constexpr, TEMPERATURE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk."""
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    column = (tl.program_id(0) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * VOCABULARY + column, mask=column < VOCABULARY, other=float("-inf"))
    tl.store(maxima + tl.program_id(0), tl.max(processed(x, TEMPERATURE), axis=0))


@triton.jit
def _divided_kernel(
    logits, divided,
    VOCABULARY: tl.constexpr, TEMPERATURE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Logits after temperature: XLA's division is not correctly rounded, and these order the tokens as the cut does."""
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    column = (tl.program_id(0) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = column < VOCABULARY
    x = tl.load(logits + row * VOCABULARY + column, mask=inside, other=0.0)
    tl.store(divided + row * VOCABULARY + column, processed(x, TEMPERATURE), mask=inside)


@triton.jit
def _row_maximum(maxima, row, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    number = tl.arange(0, SIZE)
    return tl.max(tl.load(maxima + row * CHUNKS + number, mask=number < CHUNKS, other=float("-inf")), axis=0)


@triton.jit
def _next_digit(
    sums, prefixes, befores, targets, row, chunk,
    PASS: tl.constexpr, LIMIT: tl.constexpr, BY_MASS: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """From the sums of the pass before: the digits found so far, the weight before them, the target, and the weight of this
    chunk's tokens that agree with those digits."""
    number = tl.expand_dims(tl.arange(0, SIZE), 1)
    digit = tl.arange(0, 16)
    each = tl.load(sums + (row * CHUNKS + number) * 16 + tl.expand_dims(digit, 0), mask=number < CHUNKS, other=0.0)
    weights = tl.expand_dims(tl.sum(each, axis=0), 1)
    higher = tl.where(tl.expand_dims(digit, 1) > tl.expand_dims(digit, 0), weights, 0.0)
    before = tl.load(befores + row) + tl.sum(higher, axis=0)
    if BY_MASS and PASS == 1:
        target = tl.sum(tl.sum(each, axis=0), axis=0) * LIMIT
    else:
        target = tl.load(targets + row)
    # Before the highest value lies what lay before all of them, which is below the target. With NaN nothing is: any will do.
    chosen = tl.min(tl.where(before < target, digit, 15), axis=0)
    before = tl.sum(tl.where(digit == chosen, before, 0.0), axis=0)  # of zeros and one number: exact
    mine = (number == chunk) & (tl.expand_dims(digit, 0) == chosen)
    weight = tl.sum(tl.sum(tl.where(mine, each, 0.0), axis=0), axis=0)
    prefix = (tl.load(prefixes + row) << 4) | chosen.to(tl.uint32)
    return prefix, before, target, weight


@triton.jit
def _tokens_of_chunk(
    logits, cut_keys, cut_indices, row, chunk, HAS_CUT: tl.constexpr, VOCABULARY: tl.constexpr, TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Logits of a chunk, their columns, their unsigned sortable integers, and which of them are there and before the cut."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    eligible = column < VOCABULARY
    x = processed(tl.load(logits + row * VOCABULARY + column, mask=eligible, other=float("-inf")), TEMPERATURE)
    if HAS_CUT:
        eligible = eligible & is_kept(x, column, tl.load(cut_keys + row), tl.load(cut_indices + row))
    return x, column, sortable(x).to(tl.uint32, bitcast=True) ^ _SIGN, eligible


@triton.jit
def _digit_sums(
    logits, cut_keys, cut_indices, maxima, row, chunk, prefix,
    PASS: tl.constexpr, BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr, VOCABULARY: tl.constexpr, TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    x, _, code, eligible = _tokens_of_chunk(
        logits, cut_keys, cut_indices, row, chunk, HAS_CUT, VOCABULARY, TEMPERATURE, CHUNK
    )  # fmt: skip
    if PASS > 0:
        eligible = eligible & ((code >> (32 - 4 * PASS)) == prefix)
    if BY_MASS:
        weight = tl.where(eligible, tl.exp(x - _row_maximum(maxima, row, CHUNKS, SIZE)), 0.0)
    else:
        weight = eligible.to(tl.float32)
    digit = (code >> (28 - 4 * PASS)) & 15
    number = tl.arange(0, 16)
    sums = tl.zeros((16,), tl.float32)
    for i in tl.static_range(16):
        sums = tl.where(number == i, tl.sum(tl.where(digit == i, weight, 0.0), axis=0), sums)
    return sums


@triton.jit
def _pass_kernel(
    logits, cut_keys, cut_indices, maxima, sums, prefixes, befores, targets,
    new_sums, new_prefixes, new_befores, new_targets,
    PASS: tl.constexpr, LIMIT: tl.constexpr, BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr, TEMPERATURE: tl.constexpr,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Pass 0 to 7: chooses the digit before (none in pass 0), then sums the weights under each value of this one. Pass 8 chooses
    the last digit and counts the tokens that have them all."""
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    if PASS == 0:
        prefix = tl.zeros((), tl.uint32)
        before = tl.zeros((), tl.float32)
        target = tl.full((), LIMIT, tl.float32)
        weight = tl.full((), 1.0, tl.float32)
    else:
        prefix, before, target, weight = _next_digit(
            sums, prefixes, befores, targets, row, chunk, PASS, LIMIT, BY_MASS, CHUNKS, SIZE
        )
    if chunk == 0:
        tl.store(new_prefixes + row, prefix)
        tl.store(new_befores + row, before)
        tl.store(new_targets + row, target)
    if PASS == _LAST:
        count = tl.zeros((), tl.int32)
        if weight != 0.0:
            _, _, code, eligible = _tokens_of_chunk(
                logits, cut_keys, cut_indices, row, chunk, HAS_CUT, VOCABULARY, TEMPERATURE, CHUNK
            )
            count = tl.sum((eligible & (code == prefix)).to(tl.int32), axis=0)
        tl.store(new_sums + tl.program_id(0), count)
    else:
        found = tl.zeros((16,), tl.float32)
        if weight != 0.0:
            found = _digit_sums(
                logits, cut_keys, cut_indices, maxima, row, chunk, prefix, PASS, BY_MASS, HAS_CUT, VOCABULARY, TEMPERATURE, CHUNK,
                CHUNKS, SIZE,
            )  # fmt: skip
        tl.store(new_sums + tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16), found)


@triton.jit
def _cut_kernel(
    logits, cut_keys, cut_indices, maxima, counts, prefixes, befores, targets,
    new_keys, new_indices,
    BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr, TEMPERATURE: tl.constexpr, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many of the equals at the cut are kept, and which is the last of them."""
    row = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefixes + row)
    key = (prefix ^ _SIGN).to(tl.int32, bitcast=True)
    room = tl.load(targets + row) - tl.load(befores + row)
    number = tl.arange(0, SIZE)
    count = tl.load(counts + row * CHUNKS + number, mask=number < CHUNKS, other=0)
    if BY_MASS:
        value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        weight = tl.exp(value - _row_maximum(maxima, row, CHUNKS, SIZE))
        # The j-th of them, from 0, is kept where j weights are less than the room. Where they weigh nothing all are.
        wanted = tl.where(weight > 0.0, tl.ceil(tl.div_rn(room, weight)), VOCABULARY)
        wanted = tl.where(wanted < VOCABULARY, wanted, VOCABULARY).to(tl.int32)
    else:
        wanted = room.to(tl.int32)
    last = tl.full((), VOCABULARY, tl.int32)
    if wanted < tl.sum(count, axis=0):
        ends = tl.cumsum(count, 0)
        chunk = tl.min(tl.where(ends >= wanted, number, SIZE), axis=0)
        wanted -= tl.sum(tl.where(number < chunk, count, 0), axis=0)
        _, column, code, eligible = _tokens_of_chunk(
            logits, cut_keys, cut_indices, row, chunk, HAS_CUT, VOCABULARY, TEMPERATURE, CHUNK
        )
        equal = (eligible & (code == prefix)).to(tl.int32)
        last = tl.min(tl.where((equal == 1) & (tl.cumsum(equal, 0) == wanted), column, VOCABULARY), axis=0)
    if HAS_CUT:  # of two beginnings of one order the shorter
        old_key, old_index = tl.load(cut_keys + row), tl.load(cut_indices + row)
        last = tl.where(old_key > key, old_index, tl.where(old_key == key, tl.minimum(old_index, last), last))
        key = tl.maximum(old_key, key)
    tl.store(new_keys + row, key)
    tl.store(new_indices + row, last)


@triton.jit
def _kept_kernel(
    logits, cut_keys, cut_indices, kept,
    TEMPERATURE: tl.constexpr, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """1 where a token is kept, else 0."""
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    column = (tl.program_id(0) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = column < VOCABULARY
    x = processed(tl.load(logits + row * VOCABULARY + column, mask=inside, other=0.0), TEMPERATURE)
    keep = is_kept(x, column, tl.load(cut_keys + row), tl.load(cut_indices + row))
    tl.store(kept + row * VOCABULARY + column, keep.to(tl.int8), mask=inside)


# --- launches ------------------------------------------------------------------------------------------------------------------


def _chunk_launch(kernel, out_shape, num_rows: int, vocab_size: int, temperature: float) -> gpu.Launch:
    """A program for each chunk of each row, which needs to know nothing about the row's others."""
    constants = geometry(vocab_size)
    del constants["SIZE"]
    grid = (num_rows * constants["CHUNKS"],)
    return gpu.Launch(kernel, gpu.outputs(out_shape), grid, dict(TEMPERATURE=temperature, **constants), num_warps=4)


def maxima_launch(num_rows: int, vocab_size: int, temperature: float) -> gpu.Launch:
    """Input: logits [M, V] float32. Output: [M, CHUNKS] float32."""
    out_shape = (num_rows, geometry(vocab_size)["CHUNKS"]), jnp.float32
    return _chunk_launch(_maxima_kernel, out_shape, num_rows, vocab_size, temperature)


def divided_launch(num_rows: int, vocab_size: int, temperature: float) -> gpu.Launch:
    """Input and output: logits [M, V] float32."""
    return _chunk_launch(_divided_kernel, ((num_rows, vocab_size), jnp.float32), num_rows, vocab_size, temperature)


def pass_launch(
    num_rows: int, vocab_size: int, temperature: float, *, number: int, limit: float, by_mass: bool, has_cut: bool
) -> gpu.Launch:
    """Inputs: logits [M, V] float32; cut [M] int32 twice (any where not `has_cut`); maxima [M, CHUNKS] float32 (any where not
    `by_mass`); the outputs of the pass before (any for pass 0). Outputs: sums [M, CHUNKS, 16] float32 (the last pass: counts
    [M, CHUNKS] int32), digits [M] uint32, weight before them [M] float32, target [M] float32."""
    constants = geometry(vocab_size)
    chunks = constants["CHUNKS"]
    sums = ((num_rows, chunks), jnp.int32) if number == _DIGITS else ((num_rows, chunks, 16), jnp.float32)
    return gpu.Launch(
        _pass_kernel,
        gpu.outputs(sums, ((num_rows,), jnp.uint32), ((num_rows,), jnp.float32), ((num_rows,), jnp.float32)),
        grid=(num_rows * chunks,),
        constants=dict(PASS=number, LIMIT=limit, BY_MASS=by_mass, HAS_CUT=has_cut, TEMPERATURE=temperature, **constants),
        num_warps=8 if constants["CHUNK"] >= 2048 else 4,
    )


def cut_launch(num_rows: int, vocab_size: int, temperature: float, *, by_mass: bool, has_cut: bool) -> gpu.Launch:
    """Inputs: as those of `pass_launch`, behind the last pass. Outputs: cut, key [M] and index [M] int32."""
    return gpu.Launch(
        _cut_kernel,
        gpu.outputs(((num_rows,), jnp.int32), ((num_rows,), jnp.int32)),
        grid=(num_rows,),
        constants=dict(BY_MASS=by_mass, HAS_CUT=has_cut, TEMPERATURE=temperature, **geometry(vocab_size)),
        num_warps=8,
    )


def kept_launch(num_rows: int, vocab_size: int, temperature: float) -> gpu.Launch:
    """Inputs: logits [M, V] float32, cut [M] int32 twice. Output: [M, V] int8."""
    return _chunk_launch(_kept_kernel, ((num_rows, vocab_size), jnp.int8), num_rows, vocab_size, temperature)


# --- the operations ------------------------------------------------------------------------------------------------------------


def cut(logits_MV, truncation, *, run=gpu.run) -> tuple[jax.Array, jax.Array]:
    """A row's cut, key and index, each [M] int32. `run` is `gpu.interpret` in tests."""
    vocab_size = logits_MV.shape[1]
    temperature, found = temperature_of(truncation), None
    if 0 < truncation.top_k < vocab_size:
        found = _cut(run, logits_MV, found, temperature, float(truncation.top_k), by_mass=False)
    if truncation.top_p < 1.0 or found is None:
        found = _cut(run, logits_MV, found, temperature, max(truncation.top_p, _SMALLEST_MASS), by_mass=True)
    return found


def _cut(run, logits_MV, first, temperature, limit, *, by_mass):
    num_rows, vocab_size = logits_MV.shape
    unused, unused_float = jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.float32)
    maxima = run(maxima_launch(num_rows, vocab_size, temperature), logits_MV)[0] if by_mass else unused_float
    inputs = (logits_MV, *(first or (unused, unused)), maxima)
    settings = dict(by_mass=by_mass, has_cut=first is not None)
    state = (unused_float, jnp.zeros((1,), jnp.uint32), unused_float, unused_float)
    for number in range(_DIGITS + 1):
        state = run(pass_launch(num_rows, vocab_size, temperature, number=number, limit=limit, **settings), *inputs, *state)
    key_M, index_M = run(cut_launch(num_rows, vocab_size, temperature, **settings), *inputs, *state)
    return key_M, index_M


def kept_of_cut(logits_MV, cut_M, truncation, *, run=gpu.run) -> jax.Array:
    """[M, V] int8, 1 where a token is kept."""
    return run(kept_launch(*logits_MV.shape, temperature_of(truncation)), logits_MV, *cut_M)[0]


def kept_tokens(logits_MV, truncation) -> jax.Array:
    return kept_of_cut(logits_MV, cut(logits_MV, truncation), truncation) != 0


def sample_tokens(logits_MV, keys_M, truncation, kept_MV) -> jax.Array:
    """The reference's noise and choice, without its tiles: elementwise operations that leave XLA nothing to contract, and a
    maximum. The noise of at most `_DRAW_BYTES` of logits is held at once."""
    impl, vocab_size = jax.random.key_impl(keys_M), logits_MV.shape[1]

    def draw(rows):
        logits_RV, key_data_R, kept_RV = rows
        temperature = temperature_of(truncation)
        if temperature != 1.0:
            (logits_RV,) = gpu.run(divided_launch(*logits_RV.shape, temperature), logits_RV)
        if kept_RV is not None:
            logits_RV = jnp.where(kept_RV, logits_RV, -jnp.inf)
        if not truncation.greedy:
            keys_R = jax.random.wrap_key_data(key_data_R, impl=impl)
            logits_RV = logits_RV + jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys_R)
        return jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)

    return map_chunks(draw, (logits_MV, jax.random.key_data(keys_M), kept_MV), max(1, _DRAW_BYTES // (4 * vocab_size)))


def map_chunks(function, rows, most: int):
    """Applies a function of arrays [R, ...] to at most `most` rows at a time; the last chunk is filled up with zeros.

    Chunks are as equal as multiples of 128 allow, which is what tiles of a matmul like.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    if num_rows <= most:
        return function(rows)
    size = -(-num_rows // -(-num_rows // most))
    size = min(most, -(-size // 128) * 128)
    chunks = -(-num_rows // size)

    def to_chunks(x):
        x = jnp.pad(x, [(0, chunks * size - num_rows)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, size, *x.shape[1:])

    results = lax.map(function, jax.tree.map(to_chunks, rows))
    return jax.tree.map(lambda x: x.reshape(chunks * size, *x.shape[2:])[:num_rows], results)
