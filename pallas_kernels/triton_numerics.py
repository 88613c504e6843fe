"""The helpers of `numerics` for use inside Triton kernels: the same names, the same operations in the same order, the same bits.

The launches switch contraction of multiply-adds off (`gpu.run`), so a product followed by an add is two roundings here without
further ado. `separate_product` is needed only for its treatment of infinity.
"""

import triton
import triton.language as tl

from pallas_kernels import numerics

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in numerics.EXP2_COEFFICIENTS)
_R0, _R1, _R2 = (tl.constexpr(c) for c in numerics.RECIPROCAL_COEFFICIENTS)
_LOG2_E = tl.constexpr(numerics.LOG2_E)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which has no bfloat16 arithmetic and no assembly
_LARGEST_INTEGER = tl.constexpr(0x7FFFFFFF)
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # x + this has x's nearest integer, ties to even, in its low bits


@triton.constexpr_function
def log2(size):
    """Exponent of a power of two, at compile time."""
    return size.bit_length() - 1


def padded(length: int) -> int:
    """The next power of two: what `ordered_sum` fills a length up to with zeros."""
    return triton.next_power_of_2(length)


def num_warps(size: int) -> int:
    """Warps for a program that holds `size` numbers at a time: 16 to a lane, at most 8 warps."""
    return min(8, max(1, size // 512))


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Rounds float32 to nearest even; `dtype` is bfloat16 or float32.

    On a GPU this is the cast. Triton's interpreter truncates, so there it is done on the bits.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        high = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def separate_product(product):
    """The product, with infinity replaced by the largest float32; NaN stays."""
    product = tl.where(product > _FLOAT32_MAX, _FLOAT32_MAX, product)
    return tl.where(product < -_FLOAT32_MAX, -_FLOAT32_MAX, product)


@triton.jit
def ordered_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS], float32; SIZE a power of two, filled up with zeros.

    A sum of two is the same in either order, so the layout of the registers cannot change the tree.
    """
    for level in tl.static_range(log2(SIZE)):
        x = tl.sum(tl.reshape(x, (ROWS, 2, SIZE >> (level + 1))), axis=1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def blocked_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS], float32, see `numerics.blocked_sum`; SIZE a power of two of at least 16, filled up with zeros."""
    BLOCKS: tl.constexpr = SIZE // 16
    x = tl.reshape(x, (ROWS, BLOCKS, 16))
    for level in tl.static_range(4):
        x = tl.sum(tl.reshape(x, (ROWS, BLOCKS, 2, 8 >> level)), axis=2)
    return ordered_sum(tl.reshape(x, (ROWS, BLOCKS)), ROWS, BLOCKS)


@triton.jit
def _exp2(t):
    shifted = t + _MAGIC
    fraction = t - (shifted - _MAGIC)
    power = fraction * _C5 + _C4
    power = power * fraction + _C3
    power = power * fraction + _C2
    power = power * fraction + _C1
    power = power * fraction + 1.0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e ** x, see `numerics.exp`."""
    return tl.where(x == x, _exp2(tl.minimum(tl.maximum(x * _LOG2_E, -127.0), 128.0)), x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e ** -x), see `numerics.sigmoid`."""
    e = _exp2(tl.maximum(tl.abs(x) * -_LOG2_E, -127.0))
    d = 1.0 + e
    inverse = (d * _R2 + _R1) * d + _R0
    inverse = inverse * (2.0 - d * inverse)
    inverse = inverse * (2.0 - d * inverse)
    return inverse * tl.where(x < 0.0, e, 1.0)


@triton.jit
def reciprocal_sqrt(x):
    """1 / sqrt(x), see `numerics.reciprocal_sqrt`."""
    guess = 0x5F3759DF - (x.to(tl.int32, bitcast=True) >> 1)
    inverse = guess.to(tl.float32, bitcast=True)
    half = 0.5 * x
    inverse = inverse * (1.5 - separate_product(half * (inverse * inverse)))
    inverse = inverse * (1.5 - separate_product(half * (inverse * inverse)))
    inverse = inverse * (1.5 - separate_product(half * (inverse * inverse)))
    return tl.where(x <= _FLOAT32_MAX, inverse, float("nan"))


@triton.jit
def sortable(x):
    """Integers in the order of the numbers: -0 equals 0, NaN is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, keys, _LARGEST_INTEGER)
