"""MoE router in plain jnp: the specification of the kernels."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.reference import dot_nk
from pallas_kernels.numerics import ordered_sum
from pallas_kernels.rows import map_row_tiles


def router(x_MD, weight_ED, *, top_k, normalize):
    def body(x_RD):
        logits_RE = dot_nk(x_RD.astype(jnp.float32), weight_ED)
        exp_RE = jnp.exp(logits_RE - jnp.max(logits_RE, axis=-1, keepdims=True))
        # The choice is made on the logits: the exponential could round two different logits to one value. `top_k` would order by
        # the signs of zeros and NaN, of which the latter is the processor's.
        number_RE = jnp.where(jnp.isnan(logits_RE), jnp.nan, jnp.where(logits_RE == 0.0, 0.0, logits_RE))
        _, experts_Rk = lax.top_k(number_RE, top_k)
        chosen_Rk = jnp.take_along_axis(exp_RE, experts_Rk, axis=-1)
        total_R = ordered_sum(chosen_Rk if normalize else exp_RE)
        return chosen_Rk / total_R[:, None], experts_Rk

    return map_row_tiles(body, x_MD)


def router_backward(x_MD, weight_ED, weights_Mk, experts_Mk, g_Mk, *, normalize):
    """Gradients of x (in its type) and of the weight, through the weights of the chosen experts. No gather, so no scatter."""
    x32_MD = x_MD.astype(jnp.float32)
    # d weight_r / d logit_e = weight_r ([e is the r-th expert] - p_e), where p is the softmax that the weights are taken from:
    # that of the chosen alone, or of all.
    products_Mk = weights_Mk * g_Mk
    total_M1 = ordered_sum(products_Mk)[:, None]
    if normalize:
        at_expert_Mk, dlogits_ME = products_Mk - weights_Mk * total_M1, 0.0
    else:
        at_expert_Mk, dlogits_ME = products_Mk, -jax.nn.softmax(dot_nk(x32_MD, weight_ED), axis=-1) * total_M1
    expert_1E = jnp.arange(weight_ED.shape[0])[None, :]
    for rank in range(weights_Mk.shape[1]):
        at_rank_ME = experts_Mk[:, rank, None] == expert_1E
        dlogits_ME = dlogits_ME + jnp.where(at_rank_ME, at_expert_Mk[:, rank, None], 0.0)
    return dot_nk(dlogits_ME, weight_ED.T).astype(x_MD.dtype), dot_nk(dlogits_ME.T, x32_MD.T)
