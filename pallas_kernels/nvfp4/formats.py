"""The two small floating-point formats of NVFP4, E2M1 and E4M3, read and written by integer operations.

XLA drops narrowing casts inside jitted programs, and float8 casts do not saturate; bit work has neither
problem, and costs no look-up.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK = 16  # numbers that share a block scale along a row

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0

# Halfway points between neighbouring magnitudes. To nearest even: at a halfway point the code with an even
# index wins, so it takes `>` to pass points 0, 2, 4 and 6, and `>=` to pass the others.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

_E4M3_TO_FLOAT32_BIAS = (127 - 7) << 23


def float32_bits(x: Float[Array, "..."]) -> jax.Array:
    """The bits of a float32 array as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def e2m1_to_float32(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of E2M1 codes 0..15 (bit 3 is the sign), as float32."""
    magnitude = (codes & 7).astype(jnp.int32)
    # Bit 0 is the fraction, bits 1 and 2 the exponent (bias 1); magnitudes 0 and 1 have exponent 0 and no
    # leading one.
    normal = lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, 0.5 * magnitude.astype(jnp.float32), normal)
    sign = (codes & 8).astype(jnp.int32) << 28
    return lax.bitcast_convert_type(float32_bits(value) | sign, jnp.float32)


def float32_to_e2m1_magnitude(x: Float[Array, "..."], scale: Float[Array, "..."] | float = 1.0) -> jax.Array:
    """The index 0..7 of the E2M1 magnitude nearest to x / scale, ties to even, saturating at 6. No division
    takes place.

    Args:
      x: float32 >= 0.
      scale: positive float32, broadcasts against x. The result is exact where scale has at most 20
        significant bits.

    Returns:
      int32 array.
    """
    index = jnp.zeros(jnp.broadcast_shapes(jnp.shape(x), jnp.shape(scale)), jnp.int32)
    for i, midpoint in enumerate(E2M1_MIDPOINTS):
        threshold = midpoint * scale
        index += (x >= threshold if i % 2 else x > threshold).astype(jnp.int32)
    return index


def e4m3_to_float32(byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of all 256 E4M3 bytes (the "fn" variant: no infinity, 0x7F and 0xFF are NaN), as float32."""
    magnitude = (byte & 0x7F).astype(jnp.int32)
    normal = lax.bitcast_convert_type((magnitude << 20) + _E4M3_TO_FLOAT32_BIAS, jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.float32(jnp.nan), value)
    sign = (byte & 0x80).astype(jnp.int32) << 24
    return lax.bitcast_convert_type(float32_bits(value) | sign, jnp.float32)


def float32_to_e4m3(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Rounds 0 <= x to the nearest E4M3 byte, ties to even; above 448 it saturates to 448."""
    # The minimum also keeps a product that made x from being contracted with the addition below.
    x = jnp.minimum(x, E4M3_MAX)
    bits = float32_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (_E4M3_TO_FLOAT32_BIAS >> 20)
    # Below 2^-6 the spacing is 2^-9, and that is the spacing of float32 at 2^14: the addition rounds, nearest
    # even.
    subnormal = float32_bits(x + 2.0**14) & 0xF
    return jnp.where(x < 2.0**-6, subnormal, normal).astype(jnp.uint8)


def bytes_to_e4m3(byte: UInt8[Array, "..."]) -> jax.Array:
    """Relabels bytes as float8_e4m3fn."""
    return lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)
