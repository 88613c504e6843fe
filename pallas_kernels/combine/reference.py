"""MoE combine in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import round_to, separate_product
from pallas_kernels.rows import map_row_tiles


def combine(outputs_MkD, weights_Mk):
    def body(tile):
        outputs_RkD, weights_Rk = tile
        products_RkD = separate_product(outputs_RkD.astype(jnp.float32) * weights_Rk[:, :, None])
        total_RD = products_RkD[:, 0]
        for rank in range(1, weights_Rk.shape[1]):
            total_RD = total_RD + products_RkD[:, rank]
        return round_to(total_RD, outputs_RkD.dtype)

    return map_row_tiles(body, (outputs_MkD, weights_Mk))
