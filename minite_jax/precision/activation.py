"""Activations on their way into a matmul. Whoever makes them (a norm, a gate) rounds them to the matmul's format in the same
kernel, so that the rows in bfloat16 never go to memory.

A quantised operand has no gradient of its own: codes are integers. So it travels with a *carrier*, a plain array of the same
shape. The matmul reads the operand and hands its gradient to the carrier, straight through the rounding, as a weight hands its
gradient to its master.
"""

import functools
from typing import Any, no_type_check

import flax.struct
import jax
from jaxtyping import Array, Float

from minite_jax.precision.recipe import MatmulFormat
from pallas_kernels import nvfp4
from pallas_kernels.operands import Operand
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_backward, add_rms_norm_quantize
from pallas_kernels.silu_mul import silu_mul, silu_mul_quantize


@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
@flax.struct.dataclass
class Activation:
    """Rows for a matmul.

    Attributes:
      carrier: [M, K] array that receives the gradient. Its values are read only where `quantized` is None.
      quantized: [M, K] operand that the matmul reads, or None: it reads the carrier.
    """

    carrier: Float[Array, "M K"]
    quantized: Any = None

    @property
    def operand(self) -> Operand:
        """What the matmul reads."""
        return self.carrier if self.quantized is None else self.quantized


def activation(format: MatmulFormat, x: Activation | Float[Array, "M K"]) -> Activation:
    """Plain rows rounded to a format; an `Activation` stays as it is."""
    if isinstance(x, Activation):
        return x
    if format.activation is None:
        return Activation(x)
    return Activation(x, nvfp4.quantize_operand(jax.lax.stop_gradient(x), format.activation))


def normed(
    format: MatmulFormat,
    x: Float[Array, "M D"],
    y: Float[Array, "M D"] | None,
    weight: Float[Array, "D"],
    *,
    eps: float,
    keep: bool = False,
) -> tuple[Float[Array, "M D"], Activation]:
    """The next sum of the residual stream, and its RMS norm, rounded to the format of the matmul that reads it.

    Args:
      format: of the matmul.
      x: [M, D] bfloat16 or float32, the residual stream so far.
      y: [M, D] in the type of `x`, what a block adds to it, or None: nothing.
      weight: [D] float32.
      eps: see `pallas_kernels.rms_norm`.
      keep: whether the carrier holds the normalised rows, for a reader that is no matmul of this format (a router). Otherwise
        its values are not to be read.

    Returns:
      The residual stream ``x + y``, and its norm.
    """
    if format.activation is None:
        sum_MD, normed_MD = add_rms_norm(x, y, weight, eps=eps)
        return sum_MD, Activation(normed_MD)
    sum_MD, carrier_MD, quantized = _normed(format.activation, eps, keep, y is not None, x, y, weight)
    return sum_MD, Activation(carrier_MD, jax.lax.stop_gradient(quantized))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _normed(rule, eps, keep, adds, x_MD, y_MD, weight_D):
    """The sum, the norm's carrier, and the quantised norm."""
    del adds
    sum_MD, normed_MD, quantized = add_rms_norm_quantize(x_MD, y_MD, weight_D, rule, eps=eps, keep=keep)
    return sum_MD, normed_MD if keep else sum_MD, quantized


def _normed_forward(rule, eps, keep, adds, x_MD, y_MD, weight_D):
    results = _normed(rule, eps, keep, adds, x_MD, y_MD, weight_D)
    return results, (results[0], weight_D)


def _normed_backward(rule, eps, keep, adds, residuals, gradients):
    g_sum_MD, g_normed_MD, _ = gradients
    d_MD, dweight_D = add_rms_norm_backward(*residuals, g_sum_MD, g_normed_MD, eps=eps)
    return d_MD, d_MD if adds else None, dweight_D


_normed.defvjp(_normed_forward, _normed_backward)


def gated(format: MatmulFormat, gate_up: Float[Array, "M F2"]) -> Activation:
    """``silu(gate) * up``, rounded to the format of the matmul that reads it.

    Args:
      format: of the matmul.
      gate_up: [M, 2 F], the gate's features first.
    """
    if format.activation is None:
        return Activation(silu_mul(gate_up))
    return Activation(_gate_carrier(gate_up), silu_mul_quantize(jax.lax.stop_gradient(gate_up), format.activation))


# A carrier: a function with the gradient of a gate, whose values nobody reads and nothing has to compute.


@jax.custom_vjp
def _gate_carrier(gate_up_MF):
    return gate_up_MF[:, : gate_up_MF.shape[1] // 2]


def _gate_forward(gate_up_MF):
    return _gate_carrier(gate_up_MF), gate_up_MF


def _gate_backward(gate_up_MF, g_MF):
    return jax.vjp(silu_mul, gate_up_MF)[1](g_MF)


_gate_carrier.defvjp(_gate_forward, _gate_backward)
