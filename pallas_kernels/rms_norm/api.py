"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467). Let M be rows, D the normalised axis."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
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
    dispatch.resolve("rms_norm", implementation)
    return _rms_norm(eps, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps, x_MD, weight_D):
    return reference.rms_norm(x_MD, weight_D, eps=eps)


def _forward(eps, x_MD, weight_D):
    return _rms_norm(eps, x_MD, weight_D), (x_MD, weight_D)


def _backward(eps, residuals, g_MD):
    x_MD, weight_D = residuals
    x32_MD, g32_MD = x_MD.astype(jnp.float32), g_MD.astype(jnp.float32)
    inverse_M1 = jax.lax.rsqrt(jnp.mean(x32_MD**2, axis=-1, keepdims=True) + eps)
    unit_MD = x32_MD * inverse_M1
    dunit_MD = g32_MD * weight_D[None, :]
    dx_MD = inverse_M1 * (dunit_MD - unit_MD * jnp.mean(dunit_MD * unit_MD, axis=-1, keepdims=True))
    return dx_MD.astype(x_MD.dtype), jnp.sum(g32_MD * unit_MD, axis=0)


_rms_norm.defvjp(_forward, _backward)
