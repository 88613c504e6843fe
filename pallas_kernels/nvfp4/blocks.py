"""How both families of rules cut a matrix into blocks, and find the largest magnitudes."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.nvfp4 import formats
from pallas_kernels.nvfp4.rules import ScaleRule

INFINITY_BITS = 0x7F800000
_SMALLEST_NORMAL_BITS = 1 << 23
# Below this the CPU's flushing of subnormal numbers would begin to show in the scales.
SMALLEST_AMAX_BITS = (127 - 100) << 23

# Axes of a matrix that is cut into blocks: [..., M / r, r, Q, 16], where r is the number of rows in a block.
ROWS_IN_BLOCK, COLUMNS_IN_BLOCK = -3, -1


def to_blocks(x: jax.Array, rule: ScaleRule) -> jax.Array:
    """[..., M, K] -> [..., M / r, r, K / 16, 16]."""
    rows = rule.block[0]
    *batch, m, k = x.shape
    return x.reshape(*batch, m // rows, rows, k // formats.BLOCK, formats.BLOCK)


def from_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per element of the blocks, or per 16 of them, back to [..., M, K] or [..., M, K / 16]."""
    return x.reshape(*shape[:-1], -1)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Bits of |x| as int32, whose order is that of the magnitudes: finite < infinity < NaN. Subnormal numbers
    become zero.

    A CPU flushes subnormal numbers and a GPU need not; stating it here makes it the same everywhere.
    """
    bits = formats.float32_bits(x) & 0x7FFFFFFF
    return jnp.where(bits < _SMALLEST_NORMAL_BITS, 0, bits)


def block_maximum(bits: jax.Array) -> jax.Array:
    """Largest of each block: [..., M / r, r, Q, 16] -> [..., M / r, 1, Q, 1]."""
    return bits.max(axis=(ROWS_IN_BLOCK, COLUMNS_IN_BLOCK), keepdims=True)


def outer_maximum(block_max: jax.Array, rule: ScaleRule, amax: jax.Array | None) -> jax.Array:
    """Bits of the magnitude that the outer scale is made for: [..., M, 1, 1, 1] or, for one per matrix, [...,
    1, 1, 1, 1].

    A given `amax` takes the place of the largest magnitude, except where the data holds infinity or NaN.
    """
    axes = (-2,) if rule.outer == "row" else (-4, -2)
    own = block_max.max(axis=axes, keepdims=True)
    if amax is None:
        return own
    given = magnitude_bits(jnp.asarray(amax, jnp.float32)).reshape(own.shape)
    return jnp.where(own >= INFINITY_BITS, own, given)


def outer_scale_shape(shape: tuple[int, ...], rule: ScaleRule) -> tuple[int, ...]:
    """Shape of the outer scales of a tensor [..., M, K]."""
    return shape[:-1] if rule.outer == "row" else shape[:-2]


def block_sum(x: jax.Array) -> jax.Array:
    """Sum over each block in float32 by a fixed tree, rows of a tile and then columns, halves to halves."""
    x = numerics.ordered_sum(x, axis=ROWS_IN_BLOCK)
    return numerics.ordered_sum(x, axis=-1)[..., None, :, None]


def signed_codes(magnitude: jax.Array, negative: jax.Array) -> jax.Array:
    """E2M1 codes (uint8) from the index of the magnitude (0..7) and the sign."""
    return (magnitude | (negative.astype(jnp.int32) << 3)).astype(jnp.uint8)


def float_from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
