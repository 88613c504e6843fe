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
from pallas_kernels.rms_norm import rms_norm, rms_norm_quantize
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
    return Activation(x, nvfp4.quantize_operand(jax.lax.stop_gradient(x), format.activation) if format.quantized else None)


def normed(
    format: MatmulFormat, x: Float[Array, "M D"], weight: Float[Array, "D"], *, eps: float, keep: bool = False
) -> Activation:
    """RMS norm, rounded to the format of the matmul that reads it.

    Args:
      format: of the matmul.
      x: [M, D] bfloat16 or float32.
      weight: [D] float32.
      eps: see `pallas_kernels.rms_norm`.
      keep: whether the carrier holds the normalised rows, for a reader that is no matmul of this format (a router). Otherwise
        its values are not to be read.
    """
    if not format.quantized:
        return Activation(rms_norm(x, weight, eps=eps))
    x_fixed, weight_fixed = jax.lax.stop_gradient((x, weight))
    if keep:
        rows = rms_norm(x, weight, eps=eps)
        return Activation(rows, nvfp4.quantize_operand(jax.lax.stop_gradient(rows), format.activation))
    return Activation(_norm_carrier(eps, x, weight), rms_norm_quantize(x_fixed, weight_fixed, format.activation, eps=eps))


def gated(format: MatmulFormat, gate_up: Float[Array, "M F2"]) -> Activation:
    """``silu(gate) * up``, rounded to the format of the matmul that reads it.

    Args:
      format: of the matmul.
      gate_up: [M, 2 F], the gate's features first.
    """
    if not format.quantized:
        return Activation(silu_mul(gate_up))
    return Activation(_gate_carrier(gate_up), silu_mul_quantize(jax.lax.stop_gradient(gate_up), format.activation))


# Carriers: functions with the gradient of a norm or a gate, whose values nobody reads and nothing has to compute.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_carrier(eps, x_MD, weight_D):
    del weight_D
    return x_MD


def _norm_forward(eps, x_MD, weight_D):
    return x_MD, (x_MD, weight_D)


def _norm_backward(eps, residuals, g_MD):
    return jax.vjp(functools.partial(rms_norm, eps=eps), *residuals)[1](g_MD)


_norm_carrier.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def _gate_carrier(gate_up_MF):
    return gate_up_MF[:, : gate_up_MF.shape[1] // 2]


def _gate_forward(gate_up_MF):
    return _gate_carrier(gate_up_MF), gate_up_MF


def _gate_backward(gate_up_MF, g_MF):
    return jax.vjp(silu_mul, gate_up_MF)[1](g_MF)


_gate_carrier.defvjp(_gate_forward, _gate_backward)
