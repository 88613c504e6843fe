"""MoE router in plain jnp: the specification of the kernels."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.reference import dot_nk
from pallas_kernels.numerics import ordered_sum
from pallas_kernels.rows import map_row_tiles


def router(x_MD, weight_ED, *, top_k, normalize):
    def body(x_RD):
        logits_RE = dot_nk(x_RD.astype(jnp.float32), weight_ED)
        exp_RE = jnp.exp(logits_RE - jnp.max(logits_RE, axis=-1, keepdims=True))
        # The choice is made on the logits: the exponential could round two different logits to one value.
        _, experts_Rk = lax.top_k(logits_RE, top_k)
        chosen_Rk = jnp.take_along_axis(exp_RE, experts_Rk, axis=-1)
        total_R = ordered_sum(chosen_Rk if normalize else exp_RE)
        return chosen_Rk / total_R[:, None], experts_Rk

    return map_row_tiles(body, x_MD)
