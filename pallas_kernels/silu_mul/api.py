"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202). Let M be rows, F the inner width."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.silu_mul import reference


def silu_mul(gate_up: Float[Array, "M F2"], *, implementation: str | None = None) -> Float[Array, "M F"]:
    """Computes ``silu(gate) * up`` in float32, rounded once to the type of `gate_up`.

    Args:
      gate_up: [M, 2 F], the gate's features first, bfloat16 or float32.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, F] in the type of `gate_up`.
    """
    dispatch.resolve("silu_mul", implementation)
    return _silu_mul(gate_up)


@jax.custom_vjp
def _silu_mul(gate_up_MF):
    return reference.silu_mul(gate_up_MF)


def _forward(gate_up_MF):
    return _silu_mul(gate_up_MF), gate_up_MF


def _backward(gate_up_MF, g_MF):
    gate_MF, up_MF = jnp.split(gate_up_MF.astype(jnp.float32), 2, axis=-1)
    g_MF = g_MF.astype(jnp.float32)
    sigmoid_MF = jax.nn.sigmoid(gate_MF)
    dgate_MF = g_MF * up_MF * sigmoid_MF * (1.0 + gate_MF * (1.0 - sigmoid_MF))
    dup_MF = g_MF * gate_MF * sigmoid_MF
    return (jnp.concatenate([dgate_MF, dup_MF], axis=-1).astype(gate_up_MF.dtype),)


_silu_mul.defvjp(_forward, _backward)
