"""The quantising kernel of training: bfloat16 by the `fp8_exact` rule, packed or as E4M3 numbers. Bit-equal to the reference.

A GPU can spend about 26 instructions a number before quantising is slower than copying, so every step here is counted: about 15.

* A thread holds whole blocks: 16 numbers are 8 words of two, loaded as two vectors of four words.
* Largest magnitudes are found on pairs of 16-bit integers.
* A block's magnitudes become float16 with its largest in [2^15, 2^16): an addition to the exponents and a shift. They keep their
  8 significant bits from 2^-14 on; what is smaller counts as zero in the comparisons below, where it cannot be seen. From here on
  an instruction works on two numbers.
* y / scale is y x (1 / scale) in float16. A number of 8 significant bits is either on a rounding threshold x scale or at least
  2^-8 of it away. 1 / scale errs by 2^-12 of it and its product with y by 2^-11 more, so numbers off a threshold stay on their
  side; the product puts thresholds on themselves, since 2^-12 of them is less than half their spacing. No decision changes.
* Rounding t to E2M1, ties to even: with m = max(t, 1), t + m x 2^9 is rounded to multiples of half the binade of m, which is
  the spacing of E2M1 there, and taking m x 2^9 away leaves the result: two multiply-adds. A tie is decided by the last bit of
  m x 2^9, which is even where t is a threshold.
* The candidates' errors are exact in float16: code x scale is within a factor of two of y, or zero. Their difference is zero for
  a number whose code is zero by both. Any other number is a multiple of 8 and the difference at most 10240, so it is exact too,
  and so is the sum of the block's 16: the matrix unit adds them (`triton_halves.sums`).
* The reference compares two sums in float32, rounded in its own order. Together they err by less than 1, so its choice is the
  sign of the exact difference, a multiple of 8, unless that is zero. Then they are equal if neither was rounded: where all
  numbers are at least 2, errors are multiples of 2^-6 and sums less than 2^18. Else rounding may decide: a tile with such a
  block (one block of 100,000 for normal numbers) is worked out again in float32, in the reference's order (`_float_candidates`).
* Rows whose largest is below 2^-80 are worked out in float32, too, and all with a given largest magnitude, which may saturate.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.nvfp4 import triton_halves as halves
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

_SIZES = tl.constexpr(0x7FFF7FFF)
_SIGNS = tl.constexpr(-0x7FFF8000)  # of the two numbers of a word
_SMALL_ROW_BITS = tl.constexpr((127 - 80) << 23)


@triton.jit
def _multiply_flushing(x, y):
    """x * y, where a subnormal x counts as zero."""
    if halves.ASSEMBLY:
        return tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.where((float_bits(x) & 0x7FFFFFFF) < (1 << 23), 0.0, x) * y


@triton.jit
def bfloat16_pair(low, high):
    """Two float32 as a word of two bfloat16, to nearest even."""
    if halves.ASSEMBLY:
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
def _round(magnitude, inverse, LARGEST: tl.constexpr):
    """The E2M1 magnitude nearest to magnitude x inverse, ties to even."""
    t = magnitude * inverse
    m = tl.maximum(t, 1.0)
    value = tl.fma(m, -4194304.0, tl.fma(m, 4194304.0, t))
    return tl.minimum(value, LARGEST)


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
def _float_candidates(a_size, b_size, factor, byte_six, byte_four, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The rule in float32, sums in the reference's order: words of the values by both candidates, and whether the second wins.

    y / scale is y x (1 / scale) here too, where the product errs by less than 2^-24; rounding to E2M1 with 2^22 in place of 2^9.
    Subnormal numbers are flushed by the multiplication that applies the outer scale.
    """
    scale_six = scale_value(byte_six)[:, :, None]
    scale_four = scale_value(byte_four)[:, :, None]
    inverse_six = _scale_inverse(byte_six)[:, :, None]
    inverse_four = _scale_inverse(byte_four)[:, :, None]
    a_even = _multiply_flushing(low_value(a_size), factor)
    a_odd = _multiply_flushing(high_value(a_size), factor)
    b_even = _multiply_flushing(low_value(b_size), factor)
    b_odd = _multiply_flushing(high_value(b_size), factor)
    a_even6 = _round(a_even, inverse_six, 6.0)
    a_odd6 = _round(a_odd, inverse_six, 6.0)
    b_even6 = _round(b_even, inverse_six, 6.0)
    b_odd6 = _round(b_odd, inverse_six, 6.0)
    a_even4 = _round(a_even, inverse_four, 4.0)
    a_odd4 = _round(a_odd, inverse_four, 4.0)
    b_even4 = _round(b_even, inverse_four, 4.0)
    b_odd4 = _round(b_odd, inverse_four, 4.0)
    error_six = tree_of_words(
        _error(a_even, a_even6, scale_six), _error(a_odd, a_odd6, scale_six),
        _error(b_even, b_even6, scale_six), _error(b_odd, b_odd6, scale_six), ROWS, BLOCKS,
    )  # fmt: skip
    error_four = tree_of_words(
        _error(a_even, a_even4, scale_four), _error(a_odd, a_odd4, scale_four),
        _error(b_even, b_even4, scale_four), _error(b_odd, b_odd4, scale_four), ROWS, BLOCKS,
    )  # fmt: skip
    return (
        halves.pack(a_even6, a_odd6), halves.pack(b_even6, b_odd6), halves.pack(a_even4, a_odd4), halves.pack(b_even4, b_odd4),
        error_four < error_six,
    )  # fmt: skip


