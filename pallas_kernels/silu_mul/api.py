"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202). Let M be rows, F the inner width."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, gpu, nvfp4


@dispatch.replaceable
def silu_mul(gate_up: Float[Array, "M F2"], *, implementation: str | None = None) -> Float[Array, "M F"]:
    """Computes ``silu(gate) * up`` in float32, rounded once to the type of `gate_up`.

    Args:
      gate_up: [M, 2 F], the gate's features first, bfloat16 or float32.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, F] in the type of `gate_up`.
    """
    return _silu_mul(dispatch.resolve("silu_mul", implementation), gate_up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _silu_mul(implementation, gate_up_MF):
    return dispatch.module(__package__, implementation).silu_mul(gate_up_MF)


def _forward(implementation, gate_up_MF):
    return _silu_mul(implementation, gate_up_MF), gate_up_MF


def _backward(implementation, gate_up_MF, g_MF):
    return (dispatch.module(__package__, implementation).silu_mul_backward(gate_up_MF, g_MF),)


_silu_mul.defvjp(_forward, _backward)


@dispatch.replaceable
def silu_mul_quantize(
    gate_up: Float[Array, "M F2"], rule: nvfp4.ScaleRule, *, implementation: str | None = None
) -> nvfp4.Nvfp4Array | nvfp4.ExpandedArray:
    """``nvfp4.quantize_operand(silu_mul(gate_up), rule)``, bit for bit; one kernel for bfloat16 by the row-wise `fp8_exact`
    rule.

    Gradients do not flow through.

    Args:
      gate_up: [M, 2 F], the gate's features first, bfloat16 or float32; F a multiple of 16.
      rule: how scales are chosen.
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    chosen = dispatch.resolve("silu_mul_quantize", implementation)
    if chosen == "triton" and rule == nvfp4.ScaleRule.fp8_exact() and gate_up.dtype == jnp.bfloat16:
        from pallas_kernels.silu_mul import triton_quantize

        return triton_quantize.silu_mul_quantize(gate_up, expanded=not gpu.multiplies_codes())
    return nvfp4.quantize_operand(silu_mul(gate_up, implementation=chosen), rule, implementation=chosen)
