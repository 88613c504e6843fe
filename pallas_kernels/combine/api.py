"""MoE combine. Let M be tokens, k the experts per token, D the model width."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.combine import reference


def combine(
    outputs: Float[Array, "M k D"], weights: Float[Array, "M k"], *, implementation: str | None = None
) -> Float[Array, "M D"]:
    """Computes ``sum_r weights[:, r] * outputs[:, r]`` in float32, added in rank order, rounded once to the type of `outputs`.

    Args:
      outputs: [M, k, D] each token's expert outputs in the router's rank order, bfloat16 or float32.
      weights: [M, k] float32 router weights.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, D] in the type of `outputs`.
    """
    dispatch.resolve("combine", implementation)
    return _combine(outputs, weights)


@jax.custom_vjp
def _combine(outputs_MkD, weights_Mk):
    return reference.combine(outputs_MkD, weights_Mk)


def _forward(outputs_MkD, weights_Mk):
    return _combine(outputs_MkD, weights_Mk), (outputs_MkD, weights_Mk)


def _backward(residuals, g_MD):
    outputs_MkD, weights_Mk = residuals
    g_MD = g_MD.astype(jnp.float32)
    doutputs_MkD = (weights_Mk[:, :, None] * g_MD[:, None, :]).astype(outputs_MkD.dtype)
    dweights_Mk = jnp.einsum("mkd,md->mk", outputs_MkD.astype(jnp.float32), g_MD, precision=jax.lax.Precision.HIGHEST)
    return doutputs_MkD, dweights_Mk


_combine.defvjp(_forward, _backward)
