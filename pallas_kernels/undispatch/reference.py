"""Un-dispatch in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import round_to


def undispatch(rows, slot_Mk, *, out_dtype):
    rows = rows.astype(jnp.float32)
    total_MD = rows[slot_Mk[:, 0]]
    for rank in range(1, slot_Mk.shape[1]):
        total_MD = total_MD + rows[slot_Mk[:, rank]]
    return round_to(total_MD, out_dtype)
