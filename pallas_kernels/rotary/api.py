"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split as in Llama and Qwen: pairs (i, i + K/2).

Let M be tokens, H heads, K the head dimension.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import dispatch


def rotary_table(num_positions: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of ``position * theta ** (-2 i / head_dim)``, each float32 [num_positions, head_dim / 2].

    Computed in float64 on the host: a float32 angle is off by 1e-4 at position 4096, and a device's cosine is its own.
    """
    inverse_frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.arange(num_positions, dtype=np.float64)[:, None] * inverse_frequency[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dispatch.replaceable
def rotary(
    x: Float[Array, "M H K"], cos: Float[Array, "M K2"], sin: Float[Array, "M K2"], *, implementation: str | None = None
) -> Float[Array, "M H K"]:
    """Rotates each pair (x[i], x[i + K/2]) by its token's angle i, in float32, rounded once to the type of `x`.

    Args:
      x: [M, H, K] queries or keys, bfloat16 or float32.
      cos: [M, K/2] float32, cosines at each token's position, see `rotary_table`.
      sin: [M, K/2] float32.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, H, K] in the type of `x`.
    """
    return _rotary(dispatch.resolve("rotary", implementation), x, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotary(implementation, x_MHK, cos_MK, sin_MK):
    return dispatch.module(__package__, implementation).rotary(x_MHK, cos_MK, sin_MK)


def _forward(implementation, x_MHK, cos_MK, sin_MK):
    return _rotary(implementation, x_MHK, cos_MK, sin_MK), (cos_MK, sin_MK)


def _backward(implementation, residuals, g_MHK):
    cos_MK, sin_MK = residuals
    # The transpose of a rotation is the rotation by the opposite angle.
    dx_MHK = dispatch.module(__package__, implementation).rotary(g_MHK, cos_MK, -sin_MK)
    return dx_MHK, jnp.zeros_like(cos_MK), jnp.zeros_like(sin_MK)


_rotary.defvjp(_forward, _backward)
