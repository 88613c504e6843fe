"""Rotary position embedding in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import round_to, separate_product
from pallas_kernels.rows import map_row_tiles


def rotary(x_MHK, cos_MK, sin_MK):
    half = x_MHK.shape[-1] // 2

    def body(tile):
        x_RHK, cos_RK, sin_RK = tile
        first, second = x_RHK[..., :half].astype(jnp.float32), x_RHK[..., half:].astype(jnp.float32)
        cos_R1K, sin_R1K = cos_RK[:, None, :], sin_RK[:, None, :]
        rotated = (
            separate_product(first * cos_R1K) - separate_product(second * sin_R1K),
            separate_product(second * cos_R1K) + separate_product(first * sin_R1K),
        )
        return round_to(jnp.concatenate(rotated, axis=-1), x_RHK.dtype)

    return map_row_tiles(body, (x_MHK, cos_MK, sin_MK))
