"""Split, norm and rotation on a GPU, in one kernel each way; the bits of the kernels of `rms_norm` and `rotary` in turn.

Forward: a program owns rows of the projection, a row being a token's head; heads of values are copied. Backward: a program owns
ROW_TILE query rows or ROW_TILE key rows, one after another, with the sum of their terms for the weight; or it copies values.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.rms_norm.triton import inverse_rms
from pallas_kernels.rotary.triton import rotate
from pallas_kernels.rows import ROW_TILE
from pallas_kernels.triton_numerics import blocked_sum, num_warps, padded, round_to, separate_product

_TILE = 2048  # numbers per program, at least


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Float32 numbers rounded as a store and a load would do."""
    return round_to(x, dtype).to(tl.float32)


@triton.jit
def _either(is_query, q_weight, k_weight, place, mask):
    """Rows of the query's or the key's weight."""
    return tl.where(is_query, tl.load(q_weight + place, mask=mask, other=0.0), tl.load(k_weight + place, mask=mask, other=0.0))


@triton.jit
def _store(to, place, first, second, mask, HALF: tl.constexpr):
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to + place, round_to(first, dtype), mask=mask)
    tl.store(to + place + HALF, round_to(second, dtype), mask=mask)


@triton.jit
def _forward_kernel(
    qkv, q_weight, k_weight, cos, sin, num_tokens, q, k, v,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, HALF_SIZE: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = WIDTH // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.expand_dims(tl.program_id(0) * ROWS + tl.arange(0, ROWS), 1)
    token, head = (row // ALL).to(tl.int64), row % ALL
    row = row.to(tl.int64)
    there = token < num_tokens
    column, pair = tl.expand_dims(tl.arange(0, SIZE), 0), tl.expand_dims(tl.arange(0, HALF_SIZE), 0)
    inside = pair < HALF
    mask = there & inside
    values = tl.load(qkv + row * WIDTH + column, mask=there & (column < WIDTH), other=0.0).to(tl.float32)
    inverse = inverse_rms(values, ROWS, SIZE, WIDTH, EPS)
    # The halves of what was just read.
    first = tl.load(qkv + row * WIDTH + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * WIDTH + pair + HALF, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * HALF + pair, mask=mask, other=0.0)
    sine = tl.load(sin + token * HALF + pair, mask=mask, other=0.0)
    is_query = head < HEADS
    weight = _either(is_query, q_weight, k_weight, pair, inside)
    normed = _rounded(first * inverse * weight, dtype)
    weight = _either(is_query, q_weight, k_weight, pair + HALF, inside)
    one, other = rotate(normed, _rounded(second * inverse * weight, dtype), cosine, sine)
    _store(q, (token * HEADS + head) * WIDTH + pair, one, other, mask & is_query, HALF)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    _store(k, (token * KV_HEADS + head - HEADS) * WIDTH + pair, one, other, mask & is_key, HALF)
    is_value = head >= HEADS + KV_HEADS
    _store(v, (token * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH + pair, first, second, mask & is_value, HALF)


@triton.jit
def _backward_rows(
    qkv, weight, cos, sin, gradient, num_tokens, dqkv, sums, tile,
    FIRST: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
    SIZE: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    """ROW_TILE rows of the HEADS heads from FIRST on."""
    HALF: tl.constexpr = WIDTH // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    column = tl.expand_dims(tl.arange(0, SIZE), 0)
    inside = column < WIDTH
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    pair = tl.where(column < HALF, column, partner)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    total = tl.full((1, SIZE), -0.0, tl.float32)  # -0 + x is x, also where x is -0
    for i in range(ROW_TILE):
        row = tile * ROW_TILE + i
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        row = row.to(tl.int64)
        mask = inside & (token < num_tokens)
        place = (token * ALL + FIRST + head) * WIDTH + column
        values = tl.load(qkv + place, mask=mask, other=0.0).to(tl.float32)
        own = tl.load(gradient + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(gradient + row * WIDTH + partner, mask=mask, other=0.0).to(tl.float32)
        cosine = tl.load(cos + token * HALF + pair, mask=mask, other=0.0)
        sine = tl.load(sin + token * HALF + pair, mask=mask, other=0.0)
        # `rotate` by the opposite angle, for either half at once: it is the first that subtracts.
        turn = separate_product(other * -sine)
        own = separate_product(own * cosine)
        g = _rounded(tl.where(column < HALF, own - turn, own + turn), dtype)
        inverse = inverse_rms(values, 1, SIZE, WIDTH, EPS)
        unit = values * inverse
        dunit = separate_product(g * scale)
        mean = blocked_sum(separate_product(dunit * unit), 1, SIZE) * (1.0 / WIDTH)
        result = inverse * (dunit - separate_product(unit * tl.expand_dims(mean, 1)))
        tl.store(dqkv + place, round_to(result, dtype), mask=mask)
        total = total + separate_product(g * unit)
    tl.store(sums + tile.to(tl.int64) * WIDTH + column, total, mask=inside)


@triton.jit
def _backward_kernel(
    qkv, q_weight, k_weight, cos, sin, gq, gk, gv, num_tokens, dqkv, q_sums, k_sums,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
    SIZE: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    program = tl.program_id(0)
    q_tiles = tl.cdiv(num_tokens * HEADS, ROW_TILE)
    k_tiles = tl.cdiv(num_tokens * KV_HEADS, ROW_TILE)
    if program < q_tiles:
        _backward_rows(qkv, q_weight, cos, sin, gq, num_tokens, dqkv, q_sums, program, 0, HEADS, ALL, WIDTH, EPS, SIZE, ROW_TILE)
    elif program < q_tiles + k_tiles:
        _backward_rows(
            qkv, k_weight, cos, sin, gk, num_tokens, dqkv, k_sums, program - q_tiles,
            HEADS, KV_HEADS, ALL, WIDTH, EPS, SIZE, ROW_TILE,
        )  # fmt: skip
    else:
        tile = program - q_tiles - k_tiles
        row = tl.expand_dims(tile * ROW_TILE + tl.arange(0, ROW_TILE), 1)
        column = tl.expand_dims(tl.arange(0, SIZE), 0)
        token, head = (row // KV_HEADS).to(tl.int64), row % KV_HEADS
        row = row.to(tl.int64)
        mask = (token < num_tokens) & (column < WIDTH)
        copied = tl.load(gv + row * WIDTH + column, mask=mask, other=0.0)
        tl.store(dqkv + (token * ALL + HEADS + KV_HEADS + head) * WIDTH + column, copied, mask=mask)


def forward_launch(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype, eps: float) -> gpu.Launch:
    """Inputs: qkv [M, H + 2 N, K], the weights [K] float32, cos and sin [M, K / 2] float32, M. Outputs: q, k, v."""
    size = max(16, padded(head_dim))
    rows = max(1, _TILE // size)
    kv_shape = (num_tokens, num_kv_heads, head_dim)
    return gpu.Launch(
        _forward_kernel,
        gpu.outputs(((num_tokens, num_heads, head_dim), dtype), (kv_shape, dtype), (kv_shape, dtype)),
        grid=(triton.cdiv(num_tokens * (num_heads + 2 * num_kv_heads), rows),),
        constants=dict(
            HEADS=num_heads, KV_HEADS=num_kv_heads, WIDTH=head_dim, EPS=eps, ROWS=rows, SIZE=size, HALF_SIZE=padded(head_dim // 2)
        ),
        num_warps=num_warps(rows * size),
    )


def backward_launch(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype, eps: float) -> gpu.Launch:
    """Inputs: those of the forward before M, the gradients of q, k and v, M. Outputs: dqkv, sums for the weights [tiles, K]."""
    size = max(16, padded(head_dim))
    q_tiles, k_tiles = (triton.cdiv(num_tokens * heads, ROW_TILE) for heads in (num_heads, num_kv_heads))
    return gpu.Launch(
        _backward_kernel,
        gpu.outputs(
            ((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype),
            ((q_tiles, head_dim), jnp.float32),
            ((k_tiles, head_dim), jnp.float32),
        ),
        grid=(q_tiles + 2 * k_tiles,),
        constants=dict(HEADS=num_heads, KV_HEADS=num_kv_heads, WIDTH=head_dim, EPS=eps, SIZE=size, ROW_TILE=ROW_TILE),
        num_warps=num_warps(size),
    )


def qk_norm_rotary(qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, *, num_heads, num_kv_heads, eps) -> tuple[jax.Array, ...]:
    num_tokens, _, head_dim = qkv_MHK.shape
    launch = forward_launch(num_tokens, num_heads, num_kv_heads, head_dim, qkv_MHK.dtype, eps)
    return tuple(gpu.run(launch, qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, num_tokens))


def qk_norm_rotary_backward(
    qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, gq_MHK, gk_MNK, gv_MNK, *, num_heads, num_kv_heads, eps
) -> list[jax.Array]:
    num_tokens, _, head_dim = qkv_MHK.shape
    launch = backward_launch(num_tokens, num_heads, num_kv_heads, head_dim, qkv_MHK.dtype, eps)
    inputs = (qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, gq_MHK, gk_MNK, gv_MNK)
    return gpu.run(launch, *inputs, num_tokens)
