"""The quantising kernel of training: bfloat16 by the `fp8_exact` rule, packed or as E4M3 numbers. Bit-equal to the reference.

A GPU can spend about 26 instructions a number before quantising is slower than copying, so every step here is counted.

* A thread holds whole blocks: 16 numbers are 8 words of two, loaded as two vectors of four words. Even and odd elements are two
  streams, so the tree of a block's sum, halves to halves, lies in one thread's registers.
* Largest magnitudes are found on pairs of 16-bit integers.
* y / scale is y x (1 / scale) rounded to float32. A number of 8 significant bits is either on a rounding threshold x scale or at
  least 2^-9 of it away; the product errs by less than 2^-24 of it, and puts thresholds and grid points exactly on themselves. So
  no decision changes.
* Rounding t to E2M1, ties to even: with m = max(t, 1), t + m x 2^22 is rounded to multiples of half the binade of m, which is the
  spacing of E2M1 there, and taking m x 2^22 away leaves the result: two multiply-adds. A tie is decided by the last bit of
  m x 2^22, which is even where t is a threshold.
* Subnormal numbers are flushed by the multiplication that applies the outer scale.
"""

import os

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.nvfp4.array import Nvfp4Array
from pallas_kernels.nvfp4.expanded import ExpandedArray
from pallas_kernels.nvfp4.triton_scales import (
    FRACTION_MASK,
    INFINITY_BITS,
    SMALLEST_AMAX_BITS,
    binary_outer_exponent,
    float_bits,
    from_bits,
    nearest_quarter,
    nearest_sixth,
    power_of_two,
    scale_value,
)
from pallas_kernels.triton_numerics import round_to

# The interpreter knows no assembly: there, the same functions in Triton's own words.
_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _max_of_pairs(a, b):
    """Larger of each of the two unsigned 16-bit halves of int32 words."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (tl.maximum(a >> 16, b >> 16) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def _multiply_flushing(x, y):
    """x * y, where a subnormal x counts as zero."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.where((float_bits(x) & 0x7FFFFFFF) < (1 << 23), 0.0, x) * y


@triton.jit
def _e4m3_pair(low, high):
    """Two float32 as a word of two E4M3 bytes, int32; both are E4M3 numbers."""
    if _ASSEMBLY:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", [high, low], dtype=tl.int16, is_pure=True, pack=1
        )
        return pair.to(tl.int32)
    else:
        low = low.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        return low | (high.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8)


@triton.jit
def _signs(word):
    """The signs of a word's two bfloat16 numbers at the signs' places of two E4M3 bytes; other bits are anything."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4431;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return ((word >> 8) & 0xFF) | ((word >> 16) & 0xFF00)


@triton.jit
def bfloat16_pair(low, high):
    """Two float32 as a word of two bfloat16, to nearest even."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = round_to(low, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (round_to(high, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def low_value(word):
    """The first of a word's two bfloat16 numbers as float32."""
    return from_bits(word << 16)


@triton.jit
def high_value(word):
    return from_bits(word & -65536)


@triton.jit
def _scale_inverse(byte):
    """1 / scale rounded to float32: the significand is 1, 1.25 or 1.5."""
    eighths = byte & 7
    exponent = 127 + 7 - (byte >> 3)
    fraction = tl.where(eighths == 2, 0x4CCCCD, 0x2AAAAB)  # of 1.6 and of 4 / 3
    return from_bits(tl.where(eighths == 0, exponent << 23, ((exponent - 1) << 23) + fraction))


@triton.jit
def _round(magnitude, inverse, LARGEST: tl.constexpr, SATURATE: tl.constexpr):
    """The E2M1 magnitude nearest to magnitude x inverse, ties to even."""
    t = magnitude * inverse
    m = tl.maximum(t, 1.0)
    value = tl.fma(m, -4194304.0, tl.fma(m, 4194304.0, t))
    # With the data's own largest magnitude nothing exceeds the largest code.
    return tl.minimum(value, LARGEST) if SATURATE else value


