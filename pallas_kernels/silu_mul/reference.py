"""silu(gate) * up in plain jnp: the specification of the kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import round_to
from pallas_kernels.rows import map_row_tiles


def silu_mul(gate_up_MF):
    def body(gate_up_RF):
        gate_RF, up_RF = jnp.split(gate_up_RF.astype(jnp.float32), 2, axis=-1)
        return round_to(gate_RF * jax.nn.sigmoid(gate_RF) * up_RF, gate_up_RF.dtype)

    return map_row_tiles(body, gate_up_MF)
