"""What the quantising kernels share: bits of floating-point numbers, and the `fp8_exact` rule's scales (see `fp8_exact.py`)."""

import triton
import triton.language as tl

SMALLEST_NORMAL_BITS = tl.constexpr(1 << 23)
INFINITY_BITS = tl.constexpr(0x7F800000)
SMALLEST_AMAX_BITS = tl.constexpr((127 - 100) << 23)
FRACTION_MASK = tl.constexpr((1 << 23) - 1)


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|; subnormal numbers become zero."""
    bits = float_bits(x) & 0x7FFFFFFF
    return tl.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent for -126..127."""
    return from_bits((exponent + 127) << 23)


@triton.jit
def binary_outer_exponent(outer_max):
    """Exponent of the smallest power of two with amax <= 384 x it."""
    above = ((outer_max & FRACTION_MASK) > (1 << 22)).to(tl.int32)
    return (outer_max >> 23) - 127 - 8 + above


@triton.jit
def _step(fraction, THRESHOLD: tl.constexpr, STEP: tl.constexpr):
    return tl.where(fraction >= THRESHOLD, STEP, 0)


@triton.jit
def nearest_sixth(exponent, fraction):
    """Byte of the scale nearest to amax / 6; see the reference for the thresholds, here as fraction bits."""
    byte = (exponent << 3) + 34
    byte += _step(fraction, 1 << 18, 2) + _step(fraction, 5 << 19, 4) + _step(fraction, 11 << 19, 2)
    return tl.minimum(tl.maximum(byte, 0x10), 0x68)


@triton.jit
def nearest_quarter(exponent, fraction):
    byte = (exponent << 3) + 40
    byte += _step(fraction, 1 << 20, 2) + _step(fraction, 3 << 20, 2) + _step(fraction, 3 << 21, 4)
    return tl.minimum(tl.maximum(byte, 0x10), 0x6C)


@triton.jit
def scale_value(byte):
    return from_bits((byte << 20) + ((127 - 7) << 23))
