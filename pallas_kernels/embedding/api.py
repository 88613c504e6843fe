"""Embedding of tokens. Let M be tokens, V the vocabulary, D the model width."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.embedding.segments import make_segments
from pallas_kernels.numerics import round_to


def embed(
    tokens: Int[Array, "M"],
    table: Float[Array, "V D"],
    *,
    master: Float[Array, "V D"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """Computes ``table[tokens]``. The gradient sums each token's rows in float32 in a fixed order, see `segments`: no atomics.

    Args:
      tokens: [M] int32 in 0..V - 1.
      table: [V, D] bfloat16 or float32.
      master: [V, D] float32 that receives the gradient in place of `table`, unrounded; its values are not read.
      implementation: see `pallas_kernels.dispatch.resolve`. The forward is a copy and the same in all.

    Returns:
      [M, D] in the type of `table`. The gradient of `table` is rounded once to its type; tokens that do not occur have exact
      zeros.
    """
    return _embed(dispatch.resolve("embed", implementation), tokens, table, master)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(implementation, tokens_M, table_VD, master_VD):
    del implementation, master_VD
    return table_VD[tokens_M]


def _forward(implementation, tokens_M, table_VD, master_VD):
    # An empty slice stands for the table's type; the table itself need not be kept.
    residuals = tokens_M, table_VD[:, :0], master_VD is not None
    return _embed(implementation, tokens_M, table_VD, master_VD), residuals


def _backward(implementation, residuals, g_MD):
    tokens_M, table_V0, has_master = residuals
    segments = make_segments(tokens_M, table_V0.shape[0])
    gradient_VD = dispatch.module(__package__, implementation).embed_gradient(g_MD, segments)
    return (None, None, gradient_VD) if has_master else (None, round_to(gradient_VD, table_V0.dtype), None)


_embed.defvjp(_forward, _backward)
