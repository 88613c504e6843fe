"""Linear maps whose forward reads the stored weights and whose backward writes to the masters.

The weights of a policy are quantised once per update, outside the gradient. `linear(format, x, stored, master)` computes with
`stored`; its gradient with respect to the weight is handed to `master`, whose values are never read. A sampler passes no
master and runs the same function.

Backward ("dequantised"): the derivative of the function that ran, straight through the rounding:
``dX = G deq(W)`` and ``dW = G^T deq(X)``, with X as it was quantised in the forward (kept packed, 0.56 bytes an element).
"""

import functools
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minite_jax.precision.activation import Activation, activation
from minite_jax.precision.recipe import MatmulFormat
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad
from pallas_kernels.operands import Operand, take_rows
from pallas_kernels.undispatch import undispatch


@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
@flax.struct.dataclass
class Dispatch:
    """How tokens go to experts: the k assignments of each token, sorted by expert.

    Let M be tokens, k experts per token, E experts.

    Attributes:
      order: [M k] int32; sorted assignment i is assignment ``order[i]``, that is token ``order[i] // k``, rank ``order[i] % k``.
      slot: [M, k] int32; where each assignment lies in sorted order (the inverse of `order`).
      group_sizes: [E] int32, assignments per expert.
    """

    order: Int[Array, "Mk"]
    slot: Int[Array, "M k"]
    group_sizes: Int[Array, "E"]


def linear(
    format: MatmulFormat, x: Activation | Float[Array, "M K"], stored: Operand, master: Float[Array, "N K"] | None
) -> Float[Array, "M N"]:
    """Computes ``x @ stored.T`` in the given format, rounded to the type of `x`.

    Args:
      format: formats of the operands.
      x: [M, K], bfloat16 or float32 rows, which are quantised here, or an `Activation` in this format.
      stored: [N, K] weights as the policy stores them, already in their format.
      master: [N, K] float32 that receives the weight's gradient, or None.
    """
    x = activation(format, x)
    return _linear(x.carrier, x.quantized, stored, master)


@jax.custom_vjp
def _linear(carrier_MK, quantized, stored, master):
    del master
    return matmul(Activation(carrier_MK, quantized).operand, stored, out_dtype=carrier_MK.dtype)


def _linear_forward(carrier_MK, quantized, stored, master):
    operand = Activation(carrier_MK, quantized).operand
    return matmul(operand, stored, out_dtype=carrier_MK.dtype), (operand, stored, master is not None)


def _linear_backward(residuals, g_MN):
    operand, stored, wants_weight = residuals
    dx_MK = matmul_dgrad(g_MN, stored, out_dtype=g_MN.dtype)
    return dx_MK, None, None, matmul_wgrad(operand, g_MN) if wants_weight else None


_linear.defvjp(_linear_forward, _linear_backward)


def expert_linear(
    format: MatmulFormat,
    x: Activation | Float[Array, "M K"],
    stored: Operand,
    master: Float[Array, "E N K"] | None,
    dispatch: Dispatch,
    *,
    gather: bool,
) -> Float[Array, "Mk N"]:
    """Multiplies each assignment's row by its expert's matrix.

    Args:
      format: formats of the operands.
      x: [M, K], one row per token (`gather`: quantised first, then copied to its experts), or [M k, K], one per sorted
        assignment; plain rows or an `Activation` in this format.
      stored: [E, N, K] weights as the policy stores them.
      master: [E, N, K] float32 that receives the weights' gradient, or None.
      dispatch: the assignments.
      gather: whether `x` holds tokens or sorted assignments.

    Returns:
      [M k, N] in sorted order, in the type of `x`.
    """
    x = activation(format, x)
    return _expert_linear(gather, x.carrier, x.quantized, stored, master, dispatch)


def _tokens(dispatch: Dispatch, gather: bool) -> Int[Array, "Mk"] | None:
    """The token of each sorted assignment, where `x` holds tokens."""
    return dispatch.order // dispatch.slot.shape[1] if gather else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_linear(gather, carrier, quantized, stored, master, dispatch):
    return _expert_linear_forward(gather, carrier, quantized, stored, master, dispatch)[0]


def _expert_linear_forward(gather, carrier, quantized, stored, master, dispatch):
    operand = Activation(carrier, quantized).operand
    rows = _tokens(dispatch, gather)
    result = grouped_matmul(operand, stored, dispatch.group_sizes, rows=rows, out_dtype=carrier.dtype)
    return result, (operand, stored, master is not None, dispatch)


def _expert_linear_backward(gather, residuals, g):
    operand, stored, wants_weight, dispatch = residuals
    # A token's sum over its experts is float32; what has one expert is rounded where it is summed.
    dx = grouped_matmul_dgrad(g, stored, dispatch.group_sizes, out_dtype=jnp.float32 if gather else g.dtype)
    if gather:
        dx = undispatch(dx, dispatch.slot, out_dtype=g.dtype)
    dw = None
    if wants_weight:
        rows = take_rows(operand, _tokens(dispatch, gather)) if gather else operand
        dw = grouped_matmul_wgrad(rows, g, dispatch.group_sizes)
    return dx, None, None, dw, None


_expert_linear.defvjp(_expert_linear_forward, _expert_linear_backward)


@jax.custom_vjp
def stored_value(stored: Float[Array, "..."], master: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Returns `stored`; the gradient, in float32, goes to `master`. For weights that are not quantised (norms, router)."""
    del master
    return stored


def _stored_value_forward(stored, master):
    return stored, master is not None


def _stored_value_backward(wants_weight, g):
    return None, g.astype(jnp.float32) if wants_weight else None


stored_value.defvjp(_stored_value_forward, _stored_value_backward)
