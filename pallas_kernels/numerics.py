"""Arithmetic that a compiler cannot bend.

XLA is free to drop a narrowing cast inside a jitted program, to turn a division by a broadcast value into a multiplication by
its reciprocal, and to contract ``a * b + c`` into one fused multiply-add in one program and not in another. Each helper here
gives the same bits eagerly, under jit, inside a larger program and inside a gradient. They are plain jnp: the GPU kernels have
the same names for the same steps.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


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
    barrier hides that the divisor is a broadcast.
    """
    # Either choice is the denominator. It is a choice by the numerator so that `jax.vmap` over the numerator
    # alone makes a batch of denominators before the barrier, and does not broadcast one behind it.
    denominator = jnp.where(numerator == numerator, denominator, denominator)
    return numerator / lax.optimization_barrier(denominator)


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
