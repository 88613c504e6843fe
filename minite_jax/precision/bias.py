"""Biases of projections: one float32 add, rounded, and a gradient whose sum has an order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.numerics import ordered_sum, round_to
from pallas_kernels.rows import tile_sums


@jax.custom_vjp
def add_bias(x: Float[Array, "M N"], bias: Float[Array, "N"]) -> Float[Array, "M N"]:
    """Computes ``x + bias``: one float32 add, rounded to the type of `x`.

    Args:
      x: [M, N] bfloat16 or float32.
      bias: [N] float32. Its gradient is float32, summed over tiles of 32 rows and then by a fixed tree over the tiles.
    """
    return round_to(x.astype(jnp.float32) + bias[None, :], x.dtype)


def _forward(x_MN, bias_N):
    return add_bias(x_MN, bias_N), None


def _backward(_, g_MN):
    return g_MN, ordered_sum(tile_sums(g_MN.astype(jnp.float32)), axis=0)


add_bias.defvjp(_forward, _backward)