@triton.jit
def _bitwise_and(a, b):
    return a & b


@triton.jit
def quantize_words(
    a, b, outer_max, row, block0, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SATURATE: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Quantises and stores words a and b [ROWS, BLOCKS, 4] (the first and second 8 numbers of blocks block0...), given magnitude
    bits [ROWS] for the outer scales: the rows' own, or any (SATURATE). Whole columns of blocks are in or out of the row."""
    live = (outer_max < INFINITY_BITS) & (outer_max >= SMALLEST_AMAX_BITS)
    outer_exponent = tl.where(live, binary_outer_exponent(outer_max), 0)
    factor = power_of_two(-outer_exponent)[:, None, None]
    a_size = a & _SIZES
    b_size = b & _SIZES
    pairs = tl.reduce(halves.larger_integers(a_size, b_size), 2, halves.larger_integers)
    if SATURATE:
        block_max = tl.maximum(pairs & 0xFFFF, pairs >> 16) << 16
        block_max = tl.where(block_max < (1 << 23), 0, block_max)
        keep = tl.where(live, -1, 0)[:, None, None]
        exponent = (block_max >> 23) - 127 - outer_exponent[:, None]
        exponent = tl.where(live[:, None], exponent, -127)
        fraction = block_max & FRACTION_MASK
        byte_six = nearest_sixth(exponent, fraction)
        byte_four = nearest_quarter(exponent, fraction)
        scales = ((byte_six + 64) << 7) | ((byte_four + 64) << 23)
        a6, b6, a4, b4, four_wins = _float_candidates(a_size & keep, b_size & keep, factor, byte_six, byte_four, ROWS, BLOCKS)
    else:
        # y = x / outer, with the block's largest in [2^15, 2^16), or less where the smallest scale limits.
        pairs = halves.larger_integers(pairs, halves.swapped(pairs))
        # A dead row is all zero, the signs too: everything is too small for its offset.
        smallest = tl.where(live, (outer_exponent + 124) << 7, 0x7FFF + 3840)[:, None]
        exponent = tl.maximum(pairs & 0x7F80, smallest)
        offset = halves.both(3840 - exponent)
        scales = halves.scales_of_largest(halves.from_bfloat16(pairs, offset))
        scales = halves.larger(scales, tl.where(exponent == smallest, 0x7000, 0))
        inverses = halves.inverses(scales)
        a_y = halves.from_bfloat16(a_size, offset[:, :, None])
        b_y = halves.from_bfloat16(b_size, offset[:, :, None])
        six = halves.low_twice(scales)[:, :, None]
        four = halves.high_twice(scales)[:, :, None]
        inverse_six = halves.low_twice(inverses)[:, :, None]
        inverse_four = halves.high_twice(inverses)[:, :, None]
        a6 = halves.round_to_e2m1(a_y, inverse_six)
        b6 = halves.round_to_e2m1(b_y, inverse_six)
        a4 = halves.round_to_e2m1(a_y, inverse_four)
        b4 = halves.round_to_e2m1(b_y, inverse_four)
        difference = halves.sums(
            halves.difference_of_errors(a_y, a4, four, a6, six), halves.difference_of_errors(b_y, b4, four, b6, six), ROWS, BLOCKS
        )
        four_wins = difference < 0.0
        large = tl.reduce(a_y & b_y, 2, _bitwise_and)
        # Scales as they are: exponents of 2^-3 in the row's unit are the smallest, and were made 15.
        scales += (exponent - smallest) * 0x80008 - 18 * 0x4000400
        # Bits 14: at least 2. (Blocks of one scale have one code by both candidates.)
        unclear = (difference == 0.0) & ((large & 0x40004000) != 0x40004000) & ((scales & 0xFFFF) != (scales >> 16))
        unclear |= (live & (outer_max < _SMALL_ROW_BITS))[:, None]
        if tl.max(tl.where(unclear, 1, 0)) > 0:
            byte_six = ((scales & 0xFFFF) >> 7) - 64
            byte_four = (scales >> 23) - 64
            keep = tl.where(live, _SIZES, 0)[:, None, None]
            a6, b6, a4, b4, four_wins = _float_candidates(a & keep, b & keep, factor, byte_six, byte_four, ROWS, BLOCKS)

    scale = tl.where(four_wins, halves.high_twice(scales), halves.low_twice(scales))
    a_value = tl.where(four_wins[:, :, None], a4, a6)
    b_value = tl.where(four_wins[:, :, None], b4, b6)
    sign = tl.where(live, _SIGNS, 0)[:, None, None]
    block = block0 + tl.arange(0, BLOCKS)[None, :]
    inside = (row < m)[:, None] & (block < K // 16)
    index = row[:, None].to(tl.int64) * (K // 16) + block
    if EXPANDED:
        a_bytes = halves.to_e4m3(halves.product(a_value, scale[:, :, None]) | (a & sign))
        b_bytes = halves.to_e4m3(halves.product(b_value, scale[:, :, None]) | (b & sign))
        out_ptr = out_ptr.to(tl.pointer_type(tl.int16))
        word = index[:, :, None] * 8 + tl.arange(0, 4)[None, None, :]
        tl.store(out_ptr + word, a_bytes, mask=inside[:, :, None])
        tl.store(out_ptr + word + 4, b_bytes, mask=inside[:, :, None])
    else:
        codes = tl.join(
            halves.e2m1_codes(halves.times_smallest(a_value) | (a & sign), ROWS, BLOCKS),
            halves.e2m1_codes(halves.times_smallest(b_value) | (b & sign), ROWS, BLOCKS),
        )
        out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
        tl.store(out_ptr + index[:, :, None] * 2 + tl.arange(0, 2)[None, None, :], codes, mask=inside[:, :, None])
        tl.store(scale_ptr + index, (((scale & 0xFFFF) >> 7) - 64).to(tl.uint8), mask=inside)
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
    return halves.larger_integers(a & _SIZES, b & _SIZES)


@triton.jit
def row_maximum(pairs):
    """Magnitude bits [ROWS] of the largest number among words [ROWS, BLOCKS, 4]."""
    pairs = tl.reduce(tl.reduce(pairs, 2, halves.larger_integers), 1, halves.larger_integers)
    bits = tl.maximum(pairs & 0xFFFF, pairs >> 16) << 16
    return tl.where(bits < (1 << 23), 0, bits)


@triton.jit
def quantize_three(
    a0, b0, a1, b1, a2, b2, row, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """Quantises rows that are three tiles long: 768, 1536, 6144, 12288 numbers."""
    outer_max = row_maximum(
        halves.larger_integers(halves.larger_integers(larger_words(a0, b0), larger_words(a1, b1)), larger_words(a2, b2))
    )
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
                pairs = halves.larger_integers(pairs, larger_words(a, b))
            outer_max = row_maximum(pairs)
        else:
            outer_max = tl.load(given_ptr + tl.minimum(row, m - 1) // GIVEN_ROWS)
        for block0 in range(0, NUM_BLOCKS, BLOCKS):
            a, b = load_words(x_ptr, row, block0, m, K, BLOCKS, K)
            quantize_words(
                a, b, outer_max, row, block0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, GIVEN_ROWS != 0, EXPANDED
            )


# Blocks of 16 numbers in a program, and the most in a tile; two a thread. Longer rows come in several tiles.
_PROGRAM_BLOCKS = 128
_LONGEST_TILE = 512


def row_tiling(k: int) -> dict:
    """How a program covers rows of k numbers: ROWS, BLOCKS (of 16, a tile) and num_warps.

    Few warps, since what crosses warps waits at barriers. A tile is a power of two. A row of three times a power of two is three
    tiles, all in registers; one that is longer than a tile is read twice, the second time from the cache; else lanes behind the
    row's end idle.
    """
    blocks = k // 16
    third = blocks // 3
    if blocks % 3 == 0 and third & (third - 1) == 0 and third <= 256:
        rows = max(1, 32 // third)
        return dict(ROWS=rows, BLOCKS=third, num_warps=max(1, rows * third // 32))
    blocks = min(_LONGEST_TILE, triton.next_power_of_2(blocks))
    rows = max(1, _PROGRAM_BLOCKS // blocks)
    return dict(ROWS=rows, BLOCKS=blocks, num_warps=max(1, rows * blocks // 64))


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
