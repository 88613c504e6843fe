"""MoE combine. Let M be tokens, k the experts per token, D the model width."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch


@dispatch.replaceable
def combine(
    outputs: Float[Array, "M k D"] | Float[Array, "Mk D"],
    weights: Float[Array, "M k"],
    slot: Int[Array, "M k"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """Computes ``sum_r weights[:, r] * outputs[:, r]`` in float32, added in rank order, rounded once to the type of `outputs`.

    Args:
      outputs: [M, k, D] each token's expert outputs in the router's rank order, bfloat16 or float32; with `slot` [M k, D], the
        expert outputs in any order.
      weights: [M, k] float32 router weights.
      slot: [M, k] int32, a permutation of 0..M k - 1: the row of `outputs` that holds a token's r-th expert output. The rows
        are read where they lie; the result is that of ``combine(outputs[slot], weights)`` to the bit, and so are the gradients,
        which come back in the order of `outputs`.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, D] in the type of `outputs`.

    Raises:
      ValueError: the shapes do not belong together.
    """
    num_tokens, num_ranks = weights.shape
    rows = (num_tokens, num_ranks) if slot is None else (num_tokens * num_ranks,)
    if outputs.shape[:-1] != rows or (slot is not None and slot.shape != weights.shape):
        given = "no slot" if slot is None else f"slot {tuple(slot.shape)}"
        raise ValueError(
            f"combine: with weights {tuple(weights.shape)} and {given}, outputs must be {(*rows, outputs.shape[-1])}, "
            f"not {tuple(outputs.shape)}"
        )
    return _combine(dispatch.resolve("combine", implementation), outputs, weights, slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(implementation, outputs, weights_Mk, slot_Mk):
    return dispatch.module(__package__, implementation).combine(outputs, weights_Mk, slot_Mk)


def _forward(implementation, outputs, weights_Mk, slot_Mk):
    return _combine(implementation, outputs, weights_Mk, slot_Mk), (outputs, weights_Mk, slot_Mk)


def _backward(implementation, residuals, g_MD):
    return *dispatch.module(__package__, implementation).combine_backward(*residuals, g_MD), None


_combine.defvjp(_forward, _backward)
