"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467). Let M be rows, D the normalised axis."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.numerics import ordered_sum
from pallas_kernels.rms_norm import reference


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


def _implementation(name):
    if name == "triton":
        from pallas_kernels.rms_norm import triton

        return triton
    return reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(implementation, eps, x_MD, weight_D):
    return _implementation(implementation).rms_norm(x_MD, weight_D, eps=eps)


def _forward(implementation, eps, x_MD, weight_D):
    return _rms_norm(implementation, eps, x_MD, weight_D), (x_MD, weight_D)


def _backward(implementation, eps, residuals, g_MD):
    dx_MD, sums_TD = _implementation(implementation).rms_norm_backward(*residuals, g_MD, eps=eps)
    return dx_MD, ordered_sum(sums_TD, axis=0)


_rms_norm.defvjp(_forward, _backward)
