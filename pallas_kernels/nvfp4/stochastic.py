"""Stochastic rounding to E2M1, for gradients only."""

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4 import formats

# Two elements share one draw of 32 bits. scale x gap x (draw + 1/2) is then exact in float32 (4 + 17 bits).
_RANDOM_BITS = 16


def stochastic_magnitudes(magnitude: jax.Array, scale: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds magnitude / scale to one of its two E2M1 neighbours, up with a probability equal to the fraction
    of the gap covered.

    The probability is rounded to a multiple of 2^-16, and is exactly 0 for a number that needs no rounding.
    Above 6 the result saturates.

    Args:
      magnitude: float32 >= 0, any shape.
      scale: positive float32 with at most 4 significant bits (an E4M3 number), broadcasts against magnitude.
      key: JAX random key; one independent draw per element.

    Returns:
      int32 indices 0..7 of E2M1 magnitudes.
    """
    lower = jnp.zeros(magnitude.shape, jnp.int32)
    for value in formats.E2M1_VALUES[1:8]:
        lower += (magnitude >= value * scale).astype(jnp.int32)
    lower_value = formats.e2m1_to_float32(lower.astype(jnp.uint8)) * scale
    gap = jnp.where(lower >= 6, 2.0, jnp.where(lower >= 4, 1.0, 0.5)) * scale
    # Exact: the two are within a factor of two of each other, or the lower neighbour is zero.
    covered = magnitude - lower_value
    pair_shape = (*magnitude.shape[:-1], magnitude.shape[-1] // 2, 1)
    draws = jax.random.bits(key, pair_shape, jnp.uint32)
    draw = jnp.concatenate([draws & 0xFFFF, draws >> 16], axis=-1).reshape(magnitude.shape)
    # The middle of each of the 2^16 equal steps, so that neither end is favoured.
    fraction = (draw.astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-_RANDOM_BITS
    return jnp.minimum(lower + (covered > fraction * gap).astype(jnp.int32), 7)