@triton.jit
def tree_of_words(a_even, a_odd, b_even, b_odd, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums of blocks [ROWS, BLOCKS] by halves: 8 apart (a, b), then 4 and 2 (two words, one word apart), then even and odd."""
    even = tl.sum(tl.reshape(a_even + b_even, (ROWS, BLOCKS, 2, 2)), axis=2)
    odd = tl.sum(tl.reshape(a_odd + b_odd, (ROWS, BLOCKS, 2, 2)), axis=2)
    return tl.sum(even, axis=2) + tl.sum(odd, axis=2)


@triton.jit
def _error(magnitude, value, scale):
    # value x scale is exact, so the multiply-add rounds once, as the reference's subtraction does.
    return tl.abs(tl.fma(value, -scale, magnitude))


@triton.jit
def _codes(value, bits):
    """E2M1 codes 0..15 from magnitudes and the bits of the numbers, whose sign they take."""
    # x 2^-126 puts E2M1's exponents on float32's smallest: the magnitude's index are the bits from 22 on.
    return (float_bits(value * 1.1754943508222875e-38) >> 22) | ((bits >> 28) & 8)


@triton.jit
def quantize_words(
    a, b, outer_max, row, block0, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SATURATE: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Quantises and stores words a and b [ROWS, BLOCKS, 4] (the first and second 8 numbers of blocks block0...), given magnitude
    bits [ROWS] for the outer scales. Whole columns of blocks are in or out of the row."""
    live = (outer_max < INFINITY_BITS) & (outer_max >= SMALLEST_AMAX_BITS)
    outer_exponent = tl.where(live, binary_outer_exponent(outer_max), 0)
    if tl.max(tl.where(live, 0, 1)) > 0:
        # A dead row is all zero, the signs too. There is hardly ever one.
        keep = tl.where(live, -1, 0)[:, None, None]
        a = a & keep
        b = b & keep
    a_size = a & 0x7FFF7FFF
    b_size = b & 0x7FFF7FFF
    pairs = tl.reduce(_max_of_pairs(a_size, b_size), 2, _max_of_pairs)
    block_max = tl.maximum(pairs & 0xFFFF, pairs >> 16) << 16
    block_max = tl.where(block_max < (1 << 23), 0, block_max)
    exponent = (block_max >> 23) - 127 - outer_exponent[:, None]
    exponent = tl.where(live[:, None], exponent, -127)
    fraction = block_max & FRACTION_MASK
    byte_six = nearest_sixth(exponent, fraction)
    byte_four = nearest_quarter(exponent, fraction)
    scale_six = scale_value(byte_six)[:, :, None]
    scale_four = scale_value(byte_four)[:, :, None]
    inverse_six = _scale_inverse(byte_six)[:, :, None]
    inverse_four = _scale_inverse(byte_four)[:, :, None]

    factor = power_of_two(-outer_exponent)[:, None, None]
    a_even = _multiply_flushing(low_value(a_size), factor)
    a_odd = _multiply_flushing(high_value(a_size), factor)
    b_even = _multiply_flushing(low_value(b_size), factor)
    b_odd = _multiply_flushing(high_value(b_size), factor)

    a_even6 = _round(a_even, inverse_six, 6.0, SATURATE)
    a_odd6 = _round(a_odd, inverse_six, 6.0, SATURATE)
    b_even6 = _round(b_even, inverse_six, 6.0, SATURATE)
    b_odd6 = _round(b_odd, inverse_six, 6.0, SATURATE)
    a_even4 = _round(a_even, inverse_four, 4.0, SATURATE)
    a_odd4 = _round(a_odd, inverse_four, 4.0, SATURATE)
    b_even4 = _round(b_even, inverse_four, 4.0, SATURATE)
    b_odd4 = _round(b_odd, inverse_four, 4.0, SATURATE)
    error_six = tree_of_words(
        _error(a_even, a_even6, scale_six), _error(a_odd, a_odd6, scale_six),
        _error(b_even, b_even6, scale_six), _error(b_odd, b_odd6, scale_six), ROWS, BLOCKS,
    )  # fmt: skip
    error_four = tree_of_words(
        _error(a_even, a_even4, scale_four), _error(a_odd, a_odd4, scale_four),
        _error(b_even, b_even4, scale_four), _error(b_odd, b_odd4, scale_four), ROWS, BLOCKS,
    )  # fmt: skip
    four_wins = error_four < error_six
    byte = tl.where(four_wins, byte_four, byte_six)
    four_wins = four_wins[:, :, None]
    a_even = tl.where(four_wins, a_even4, a_even6)
    a_odd = tl.where(four_wins, a_odd4, a_odd6)
    b_even = tl.where(four_wins, b_even4, b_even6)
    b_odd = tl.where(four_wins, b_odd4, b_odd6)

    block = block0 + tl.arange(0, BLOCKS)[None, :]
    inside = (row < m)[:, None] & (block < K // 16)
    index = row[:, None].to(tl.int64) * (K // 16) + block
    word = index[:, :, None] * 8 + tl.arange(0, 4)[None, None, :]
    if EXPANDED:
        scale = tl.where(four_wins, scale_four, scale_six)
        a_bytes = _e4m3_pair(a_even * scale, a_odd * scale) | (_signs(a) & 0x8080)
        b_bytes = _e4m3_pair(b_even * scale, b_odd * scale) | (_signs(b) & 0x8080)
        out_ptr = out_ptr.to(tl.pointer_type(tl.int16))
        tl.store(out_ptr + word, a_bytes.to(tl.int16), mask=inside[:, :, None])
        tl.store(out_ptr + word + 4, b_bytes.to(tl.int16), mask=inside[:, :, None])
    else:
        tl.store(out_ptr + word, (_codes(a_even, a << 16) | (_codes(a_odd, a) << 4)).to(tl.uint8), mask=inside[:, :, None])
        tl.store(out_ptr + word + 4, (_codes(b_even, b << 16) | (_codes(b_odd, b) << 4)).to(tl.uint8), mask=inside[:, :, None])
        tl.store(scale_ptr + index, byte.to(tl.uint8), mask=inside)
    if block0 == 0:
        outer = tl.where(outer_max < INFINITY_BITS, power_of_two(outer_exponent), float("nan"))
        tl.store(outer_ptr + row, outer, mask=row < m)


@triton.jit
def load_words(x_ptr, row, block0, m, K: tl.constexpr, BLOCKS: tl.constexpr, STRIDE: tl.constexpr):
    """Words a and b [ROWS, BLOCKS, 4] of a tile of rows of K numbers, STRIDE apart; zeros outside of the row. Rows outside
    read the last one."""
    block = block0 + tl.arange(0, BLOCKS)[None, :, None]
    word = tl.minimum(row, m - 1).to(tl.int64)[:, None, None] * (STRIDE // 2) + block * 8 + tl.arange(0, 4)[None, None, :]
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    if K % (BLOCKS * 16) == 0:
        return tl.load(x_ptr + word), tl.load(x_ptr + word + 4)
    else:
        inside = block < K // 16
        return tl.load(x_ptr + word, mask=inside, other=0), tl.load(x_ptr + word + 4, mask=inside, other=0)


@triton.jit
def larger_words(a, b):
    """Larger magnitudes of the two halves of words."""
    return _max_of_pairs(a & 0x7FFF7FFF, b & 0x7FFF7FFF)


@triton.jit
def row_maximum(pairs):
    """Magnitude bits [ROWS] of the largest number among words [ROWS, BLOCKS, 4]."""
    pairs = tl.reduce(tl.reduce(pairs & 0x7FFF7FFF, 2, _max_of_pairs), 1, _max_of_pairs)
    bits = tl.maximum(pairs & 0xFFFF, pairs >> 16) << 16
    return tl.where(bits < (1 << 23), 0, bits)


@triton.jit
def quantize_three(
    a0, b0, a1, b1, a2, b2, row, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Quantises rows that are three tiles long: 768, 1536, 6144, 12288 numbers."""
    outer_max = row_maximum(_max_of_pairs(_max_of_pairs(larger_words(a0, b0), larger_words(a1, b1)), larger_words(a2, b2)))
    quantize_words(a0, b0, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)
    quantize_words(a1, b1, outer_max, row, BLOCKS, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)
    quantize_words(a2, b2, outer_max, row, 2 * BLOCKS, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)


@triton.jit
def quantize_kernel(
    x_ptr, given_ptr, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, GIVEN_ROWS: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """x [m, K] bfloat16; `given` are magnitude bits, one for GIVEN_ROWS rows (0: each row has its own largest magnitude)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    NUM_BLOCKS: tl.constexpr = K // 16
    if NUM_BLOCKS == 3 * BLOCKS and GIVEN_ROWS == 0:
        a0, b0 = load_words(x_ptr, row, 0, m, K, BLOCKS, K)
        a1, b1 = load_words(x_ptr, row, BLOCKS, m, K, BLOCKS, K)
        a2, b2 = load_words(x_ptr, row, 2 * BLOCKS, m, K, BLOCKS, K)
        quantize_three(a0, b0, a1, b1, a2, b2, row, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED)
    elif BLOCKS >= NUM_BLOCKS:
        a, b = load_words(x_ptr, row, 0, m, K, BLOCKS, K)
        if GIVEN_ROWS == 0:
            outer_max = row_maximum(larger_words(a, b))
        else:
            outer_max = tl.load(given_ptr + tl.minimum(row, m - 1) // GIVEN_ROWS)
        quantize_words(a, b, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, GIVEN_ROWS != 0, EXPANDED)
    else:
        if GIVEN_ROWS == 0:
            pairs = tl.zeros((ROWS, BLOCKS, 4), tl.int32)
            for block0 in range(0, NUM_BLOCKS, BLOCKS):
                a, b = load_words(x_ptr, row, block0, m, K, BLOCKS, K)
                pairs = _max_of_pairs(pairs, larger_words(a, b))
            outer_max = row_maximum(pairs)
        else:
            outer_max = tl.load(given_ptr + tl.minimum(row, m - 1) // GIVEN_ROWS)
        for block0 in range(0, NUM_BLOCKS, BLOCKS):
            a, b = load_words(x_ptr, row, block0, m, K, BLOCKS, K)
            quantize_words(
                a, b, outer_max, row, block0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, GIVEN_ROWS != 0, EXPANDED
            )


# Blocks of 16 numbers in a program, and the most in a tile; up to four a thread. Longer rows come in several tiles.
_PROGRAM_BLOCKS = 512
_LONGEST_TILE = 512


def row_tiling(k: int) -> dict:
    """How a program covers rows of k numbers: ROWS, BLOCKS (of 16, a tile) and num_warps.

    A tile is a power of two. A row of three times a power of two is three tiles, all in registers; one that is longer than a tile
    is read twice, the second time from the cache; else lanes behind the row's end idle.
    """
    blocks = k // 16
    third = blocks // 3
    if blocks % 3 == 0 and third & (third - 1) == 0 and third <= 256:
        rows = max(1, 128 // third)
        return dict(ROWS=rows, BLOCKS=third, num_warps=max(1, rows * third // 32))
    blocks = min(_LONGEST_TILE, triton.next_power_of_2(blocks))
    rows = max(1, _PROGRAM_BLOCKS // blocks)
    return dict(ROWS=rows, BLOCKS=blocks, num_warps=max(1, min(4, rows * blocks // 32)))


def quantize_launch(m: int, k: int, *, given_rows: int, expanded: bool) -> gpu.Launch:
    """Quantises x [m, k] bfloat16. Inputs: x, magnitude bits int32 (any array where given_rows is 0), m.

    Outputs: codes [m, k / 2], outer scales [m], scale bytes [m, k / 16]; or, `expanded`, E4M3 values [m, k] and outer scales.
    """
    return row_launch(quantize_kernel, m, k, row_tiling(k), dict(GIVEN_ROWS=given_rows, EXPANDED=expanded))


def row_launch(kernel, m: int, k: int, tiling: dict, constants: dict) -> gpu.Launch:
    """Launch of a kernel that ends in `quantize_words`, for m rows of k numbers; `constants` holds EXPANDED.

    Outputs: codes [m, k / 2], outer scales [m], scale bytes [m, k / 16]; or, EXPANDED, E4M3 values [m, k] and outer scales.
    """
    num_warps = tiling["num_warps"]
    constants = dict(K=k, ROWS=tiling["ROWS"], BLOCKS=tiling["BLOCKS"], **constants)
    if constants["EXPANDED"]:
        constants["scale_ptr"] = None
        out_shape = gpu.outputs(((m, k), jnp.float8_e4m3fn), ((m,), jnp.float32))
    else:
        out_shape = gpu.outputs(((m, k // 2), jnp.uint8), ((m,), jnp.float32), ((m, k // 16), jnp.uint8))
    return gpu.Launch(kernel, out_shape, (triton.cdiv(m, tiling["ROWS"]),), constants, num_warps)


def operand_of_rows(outputs) -> Nvfp4Array | ExpandedArray:
    """The outputs of a `row_launch` as an operand of a matmul."""
    if len(outputs) == 2:
        return ExpandedArray(*outputs)
    codes, outer_scale, scale_bytes = outputs
    block_scale = jax.lax.bitcast_convert_type(scale_bytes, jnp.float8_e4m3fn)
    return Nvfp4Array(codes=codes, block_scale=block_scale, outer_scale=outer_scale, fp8_exact=True)
