"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), and with it the add to the residual stream that comes before. Let M be
rows, D the normalised axis.
"""

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


@dispatch.replaceable
def add_rms_norm(
    x: Float[Array, "M D"],
    y: Float[Array, "M D"] | None,
    weight: Float[Array, "D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """The next ``x + y`` of a residual stream, a float32 add rounded to the type of `x`, and its `rms_norm`. Differentiable.

    The forward has the bits of one after the other. The backward rounds once: see `add_rms_norm_backward`.

    Args:
      x: [M, D] bfloat16 or float32, the stream so far.
      y: [M, D] in the type of `x`, what a block adds to it. None: nothing, and the sum is `x`.
      weight: [D] float32.
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      The sum and its norm, each [M, D] in the type of `x`. Row i depends on row i alone, bit for bit.
    """
    return _add_rms_norm(dispatch.resolve("add_rms_norm", implementation), eps, y is not None, x, y, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _add_rms_norm(implementation, eps, adds, x_MD, y_MD, weight_D):
    op = dispatch.module(__package__, implementation)
    if adds:
        return op.add_rms_norm(x_MD, y_MD, weight_D, eps=eps)
    return x_MD, op.rms_norm(x_MD, weight_D, eps=eps)


def _add_forward(implementation, eps, adds, x_MD, y_MD, weight_D):
    sum_MD, normed_MD = _add_rms_norm(implementation, eps, adds, x_MD, y_MD, weight_D)
    return (sum_MD, normed_MD), (sum_MD, weight_D)


def _add_backward(implementation, eps, adds, residuals, gradients):
    d_MD, dweight_D = add_rms_norm_backward(*residuals, *gradients, eps=eps, implementation=implementation)
    return d_MD, d_MD if adds else None, dweight_D


_add_rms_norm.defvjp(_add_forward, _add_backward)


def add_rms_norm_backward(
    sum: Float[Array, "M D"],
    weight: Float[Array, "D"],
    g_sum: Float[Array, "M D"],
    g_normed: Float[Array, "M D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "D"]]:
    """Gradients of `add_rms_norm`: one for x and for y, one for the weight.

    What comes through the norm and what comes past it are added in float32 and rounded once.

    Args:
      sum: [M, D] that the forward returned.
      weight: [D] float32.
      g_sum: [M, D], gradient of the sum by those who read it elsewhere.
      g_normed: [M, D], gradient of the norm.
      eps: of the forward.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, D] in the type of `sum`, and [D] float32.
    """
    op = dispatch.module(__package__, dispatch.resolve("add_rms_norm_backward", implementation))
    d_MD, sums_TD = op.rms_norm_backward(sum, weight, g_normed, g_sum, eps=eps)
    return d_MD, ordered_sum(sums_TD, axis=0)


def rms_norm_quantize(
    x: Float[Array, "M D"],
    weight: Float[Array, "D"],
    rule: nvfp4.ScaleRule,
    *,
    eps: float,
    implementation: str | None = None,
) -> nvfp4.Nvfp4Array | nvfp4.ExpandedArray:
    """``nvfp4.quantize_operand(rms_norm(x, weight), rule)``, bit for bit; one kernel where
    `add_rms_norm_quantize` is one.

    Gradients do not flow through.

    Args:
      x: [M, D] bfloat16 or float32, D a multiple of 16.
      weight: [D] float32.
      rule: how scales are chosen.
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    return add_rms_norm_quantize(x, None, weight, rule, eps=eps, keep=False, implementation=implementation)[2]


@dispatch.replaceable
def add_rms_norm_quantize(
    x: Float[Array, "M D"],
    y: Float[Array, "M D"] | None,
    weight: Float[Array, "D"],
    rule: nvfp4.ScaleRule,
    *,
    eps: float,
    keep: bool,
    implementation: str | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"] | None, nvfp4.Nvfp4Array | nvfp4.ExpandedArray]:
    """`add_rms_norm` and ``nvfp4.quantize_operand`` of its norm, bit for bit; one kernel for bfloat16 rows of up to 8192 numbers
    by the row-wise `fp8_exact` rule.

    Gradients do not flow through: `add_rms_norm_backward` has them.

    Args:
      x: [M, D] bfloat16 or float32, D a multiple of 16.
      y: [M, D] in the type of `x`, or None: nothing is added, and the sum is `x`.
      weight: [D] float32.
      rule: how scales are chosen.
      eps: added to the mean square.
      keep: whether to return the norm unquantised, too.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      The sum, its norm (None without `keep`), and the quantised norm.
    """
    chosen = dispatch.resolve("rms_norm_quantize" if y is None else "add_rms_norm_quantize", implementation)
    x, y, weight = jax.lax.stop_gradient((x, y, weight))
    if chosen == "triton" and rule == nvfp4.ScaleRule.fp8_exact() and x.dtype == jnp.bfloat16 and x.shape[-1] <= 8192:
        from pallas_kernels.rms_norm import triton_quantize

        expanded = not gpu.multiplies_codes()
        return triton_quantize.add_rms_norm_quantize(x, y, weight, eps=eps, keep=keep, expanded=expanded)
    sum_MD, normed_MD = add_rms_norm(x, y, weight, eps=eps, implementation=chosen)
    return sum_MD, normed_MD if keep else None, nvfp4.quantize_operand(normed_MD, rule, implementation=chosen)
