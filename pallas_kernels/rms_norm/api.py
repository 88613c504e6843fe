"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467). Let M be rows, D the normalised axis."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, gpu, nvfp4
from pallas_kernels.numerics import ordered_sum


def rms_norm(
    x: Float[Array, "M D"], weight: Float[Array, "D"], *, eps: float, implementation: str | None = None
) -> Float[Array, "M D"]:
    """Computes ``x / sqrt(mean(x ** 2) + eps) * weight`` in float32, rounded once to the type of `x`.

    Args:
      x: [M, D] bfloat16 or float32.
      weight: [D] float32.
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, D] in the type of `x`. Row i depends on row i alone, bit for bit.
    """
    return _rms_norm(dispatch.resolve("rms_norm", implementation), eps, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(implementation, eps, x_MD, weight_D):
    return dispatch.module(__package__, implementation).rms_norm(x_MD, weight_D, eps=eps)


def _forward(implementation, eps, x_MD, weight_D):
    return _rms_norm(implementation, eps, x_MD, weight_D), (x_MD, weight_D)


def _backward(implementation, eps, residuals, g_MD):
    dx_MD, sums_TD = dispatch.module(__package__, implementation).rms_norm_backward(*residuals, g_MD, eps=eps)
    return dx_MD, ordered_sum(sums_TD, axis=0)


_rms_norm.defvjp(_forward, _backward)


def rms_norm_quantize(
    x: Float[Array, "M D"],
    weight: Float[Array, "D"],
    rule: nvfp4.ScaleRule,
    *,
    eps: float,
    implementation: str | None = None,
) -> nvfp4.Nvfp4Array | nvfp4.ExpandedArray:
    """``nvfp4.quantize_operand(rms_norm(x, weight), rule)``, bit for bit; one kernel for bfloat16 rows of up to 8192 numbers by
    the row-wise `fp8_exact` rule.

    Gradients do not flow through.

    Args:
      x: [M, D] bfloat16 or float32, D a multiple of 16.
      weight: [D] float32.
      rule: how scales are chosen.
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    chosen = dispatch.resolve("rms_norm_quantize", implementation)
    if chosen == "triton" and rule == nvfp4.ScaleRule.fp8_exact() and x.dtype == jnp.bfloat16 and x.shape[-1] <= 8192:
        from pallas_kernels.rms_norm import triton_quantize

        return triton_quantize.rms_norm_quantize(x, weight, eps=eps, expanded=not gpu.multiplies_codes())
    normed = rms_norm(x, weight, eps=eps, implementation=chosen)
    return nvfp4.quantize_operand(normed, rule, implementation=chosen)
