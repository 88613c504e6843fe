"""MoE combine in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import ordered_sum, round_to, separate_product
from pallas_kernels.rows import map_row_tiles


def combine(outputs, weights_Mk, slot_Mk):
    """`outputs` is [M, k, D], or [M k, D] where there is a slot."""

    def body(tile):
        weights_Rk, slot_Rk, outputs_RkD = tile
        if slot_Rk is not None:
            outputs_RkD = outputs[slot_Rk]
        products_RkD = separate_product(outputs_RkD.astype(jnp.float32) * weights_Rk[:, :, None])
        total_RD = products_RkD[:, 0]
        for rank in range(1, weights_Rk.shape[1]):
            total_RD = total_RD + products_RkD[:, rank]
        return round_to(total_RD, outputs.dtype)

    return map_row_tiles(body, (weights_Mk, slot_Mk, outputs if slot_Mk is None else None))


def combine_backward(outputs, weights_Mk, slot_Mk, g_MD):
    """Gradients of `outputs` (in its shape and type) and of the weights."""
    g_M1D = g_MD.astype(jnp.float32)[:, None, :]
    outputs_MkD = outputs if slot_Mk is None else outputs[slot_Mk]
    doutputs = round_to(weights_Mk[:, :, None] * g_M1D, outputs.dtype)
    dweights_Mk = ordered_sum(separate_product(outputs_MkD.astype(jnp.float32) * g_M1D))
    if slot_Mk is not None:
        # Each sorted row has one consumer, so its gradient is found there: no scatter.
        doutputs = doutputs.reshape(outputs.shape)[jnp.argsort(slot_Mk.reshape(-1))]
    return doutputs, dweights_Mk
