"""NVFP4 on an NVIDIA GPU: quantise, and multiply out codes and block scales. Bit-equal to the jnp reference.

A program owns ROWS whole rows. It finds each row's largest magnitude, and then quantises the row in tiles of TILE numbers, which
stay in registers where a tile holds the row and come back from the cache where it does not. Every step is one that the rules
name (`fp8_exact.py`, `te.py`); the only freedom taken is *how* a nearest code is found:

* float32 data, and TransformerEngine's rules: by comparisons with the thresholds, as in the reference.
* `fp8_exact` on bfloat16 data, the case that training is made of: `triton_quantize.py`.
"""


import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.nvfp4 import blocks, triton_quantize
from pallas_kernels.nvfp4.array import Nvfp4Array
from pallas_kernels.nvfp4.expanded import ExpandedArray
from pallas_kernels.nvfp4.rules import ScaleRule
from pallas_kernels.nvfp4.triton_scales import (
    FRACTION_MASK,
    INFINITY_BITS,
    SMALLEST_AMAX_BITS,
    binary_outer_exponent,
    float_bits,
    from_bits,
    magnitude_bits,
    nearest_quarter,
    nearest_sixth,
    power_of_two,
    scale_value,
)
from pallas_kernels.triton_numerics import round_to


@triton.jit
def block_sum(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """[ROWS, BLOCKS, 16] -> [ROWS, BLOCKS]: halves to halves. A sum of two is the same in either order, so that the layout of
    the registers cannot change the tree."""
    x = tl.sum(tl.reshape(x, (ROWS, BLOCKS, 2, 8)), axis=2)
    x = tl.sum(tl.reshape(x, (ROWS, BLOCKS, 2, 4)), axis=2)
    x = tl.sum(tl.reshape(x, (ROWS, BLOCKS, 2, 2)), axis=2)
    return tl.sum(x, axis=2)


# --- fp8_exact -----------------------------------------------------------------------------------------------------------------


@triton.jit
def _compare_to_e2m1(y, scale, LARGEST):
    """The same by comparisons of y with threshold x scale."""
    value = tl.where(y > 0.25 * scale, 0.5, 0.0)
    value = tl.where(y >= 0.75 * scale, 1.0, value)
    value = tl.where(y > 1.25 * scale, 1.5, value)
    value = tl.where(y >= 1.75 * scale, 2.0, value)
    value = tl.where(y > 2.5 * scale, 3.0, value)
    value = tl.where(y >= 3.5 * scale, 4.0, value)
    value = tl.where(y > 5.0 * scale, 6.0, value)
    return tl.minimum(value, LARGEST)


@triton.jit
def _nearest_value(y, byte, LARGEST):
    """(E2M1 magnitude nearest to y / scale, scale); y [ROWS, BLOCKS, 16], byte and LARGEST [ROWS, BLOCKS]."""
    scale = tl.expand_dims(scale_value(byte), 2)
    return _compare_to_e2m1(y, scale, LARGEST), scale


@triton.jit
def _block_error(y, value, scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    # value x scale is exact, so the multiply-add rounds once, as the reference's subtraction does.
    return block_sum(tl.abs(tl.fma(-value, tl.broadcast_to(scale, value.shape), y)), ROWS, BLOCKS)


@triton.jit
def quantize_blocks_fp8_exact(x, outer_max, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Quantises [ROWS, BLOCKS, 16] float32 with the magnitude bits [ROWS] that the outer scales are made for.

    Returns E2M1 magnitudes as float32, scale values [ROWS, BLOCKS, 1], scale bytes [ROWS, BLOCKS], outer scales [ROWS], and
    whether a row is live [ROWS].
    """
    live = (outer_max < INFINITY_BITS) & (outer_max >= SMALLEST_AMAX_BITS)
    outer_exponent = tl.where(live, binary_outer_exponent(outer_max), 0)
    live3 = tl.expand_dims(tl.expand_dims(live, 1), 2)
    bits = magnitude_bits(x)
    block_max = tl.max(bits, axis=2)
    y = from_bits(tl.where(live3, bits, 0)) * tl.expand_dims(tl.expand_dims(power_of_two(-outer_exponent), 1), 2)

    exponent = tl.where(tl.expand_dims(live, 1), (block_max >> 23) - 127 - tl.expand_dims(outer_exponent, 1), -127)
    fraction = block_max & FRACTION_MASK
    byte_six = nearest_sixth(exponent, fraction)
    byte_four = nearest_quarter(exponent, fraction)
    value_six, scale_six = _nearest_value(y, byte_six, 6.0)
    value_four, scale_four = _nearest_value(y, byte_four, 4.0)
    four_wins = _block_error(y, value_four, scale_four, ROWS, BLOCKS) < _block_error(y, value_six, scale_six, ROWS, BLOCKS)
    value = tl.where(tl.expand_dims(four_wins, 2), value_four, value_six)
    byte = tl.where(four_wins, byte_four, byte_six)
    outer = tl.where(outer_max < INFINITY_BITS, power_of_two(outer_exponent), float("nan"))
    return value, tl.expand_dims(scale_value(byte), 2), byte, outer, live


# --- TransformerEngine's rules -------------------------------------------------------------------------------------------------


@triton.jit
def _to_e4m3_byte(x):
    """Rounds 0 <= x to the nearest E4M3 byte, ties to even, saturating."""
    x = tl.minimum(x, 448.0)
    bits = float_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = float_bits(x + 16384.0) & 0xF
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def e4m3_value(byte):
    """Values of non-negative finite E4M3 bytes."""
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, from_bits((byte << 20) + ((127 - 7) << 23)))


@triton.jit
def _te_scaled(magnitude, byte, decode):
    encode_block = tl.div_rn(tl.full(byte.shape, 1.0, tl.float32), e4m3_value(byte) * decode)
    encode_block = tl.minimum(encode_block, 3.4028234663852886e38)
    return tl.minimum(magnitude * tl.expand_dims(encode_block, 2), 6.0)


@triton.jit
def _te_error(magnitude, byte, decode, outer_max, largest, SQUARED: tl.constexpr):
    value = _compare_to_e2m1(_te_scaled(magnitude, byte, decode), 1.0, 6.0) * tl.expand_dims(e4m3_value(byte), 2)
    product = value * tl.expand_dims(outer_max, 2)
    error = tl.abs(tl.div_rn(product, tl.full(product.shape, 0.0, tl.float32) + largest) - magnitude)
    if SQUARED:
        square = error * error
        error = tl.where(square == square, square, 0.0)
    # In the order of the elements. Adding zeros is exact, so a masked sum picks one element.
    lane = tl.arange(0, 16)[None, None, :]
    total = tl.sum(tl.where(lane == 0, error, 0.0), axis=2)
    for i in tl.static_range(1, 16):
        total = total + tl.sum(tl.where(lane == i, error, 0.0), axis=2)
    return total


@triton.jit
def quantize_blocks_te(
    x, outer_max_bits, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BOUND: tl.constexpr, FOUR_OVER_SIX: tl.constexpr
):
    """The same for TransformerEngine's rules; FOUR_OVER_SIX is "", "mae" or "mse"."""
    finite = outer_max_bits < INFINITY_BITS
    live = finite & (outer_max_bits >= SMALLEST_AMAX_BITS)
    live2 = tl.expand_dims(live, 1)
    bits = magnitude_bits(x)
    magnitude = from_bits(tl.where(tl.expand_dims(live2, 2), bits, 0))
    block_max = tl.max(magnitude, axis=2)
    outer_max = from_bits(tl.where(live, outer_max_bits, 127 << 23))
    largest = 6.0 * BOUND
    encode = tl.div_rn(tl.full(outer_max.shape, largest, tl.float32), outer_max)
    decode = tl.expand_dims(tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode), 1)
    encode2 = tl.expand_dims(encode, 1)
    outer_max2 = tl.expand_dims(outer_max, 1)
    if FOUR_OVER_SIX == "":
        byte = _to_e4m3_byte(block_max * (encode2 * 0.1666666716337204))
    else:
        base = tl.div_rn(block_max, tl.full(block_max.shape, 6.0, tl.float32)) * encode2
        byte_six = _to_e4m3_byte(base)
        byte_four = _to_e4m3_byte(base * 1.5)
        error_six = _te_error(magnitude, byte_six, decode, outer_max2, largest, FOUR_OVER_SIX == "mse")
        error_four = _te_error(magnitude, byte_four, decode, outer_max2, largest, FOUR_OVER_SIX == "mse")
        byte = tl.where(error_four < error_six, byte_four, byte_six)
    scaled = _te_scaled(magnitude, byte, decode)
    value = _compare_to_e2m1(scaled, 1.0, 6.0)
    dead = tl.where(finite, 1.0, float("nan"))
    outer = tl.where(live, tl.div_rn(outer_max, tl.full(outer_max.shape, largest, tl.float32)), dead)
    return value, tl.expand_dims(e4m3_value(byte), 2), byte, outer, scaled


# --- the kernel ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _store_blocks(
    x, outer_max, row, k0, m, out_ptr, outer_ptr, scale_ptr, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    FAMILY: tl.constexpr, BOUND: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Quantises a tile [ROWS, TILE] of whole blocks and stores it; outer scales too with the first tile of a row."""
    BLOCKS: tl.constexpr = TILE // 16
    x = tl.reshape(x, (ROWS, BLOCKS, 16))
    sign = float_bits(x) & -2147483648
    if FAMILY == "fp8_exact":
        value, scale, byte, outer, live = quantize_blocks_fp8_exact(x, outer_max, ROWS, BLOCKS)
        sign = tl.where(tl.expand_dims(tl.expand_dims(live, 1), 2), sign, 0)
    else:
        value, scale, byte, outer, scaled = quantize_blocks_te(x, outer_max, ROWS, BLOCKS, BOUND, FOUR_OVER_SIX)
        sign = tl.where(scaled > 0, sign, 0)
    in_rows = (row < m)[:, None]
    k = k0 + tl.arange(0, TILE)[None, :]
    if EXPANDED:
        product = from_bits(float_bits(value * scale) | sign)
        product = tl.reshape(product, (ROWS, TILE)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None].to(tl.int64) * K + k, product, mask=in_rows & (k < K))
    else:
        half = value < 1.0
        magnitude = tl.where(half, (value * 2.0).to(tl.int32), (float_bits(value) >> 22) - 252)
        code = magnitude | ((sign >> 28) & 8)
        low, high = tl.split(tl.reshape(code, (ROWS, TILE // 2, 2)))
        pair = k0 // 2 + tl.arange(0, TILE // 2)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(out_ptr + row[:, None].to(tl.int64) * (K // 2) + pair, packed, mask=in_rows & (pair < K // 2))
        block = k0 // 16 + tl.arange(0, BLOCKS)[None, :]
        byte = byte.to(tl.uint8)
        tl.store(scale_ptr + row[:, None].to(tl.int64) * (K // 16) + block, byte, mask=in_rows & (block < K // 16))
    if k0 == 0:
        tl.store(outer_ptr + row, outer, mask=row < m)


@triton.jit
def quantize_kernel(
    x_ptr, given_ptr, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, GIVEN_ROWS: tl.constexpr,
    FAMILY: tl.constexpr, BOUND: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """x [m, K]; `given` are magnitude bits, one for GIVEN_ROWS rows (0: each row has its own largest magnitude)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe_row = tl.minimum(row, m - 1).to(tl.int64)[:, None]
    k = tl.arange(0, TILE)[None, :]
    if TILE >= K:
        x = tl.load(x_ptr + safe_row * K + k, mask=k < K, other=0.0).to(tl.float32)
        if GIVEN_ROWS == 0:
            outer_max = tl.max(magnitude_bits(x), axis=1)
        else:
            outer_max = tl.load(given_ptr + tl.minimum(row, m - 1) // GIVEN_ROWS)
        _store_blocks(
            x, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr,
            K, ROWS, TILE, FAMILY, BOUND, FOUR_OVER_SIX, EXPANDED,
        )  # fmt: skip
    else:
        if GIVEN_ROWS == 0:
            largest = tl.zeros((ROWS, TILE), tl.int32)
            for k0 in range(0, K, TILE):
                x = tl.load(x_ptr + safe_row * K + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, magnitude_bits(x))
            outer_max = tl.max(largest, axis=1)
        else:
            outer_max = tl.load(given_ptr + tl.minimum(row, m - 1) // GIVEN_ROWS)
        for k0 in range(0, K, TILE):
            x = tl.load(x_ptr + safe_row * K + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
            _store_blocks(
                x, outer_max, row, k0, m, out_ptr, outer_ptr, scale_ptr,
                K, ROWS, TILE, FAMILY, BOUND, FOUR_OVER_SIX, EXPANDED,
            )  # fmt: skip


# 32 numbers a thread. Longer rows come in tiles.
_LONGEST_TILE = 4096


def quantize_launch(m: int, k: int, rule: ScaleRule, *, given_rows: int, values_dtype=None) -> gpu.Launch:
    """Quantises x [m, k]. Inputs: x, magnitude bits int32 (any array where given_rows is 0), m.

    Outputs: codes [m, k / 2], outer scales [m], scale bytes [m, k / 16]; or, with `values_dtype`, values [m, k] and outer scales.
    """
    tile = min(_LONGEST_TILE, max(16, triton.next_power_of_2(k)))
    constants = dict(
        K=k,
        ROWS=1,  # with more, threads exchange what each could have worked out by itself
        TILE=tile,
        GIVEN_ROWS=given_rows,
        FAMILY=rule.family,
        BOUND=rule.bound,
        FOUR_OVER_SIX=rule.four_over_six or "",
        EXPANDED=values_dtype is not None,
    )
    if values_dtype is None:
        out_shape = gpu.outputs(((m, k // 2), jnp.uint8), ((m,), jnp.float32), ((m, k // 16), jnp.uint8))
    else:
        out_shape = gpu.outputs(((m, k), values_dtype), ((m,), jnp.float32))
        constants["scale_ptr"] = None
    return gpu.Launch(quantize_kernel, out_shape, (m,), constants, num_warps=max(1, tile // 1024))


def _given_bits(x, rule: ScaleRule, amax):
    """(magnitude bits, rows that share one), or (any array, 0) where each row has its own."""
    if rule.outer == "row" and amax is None:
        return jnp.zeros((1,), jnp.int32), 0
    axes = (-1,) if rule.outer == "row" else (-2, -1)
    own = blocks.magnitude_bits(x.astype(jnp.float32)).max(axis=axes)  # a maximum of integers: any order gives the same
    if amax is not None:
        own = jnp.where(own >= blocks.INFINITY_BITS, own, blocks.magnitude_bits(jnp.asarray(amax, jnp.float32)))
    return own.reshape(-1), 1 if rule.outer == "row" else x.shape[-2]


def _outer(outer_M, rule: ScaleRule, shape):
    """Outer scales as the array types hold them: a program stores one for each row."""
    outer = outer_M.reshape(shape[:-1])
    return outer if rule.outer == "row" else outer[..., 0]


def _launch(x, rule: ScaleRule, given_rows: int, values_dtype=None) -> gpu.Launch:
    k = x.shape[-1]
    m = x.size // k
    if rule.family == "fp8_exact" and x.dtype == jnp.bfloat16:
        return triton_quantize.quantize_launch(m, k, given_rows=given_rows, expanded=values_dtype is not None)
    return quantize_launch(m, k, rule, given_rows=given_rows, values_dtype=values_dtype)


def quantize(x: jax.Array, rule: ScaleRule, amax: jax.Array | None = None) -> Nvfp4Array:
    """`nvfp4.quantize` with rounding to nearest and blocks of 1 x 16."""
    k = x.shape[-1]
    m = x.size // k
    given, given_rows = _given_bits(x, rule, amax)
    codes, outer, scale = gpu.run(_launch(x, rule, given_rows), x.reshape(m, k), given, m)
    return Nvfp4Array(
        codes=codes.reshape(*x.shape[:-1], k // 2),
        block_scale=jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).reshape(*x.shape[:-1], k // 16),
        outer_scale=_outer(outer, rule, x.shape),
        fp8_exact=rule.family == "fp8_exact",
    )


def quantize_expanded(x: jax.Array, rule: ScaleRule, dtype, amax: jax.Array | None = None) -> ExpandedArray:
    """`nvfp4.quantize_expanded`."""
    k = x.shape[-1]
    m = x.size // k
    given, given_rows = _given_bits(x, rule, amax)
    values, outer = gpu.run(_launch(x, rule, given_rows, dtype), x.reshape(m, k), given, m)
    return ExpandedArray(values=values.reshape(x.shape), outer_scale=_outer(outer, rule, x.shape))


# --- multiply out --------------------------------------------------------------------------------------------------------------


@triton.jit
def e2m1_scaled_down(codes):
    """Values of E2M1 codes (int32, 0..15) x 2^-14, float32: the three magnitude bits, put at bit 9 of a float16, are just that,
    also where they make a subnormal number."""
    half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def any_e4m3_value(byte):
    """Values of all E4M3 bytes, NaN included."""
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    value = tl.where(magnitude == 0x7F, float("nan"), e4m3_value(magnitude))
    return tl.where(byte >= 128, -value, value)


@triton.jit
def expand_kernel(codes_ptr, scale_ptr, outer_ptr, num_blocks, out_ptr, SHARING: tl.constexpr, BLOCKS: tl.constexpr):
    """Multiplies out BLOCKS blocks: 8 code bytes and a scale byte each become 16 numbers. SHARING: so many blocks have one outer
    scale, which is multiplied in too; 0: it is not."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < num_blocks
    scale = any_e4m3_value(tl.load(scale_ptr + block, mask=inside, other=0))
    byte = tl.load(codes_ptr + block[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    low = e2m1_scaled_down(byte & 0xF)
    high = e2m1_scaled_down(byte >> 4)
    if SHARING > 0:
        # In the order of `dequantize`: the scales first, then the code.
        scale = scale * tl.load(outer_ptr + block // SHARING, mask=inside, other=0.0)
        low = low * 16384.0 * scale[:, None]
        high = high * 16384.0 * scale[:, None]
    else:
        low = low * (scale * 16384.0)[:, None]
        high = high * (scale * 16384.0)[:, None]
    values = round_to(tl.reshape(tl.join(low, high), (BLOCKS, 16)), out_ptr.dtype.element_ty)
    tl.store(out_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :], values, mask=inside[:, None])


def expand_launch(num_blocks: int, shape: tuple[int, ...], dtype, *, sharing: int = 0) -> gpu.Launch:
    """Inputs: codes, scale bytes, outer scales (any array where `sharing` is 0), number of blocks of 16. Output: values of
    `shape`; with `sharing`, times the outer scales, one for so many blocks."""
    constants = dict(SHARING=sharing, BLOCKS=256)
    grid = (triton.cdiv(num_blocks, constants["BLOCKS"]),)
    return gpu.Launch(expand_kernel, gpu.outputs((shape, dtype)), grid, constants)


def _expand(q: Nvfp4Array, dtype, sharing: int) -> jax.Array:
    num_blocks = int(np.prod(q.block_scale.shape))
    scale = jax.lax.bitcast_convert_type(q.block_scale, jnp.uint8)
    launch = expand_launch(num_blocks, q.shape, dtype, sharing=sharing)
    return gpu.run(launch, q.codes, scale, q.outer_scale.reshape(-1), num_blocks)[0]


def expand(q: Nvfp4Array, dtype) -> ExpandedArray:
    """`nvfp4.expand`."""
    return ExpandedArray(values=_expand(q, dtype, 0), outer_scale=q.outer_scale)


def dequantize(q: Nvfp4Array, dtype) -> jax.Array:
    """`nvfp4.dequantize`, bit for bit."""
    blocks_of_a_row = q.shape[-1] // 16
    return _expand(q, dtype, blocks_of_a_row if q.outer_per_row else blocks_of_a_row * q.shape[-2])
