"""Gradients of packed causal attention on a GPU (Dao 2023, arXiv:2307.08691, section 3.1.2), without atomics.

Three kernels. `delta` is the row sum of ``out * g``. A dq program owns a tile of query tokens with all the heads that share a
key/value head, and walks over the key blocks from its sequence's start to the diagonal. A dk/dv program owns a block of keys of
one key/value head, and walks over the query tiles that see it, one head after another within a tile. Both recompute the weights
from `lse`; so nothing of size T x T is kept, and each sum has one order: the order of the tokens, counted from the sequence's
start. Tiles of other sequences add exact zeros or are not visited.

Scores are recomputed as ``exp2(q k * scale * log2(e) - lse)``. The weights and their gradients are rounded to the type of `q`
before they are multiplied, as the forward does; sums are float32.
"""

import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu, numerics, tuning
from pallas_kernels.attention.walks import walks
from pallas_kernels.triton_numerics import INTERPRETED, ordered_sum, padded, round_to

_DELTA_TOKENS = 32


# A dq program has BLOCK_M query rows (tokens x heads of a key/value head) and BLOCK_N keys per step; a dk/dv program has BLOCK_N
# keys. Sums do not depend on these. Two warpgroups of a dq program, and two dk/dv programs of one, share a multiprocessor: one
# multiplies while the other computes exponentials.
_DQ = dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)
_DK = dict(BLOCK_N=64, num_warps=4, num_stages=2)
# Without tensor cores a product is unrolled into multiply-adds: small tiles.
_DQ_FLOAT32 = dict(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2)
_DK_FLOAT32 = dict(BLOCK_N=16, num_warps=4, num_stages=2)


def scale_log2(head_dim: int) -> float:
    """What a score is multiplied by, forward and backward: 1 / sqrt(head_dim), in base 2."""
    return head_dim**-0.5 * numerics.LOG2_E


def dk_tile(dtype) -> int:
    """Query tokens per step of a dk/dv program: part of the order of its sums. Sequences start at multiples of it."""
    return 64 if dtype == jnp.bfloat16 else 16


@triton.jit
def _load(place, mask):
    """Loads numbers; behind the mask 0. The interpreter has no bfloat16 arithmetic, so there they become float32."""
    x = tl.load(place) if mask is None else tl.load(place, mask=mask, other=0.0)
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def _operand(x, dtype: tl.constexpr):
    """Float32 rounded for a product."""
    rounded = round_to(x, dtype)
    return rounded.to(tl.float32) if INTERPRETED else rounded


