"""Arithmetic that a compiler cannot bend.

XLA is free to drop a narrowing cast inside a jitted program, to turn a division by a broadcast value into a multiplication by
its reciprocal, and to contract ``a * b + c`` into one fused multiply-add in one program and not in another. Each helper here
gives the same bits eagerly, under jit, inside a larger program and inside a gradient. They are plain jnp: the GPU kernels have
the same names for the same steps (`triton_numerics`).

XLA's own exponential, square root and division are none of these: each backend has its own, and on a GPU a division is off by
up to two units in the last place. `exp`, `sigmoid` and `reciprocal_sqrt` are therefore made of single additions and
multiplications, which are the same everywhere.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)

# 2 ** f = 1 + c1 f + ... + c5 f ** 5 for |f| <= 0.5, relative error below 2^-23.3 (minimax with the constant held at 1).
EXP2_COEFFICIENTS = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
LOG2_E = 1.4426950408889634
# 1 / d = (210 - 144 d + 32 d ** 2) / 99 for 1 <= d <= 2, relative error 1 / 99 (Chebyshev's polynomial of degree 3).
RECIPROCAL_COEFFICIENTS = (210 / 99, -144 / 99, 32 / 99)


@jax.custom_jvp
def round_to_bfloat16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds float32 to the nearest bfloat16, ties to even, by integer operations on the bits.

    ``x.astype(bfloat16).astype(float32)`` is removed by XLA under its default flags ("excess precision"), and a function would
    then compute other numbers inside a larger program than alone.

    Args:
      x: float32 array of any shape. Infinities stay; NaN stays NaN; values beyond the largest bfloat16 become infinite.

    Returns:
      bfloat16 array of the same shape. The final cast is exact, so that dropping it is harmless. The derivative goes straight
      through, as that of a cast does (bit operations alone would have none).
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    round_up = jnp.uint32(0x7FFF) + ((bits >> 16) & 1)
    rounded = (bits + round_up) & jnp.uint32(0xFFFF0000)
    is_nan = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    rounded = jnp.where(is_nan, jnp.uint32(0x7FC00000), rounded)
    return lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


@round_to_bfloat16.defjvp
def _round_to_bfloat16_jvp(primals, tangents):
    return round_to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


def separate_product(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """Keeps a product from being contracted with a later add into one fused multiply-add.

    A minimum and a maximum stand between the two; no compiler pass looks through them. An infinite product becomes the largest
    finite float32 (which bfloat16 rounding turns back into infinity); NaN stays NaN. Not needed where the product is exact.
    """
    return jnp.clip(product, -_FLOAT32_MAX, _FLOAT32_MAX)


def divide(numerator: Float[Array, "..."], denominator: Float[Array, "..."]) -> Float[Array, "..."]:
    """Correctly rounded float32 division, also where the denominator is a scalar or is broadcast.

    XLA rewrites ``x / broadcast(c)`` as ``x * (1 / c)``, which is wrong in the last bit for about a quarter of all ``x``. A
    barrier hides that the divisor is a broadcast. On a GPU XLA's division is only good to two units in the last place; there the
    quotient's significand is corrected in integers. Quotients below 2^-126 are zero or rounded twice.
    """
    # Either choice is the denominator. It is a choice by the numerator so that `jax.vmap` over the numerator
    # alone makes a batch of denominators before the barrier, and does not broadcast one behind it.
    denominator = jnp.where(numerator == numerator, denominator, denominator)
    quotient = numerator / lax.optimization_barrier(denominator)
    return _nearest_quotient(numerator, denominator, quotient) if dispatch.platform() == "gpu" else quotient


def _nearest_quotient(numerator, denominator, guess):
    """The correctly rounded quotient, where the guess is within a few units in its last place.

    The remainder is worked out modulo 2^32 on the 24-bit significands. It is small, so that what is left of it is all of it.
    """
    numerator, denominator = jnp.broadcast_arrays(numerator, denominator)
    (n_bits, d_bits, q_bits) = (lax.bitcast_convert_type(x, jnp.int32) for x in (numerator, denominator, guess))
    exponent = lambda bits: (bits >> 23) & 0xFF  # noqa: E731
    significand = lambda bits: (bits & 0x7FFFFF) | 0x800000  # noqa: E731
    n, d = significand(n_bits), significand(d_bits)
    shift = jnp.where(n >= d, 23, 24)
    # The guess's significand, in units of the quotient's last place even where it crossed a power of two.
    quotient_exponent = exponent(n_bits) - exponent(d_bits) + 127 - (shift - 23)
    q = jnp.where(exponent(q_bits) > quotient_exponent, significand(q_bits) << 1, significand(q_bits))
    q = jnp.where(exponent(q_bits) < quotient_exponent, significand(q_bits) >> 1, q)
    remainder = (n << shift) - q * d
    for _ in range(4):
        low, high = remainder < 0, remainder >= d
        q = q + jnp.where(low, -1, jnp.where(high, 1, 0))
        remainder = remainder + jnp.where(low, d, jnp.where(high, -d, 0))
    q = q + ((2 * remainder > d) | ((2 * remainder == d) & (q & 1 == 1))).astype(jnp.int32)
    # Adding to the exponent's bits also carries a significand that was rounded up to 2^24.
    bits = ((quotient_exponent - 1) << 23) + q
    exact = lax.bitcast_convert_type(bits | ((n_bits ^ d_bits) & jnp.int32(-(2**31))), jnp.float32)
    normal = lambda bits: (exponent(bits) > 0) & (exponent(bits) < 0xFF)  # noqa: E731
    inside = normal(n_bits) & normal(d_bits) & (quotient_exponent > 0) & (quotient_exponent < 0xFF)
    return jnp.where(inside, exact, guess)


def ordered_sum(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Sums over one axis in float32 by a fixed binary tree: first half plus second half, again and again.

    The length is padded with zeros to a power of two, so the order depends on the length alone, never on what else is in the
    program. ``jnp.sum`` picks another order for another shape. Fastest over an axis that is not the last: the adds then run over
    whole vectors.
    """
    axis %= x.ndim
    x = x.astype(jnp.float32)
    length = x.shape[axis]
    padded = 1 << max(0, (length - 1).bit_length())
    if padded != length:
        x = jnp.pad(x, [(0, padded - length if i == axis else 0) for i in range(x.ndim)])
    while padded > 1:
        padded //= 2
        x = lax.slice_in_dim(x, 0, padded, axis=axis) + lax.slice_in_dim(x, padded, 2 * padded, axis=axis)
    return lax.squeeze(x, (axis,))


