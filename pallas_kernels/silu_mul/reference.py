"""silu(gate) * up in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import round_to, separate_product, sigmoid
from pallas_kernels.rows import map_row_tiles


def silu_mul(gate_up_MF):
    def body(gate_up_RF):
        gate_RF, up_RF = jnp.split(gate_up_RF.astype(jnp.float32), 2, axis=-1)
        return round_to(gate_RF * sigmoid(gate_RF) * up_RF, gate_up_RF.dtype)

    return map_row_tiles(body, gate_up_MF)


def silu_mul_backward(gate_up_MF, g_MF):
    gate_MF, up_MF = jnp.split(gate_up_MF.astype(jnp.float32), 2, axis=-1)
    g_MF = g_MF.astype(jnp.float32)
    sigmoid_MF = sigmoid(gate_MF)
    dgate_MF = g_MF * up_MF * sigmoid_MF * (1.0 + separate_product(gate_MF * (1.0 - sigmoid_MF)))
    dup_MF = g_MF * gate_MF * sigmoid_MF
    return round_to(jnp.concatenate([dgate_MF, dup_MF], axis=-1), gate_up_MF.dtype)
