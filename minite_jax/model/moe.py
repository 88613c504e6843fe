"""Mixture of experts: route, dispatch without dropping, experts, combine in rank order."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minite_jax.model.config import ModelConfig
from minite_jax.model.taps import Taps, by_expert, by_token
from minite_jax.precision.activation import Activation, gated
from minite_jax.precision.linear import Dispatch, expert_linear, stored_value
from minite_jax.precision.recipe import MatmulFormat
from pallas_kernels.combine import combine
from pallas_kernels.router import router
from pallas_kernels.silu_mul import silu_mul


def make_dispatch(experts_Mk: Int[Array, "M k"], num_experts: int) -> Dispatch:
    """Sorts all assignments by expert; within an expert they keep token order. Every assignment has a place: nothing is
    dropped.
    """
    assignments = experts_Mk.reshape(-1)
    order = jnp.argsort(assignments, stable=True).astype(jnp.int32)
    slot = jnp.argsort(order, stable=True).astype(jnp.int32).reshape(experts_Mk.shape)
    group_sizes = jnp.sum(assignments[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    return Dispatch(order=order, slot=slot, group_sizes=group_sizes)


def moe(
    config: ModelConfig, format: MatmulFormat, weights: dict, x: Activation, taps: Taps | None = None
) -> Float[Array, "M D"]:
    """The expert MLP of one layer.

    Args:
      config: shape of the model.
      format: format of the experts' matmuls.
      weights: the layer's `Weight`s, of which router, gate_up and down are used.
      x: [M, D] normalised hidden states in the experts' format, whose carrier holds them plain, for the router.
      taps: of the layer.

    Returns:
      [M, D], each token's experts weighted and summed.
    """
    taps = Taps() if taps is None else taps
    router_ED = stored_value(weights["router"].stored, weights["router"].master)
    weights_Mk, experts_Mk = router(x.carrier, router_ED, top_k=config.num_experts_per_tok, normalize=config.norm_topk_prob)
    taps.beside("moe/router/probs", _all_probs, x.carrier, router_ED)
    weights_Mk, experts_Mk = taps("moe/router/weights", weights_Mk), taps("moe/router/experts", experts_Mk)
    dispatch = make_dispatch(experts_Mk, config.num_experts)
    order = dict(view=by_token(dispatch.slot), back=by_expert(dispatch.order))
    gate_up = weights["gate_up"]
    gate_up_mF = expert_linear(format, x, gate_up.stored, gate_up.master, dispatch, gather=True)
    gate_up_mF = taps("moe/experts/gate_up", gate_up_mF, **order)
    gated_x = taps.operand("moe/experts/gated", format, gated(format, gate_up_mF), silu_mul, gate_up_mF, **order)
    down = weights["down"]
    out_mD = expert_linear(format, gated_x, down.stored, down.master, dispatch, gather=False)
    out_mD = taps("moe/experts/down", out_mD, **order)
    return taps("moe/out", combine(out_mD, weights_Mk, dispatch.slot))


def _all_probs(x_MD, router_ED):
    """The router's probability of every expert [M, E], from the router itself."""
    prob_ME, expert_ME = router(x_MD, router_ED, top_k=router_ED.shape[0], normalize=False)
    return jnp.put_along_axis(jnp.zeros_like(prob_ME), expert_ME, prob_ME, axis=1, inplace=False)