def blocked_sum(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sums over the last axis in float32 by a fixed tree: blocks of 16 neighbours by `ordered_sum`, then the blocks' sums by it.

    A kernel's thread can hold a block, so that most of the tree needs no exchange between threads.
    """
    padding = -x.shape[-1] % 16
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return ordered_sum(ordered_sum(x.reshape(*x.shape[:-1], -1, 16)))


def exact_exp2(exponent: jax.Array) -> Float[Array, "..."]:
    """2 ** exponent for integer exponents in -126..127, from the bits: ``jnp.exp2`` promises no exact powers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def round_to(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
    """Rounds float32 to `dtype`, which is bfloat16 (see `round_to_bfloat16`) or float32 (nothing to do).

    Raises:
      TypeError: any other type.
    """
    if dtype == jnp.bfloat16:
        return round_to_bfloat16(x)
    if dtype == jnp.float32:
        return x.astype(jnp.float32)
    raise TypeError(f"activations are bfloat16 or float32, not {jnp.dtype(dtype)}")


def _exp2(t: jax.Array) -> jax.Array:
    """2 ** t for -127 <= t <= 128, to 2^-22; below 2^-126 some number that is smaller still, and 0 for -127."""
    integer = lax.round(t, lax.RoundingMethod.TO_NEAREST_EVEN)
    fraction = t - integer
    power = jnp.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        power = separate_product(power * fraction) + coefficient
    # Adding to the exponent's bits multiplies by a power of two: 1 x 2^128 becomes infinity and 1 x 2^-127 zero.
    bits = lax.bitcast_convert_type(power, jnp.int32) + (integer.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """e ** x in float32 from additions and multiplications alone, so that CPU, GPU and kernels give the same bits.

    Relative error below 2^-20 for |x| < 11, growing to 2^-17 at the ends (x log2(e) is rounded once). exp(0) is 1, exp(-inf) is
    0, overflow is infinite, NaN stays NaN. What would lie below 2^-126 is some number between 0 and that.
    """
    x = x.astype(jnp.float32)
    return jnp.where(x == x, _exp2(jnp.clip(x * LOG2_E, -127.0, 128.0)), x)


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / (1 + e ** -x) in float32, from the same operations as `exp`: no division.

    Relative error below 2^-20 for x > -11 and 2^-17 below; 0 or less than 2^-126 for x < -88. For NaN it is any number: whoever
    multiplies it by x has NaN.
    """
    x = x.astype(jnp.float32)
    e = _exp2(jnp.clip(jnp.abs(x) * -LOG2_E, -127.0, 0.0))
    d = 1.0 + e
    constant, linear, quadratic = RECIPROCAL_COEFFICIENTS
    inverse = separate_product((separate_product(d * quadratic) + linear) * d) + constant
    for _ in range(2):
        inverse = inverse * (2.0 - separate_product(d * inverse))
    return separate_product(inverse * jnp.where(x < 0.0, e, 1.0))


def reciprocal_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / sqrt(x) for positive float32 x that are not subnormal, to 2^-22: Newton's steps from a guess by the exponent's bits.

    Infinity and NaN give NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    inverse = lax.bitcast_convert_type(0x5F3759DF - (bits >> 1), jnp.float32)
    half = 0.5 * x
    for _ in range(3):
        inverse = inverse * (1.5 - separate_product(half * (inverse * inverse)))
    return jnp.where(x <= _FLOAT32_MAX, inverse, jnp.nan)