@triton.jit
def _dot(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _delta_kernel(out, g, length, delta, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    inside = token < length
    first = (batch * length * HEADS + head) * WIDTH
    place = first + tl.expand_dims(token, 1) * (HEADS * WIDTH) + tl.expand_dims(tl.arange(0, WIDTH), 0)
    mask = tl.expand_dims(inside, 1)
    product = tl.load(out + place, mask=mask, other=0.0).to(tl.float32) * tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + (batch * HEADS + head) * length + token, ordered_sum(product, TOKENS, WIDTH), mask=inside)


@triton.jit
def _dq_step(
    total, q_tile, g_tile, lse_row, delta_row, token, start, keys, values, first_slot, length,
    SCALE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one key block's part: [ROWS, WIDTH]."""
    dtype: tl.constexpr = keys.dtype.element_ty
    slot = first_slot + tl.arange(0, BLOCK)
    place = tl.expand_dims(slot, 1) * STRIDE + tl.expand_dims(tl.arange(0, WIDTH), 0)
    mask = tl.expand_dims(slot < length, 1) if MASKED else None
    k_block, v_block = _load(keys + place, mask), _load(values + place, mask)
    zero = tl.zeros((q_tile.shape[0], BLOCK), tl.float32)
    score = _dot(q_tile, tl.trans(k_block), zero)
    weight = tl.exp2(tl.fma(score, SCALE, -tl.expand_dims(lse_row, 1)))
    dweight = _dot(g_tile, tl.trans(v_block), zero)
    dscore = weight * (dweight - tl.expand_dims(delta_row, 1))
    if MASKED:
        seen = (tl.expand_dims(slot, 0) <= tl.expand_dims(token, 1)) & (tl.expand_dims(slot, 0) >= tl.expand_dims(start, 1))
        dscore = tl.where(seen, dscore, 0.0)
    return _dot(_operand(dscore, dtype), k_block, total)


@triton.jit
def _dq_kernel(
    q, k, v, positions, lse, delta, g, length, dq,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, SCALE_LOG2: tl.constexpr,
):  # fmt: skip
    batch, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS  # the longest walks begin first
    row = tl.arange(0, TOKENS * GROUP_SIZE)
    token, head = first + row // GROUP_SIZE, kv_head * GROUP + row % GROUP_SIZE
    known = tl.minimum(token, length - 1)
    real = (token < length) & (row % GROUP_SIZE < GROUP)
    mask = tl.expand_dims(real, 1)
    place = tl.expand_dims(token * HEADS + head, 1) * WIDTH + tl.expand_dims(tl.arange(0, WIDTH), 0)
    queries = batch * length * (HEADS * WIDTH)
    keys = batch * length * (KV_HEADS * WIDTH) + kv_head * WIDTH
    q_tile, g_tile = _load(q + queries + place, mask), _load(g + queries + place, mask)
    numbers = batch * HEADS * length + head * length + token
    lse_row = tl.load(lse + numbers, mask=real, other=float("inf"))
    delta_row = tl.load(delta + numbers, mask=real, other=0.0)
    start = known - tl.load(positions + batch * length + known)

    # All rows see all keys of the blocks before the diagonal, unless rows of other sequences (padding) are among them.
    low, high = tl.min(start, axis=0), tl.max(start, axis=0)
    begin = low // BLOCK * BLOCK
    uniform = (low == high) & (low == begin)
    middle = tl.where(uniform, tl.maximum(first // BLOCK * BLOCK, begin), begin)
    total = tl.zeros((TOKENS * GROUP_SIZE, WIDTH), tl.float32)
    for slot in range(begin, middle, BLOCK):
        total = _dq_step(
            total, q_tile, g_tile, lse_row, delta_row, token, start, k + keys, v + keys, slot, length,
            SCALE_LOG2, KV_HEADS * WIDTH, WIDTH, BLOCK, MASKED=False,
        )  # fmt: skip
    for slot in range(middle, tl.minimum(first + TOKENS, length), BLOCK):
        total = _dq_step(
            total, q_tile, g_tile, lse_row, delta_row, token, start, k + keys, v + keys, slot, length,
            SCALE_LOG2, KV_HEADS * WIDTH, WIDTH, BLOCK, MASKED=True,
        )  # fmt: skip
    tl.store(dq + queries + place, round_to(total * SCALE, dq.dtype.element_ty), mask=mask)


@triton.jit
def _dk_step(
    dk_total, dv_total, k_block, v_block, slot, queries, gradients, lse, delta, positions, tile, head, length,
    SCALE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the part of one head's tile of queries: two times [BLOCK, WIDTH]."""
    dtype: tl.constexpr = queries.dtype.element_ty
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < length
    # Behind the end stands the last row again, which weighs nothing: exp2(-inf). A mask would cost registers in the loop.
    known = tl.minimum(token, length - 1)
    place = tl.expand_dims(known * HEADS, 1) * WIDTH + tl.expand_dims(tl.arange(0, WIDTH), 0)
    q_tile, g_tile = _load(queries + head * WIDTH + place, None), _load(gradients + head * WIDTH + place, None)
    lse_row = tl.expand_dims(tl.load(lse + head * length + token, mask=inside, other=float("inf")), 0)
    delta_row = tl.expand_dims(tl.load(delta + head * length + known), 0)
    zero = tl.zeros((k_block.shape[0], TILE), tl.float32)
    weight = tl.exp2(tl.fma(_dot(k_block, tl.trans(q_tile), zero), SCALE, -lse_row))
    if MASKED:
        start = token - tl.load(positions + known)
        seen = (tl.expand_dims(slot, 1) <= tl.expand_dims(token, 0)) & (tl.expand_dims(slot, 1) >= tl.expand_dims(start, 0))
        weight = tl.where(seen, weight, 0.0)
    dv_total = _dot(_operand(weight, dtype), g_tile, dv_total)
    dscore = weight * (_dot(v_block, tl.trans(g_tile), zero) - delta_row)
    if MASKED:
        dscore = tl.where(seen, dscore, 0.0)
    return _dot(_operand(dscore, dtype), q_tile, dk_total), dv_total


@triton.jit
def _dk_kernel(
    q, k, v, positions, lse, delta, g, middles, ends, length, dk, dv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, SCALE_LOG2: tl.constexpr,
):  # fmt: skip
    batch, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    block = tl.program_id(1)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    mask = tl.expand_dims(slot < length, 1)
    keys = batch * length * (KV_HEADS * WIDTH) + kv_head * WIDTH
    place = keys + tl.expand_dims(slot, 1) * (KV_HEADS * WIDTH) + tl.expand_dims(tl.arange(0, WIDTH), 0)
    k_block, v_block = _load(k + place, mask), _load(v + place, mask)
    queries, row = batch * length * (HEADS * WIDTH), batch * HEADS * length
    first_head = kv_head * GROUP
    begin = block * BLOCK // TILE
    middle = tl.load(middles + batch * tl.num_programs(1) + block)
    end = tl.load(ends + batch * tl.num_programs(1) + block)
    dk_total = tl.zeros((BLOCK, WIDTH), tl.float32)
    dv_total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for i in range(begin * GROUP, middle * GROUP):
        dk_total, dv_total = _dk_step(
            dk_total, dv_total, k_block, v_block, slot, q + queries, g + queries, lse + row, delta + row,
            positions + batch * length, i // GROUP, first_head + i % GROUP, length,
            SCALE_LOG2, HEADS, WIDTH, TILE, MASKED=True,
        )  # fmt: skip
    for i in range(middle * GROUP, end * GROUP):
        dk_total, dv_total = _dk_step(
            dk_total, dv_total, k_block, v_block, slot, q + queries, g + queries, lse + row, delta + row,
            positions + batch * length, i // GROUP, first_head + i % GROUP, length,
            SCALE_LOG2, HEADS, WIDTH, TILE, MASKED=False,
        )  # fmt: skip
    tl.store(dk + place, round_to(dk_total * SCALE, dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, round_to(dv_total, dv.dtype.element_ty), mask=mask)


def _shape_constants(q_shape, num_kv_heads) -> dict:
    head_dim = q_shape[-1]
    return dict(
        HEADS=q_shape[2],
        KV_HEADS=num_kv_heads,
        GROUP=q_shape[2] // num_kv_heads,
        WIDTH=head_dim,
        SCALE=head_dim**-0.5,
        SCALE_LOG2=scale_log2(head_dim),
    )


def delta_launch(q_shape) -> gpu.Launch:
    """Inputs: out and g [B, T, H, K], T. Output: their products' sums [B, H, T] float32."""
    batch, length, heads, head_dim = q_shape
    return gpu.Launch(
        _delta_kernel,
        gpu.outputs(((batch, heads, length), jnp.float32)),
        grid=(triton.cdiv(length, _DELTA_TOKENS), heads, batch),
        constants=dict(HEADS=heads, WIDTH=head_dim, TOKENS=_DELTA_TOKENS),
        num_warps=4,
    )


def dq_launch(q_shape, num_kv_heads: int, dtype, config: dict | None = None) -> gpu.Launch:
    """Inputs: q, k, v, positions, lse and delta [B, H, T], g, T. Output: the gradient of q. `config` in place of the table's."""
    batch, length, heads, head_dim = q_shape
    if config is None and dtype == jnp.bfloat16:
        config = tuning.config("attention_dq_bfloat16", rows=length, features=heads, depth=head_dim, default=_DQ)
    config = config or _DQ_FLOAT32
    group_size = padded(heads // num_kv_heads)
    tokens = max(1, config["BLOCK_M"] // group_size)
    return gpu.Launch(
        _dq_kernel,
        gpu.outputs((q_shape, dtype)),
        grid=(batch * num_kv_heads, triton.cdiv(length, tokens)),
        constants=_shape_constants(q_shape, num_kv_heads) | dict(GROUP_SIZE=group_size, TOKENS=tokens, BLOCK=config["BLOCK_N"]),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


def dk_launch(q_shape, num_kv_heads: int, dtype, config: dict | None = None, tile: int | None = None) -> gpu.Launch:
    """Inputs: q, k, v, positions, lse and delta [B, H, T], g, the two results of `walks`, T. Outputs: gradients of k and v.
    `config` in place of the table's.
    """
    batch, length, heads, head_dim = q_shape
    if config is None and dtype == jnp.bfloat16:
        config = tuning.config("attention_dk_bfloat16", rows=length, features=heads, depth=head_dim, default=_DK)
    config = config or _DK_FLOAT32
    shape = (batch, length, num_kv_heads, head_dim)
    return gpu.Launch(
        _dk_kernel,
        gpu.outputs((shape, dtype), (shape, dtype)),
        grid=(batch * num_kv_heads, triton.cdiv(length, config["BLOCK_N"])),
        constants=_shape_constants(q_shape, num_kv_heads) | dict(BLOCK=config["BLOCK_N"], TILE=tile or dk_tile(dtype)),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


def delta(out_BTHK, g_BTHK):
    """Row sums of ``out * g``, [B, H, T] float32."""
    return gpu.run(delta_launch(g_BTHK.shape), out_BTHK, g_BTHK, g_BTHK.shape[1])[0]


def queries_gradient(q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK):
    """The gradient of q; see `attention_backward`."""
    launch = dq_launch(q_BTHK.shape, k_BTNK.shape[2], q_BTHK.dtype)
    return gpu.run(launch, q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK, q_BTHK.shape[1])[0]


def keys_gradient(q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK):
    """The gradients of k and v."""
    launch = dk_launch(q_BTHK.shape, k_BTNK.shape[2], q_BTHK.dtype)
    bounds = walks(positions_BT, block=launch.constants["BLOCK"], tile=launch.constants["TILE"])
    inputs = q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK
    return tuple(gpu.run(launch, *inputs, *bounds, q_BTHK.shape[1]))


def attention_backward(q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse_BHT, g_BTHK):
    """Gradients of q, k and v in their type.

    Args:
      q_BTHK: [B, T, H, K] bfloat16 or float32.
      k_BTNK: [B, T, N, K] in the type of q.
      v_BTNK: [B, T, N, K] in the type of q.
      positions_BT: [B, T] int32: row t attends the rows t - position .. t.
      out_BTHK: [B, T, H, K], what the forward returned.
      lse_BHT: [B, H, T] float32, the logarithm to base 2 of the sum of ``exp2(q k * K ** -0.5 * log2(e))``.
      g_BTHK: [B, T, H, K], gradient of `out`.

    Returns:
      Gradients of q, k and v. Those of a sequence do not depend on what else is in its row.
    """
    inputs = q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta(out_BTHK, g_BTHK), g_BTHK
    return queries_gradient(*inputs), *keys_gradient(*inputs)
