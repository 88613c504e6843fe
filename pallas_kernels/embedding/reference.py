"""Gradient of an embedding in plain jnp: the specification of the kernels."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.embedding.segments import Segments


def _sum_of_runs(rows, start, size):
    """Sums rows[start[i] : start[i] + size[i]] one after another, for all i side by side."""

    def step(state):
        i, total = state
        row = rows(jnp.minimum(start + i, start + size - 1))
        return i + 1, jnp.where((i < size)[:, None], jnp.where(i == 0, row, total + row), total)

    width = rows(start[:1]).shape[1]
    zeros = jnp.zeros((start.shape[0], width), jnp.float32)
    return lax.while_loop(lambda state: state[0] < jnp.max(size), step, (jnp.int32(0), zeros))[1]


def embed_gradient(g_MD, segments: Segments):
    """[V, D] float32: each token's rows of g summed in the order of `segments`; exact zeros where there are none."""
    chunks_CD = _sum_of_runs(
        lambda place: g_MD[segments.order[place]].astype(jnp.float32), segments.chunk_start, segments.chunk_size
    )
    first_V = segments.token_start[:-1]
    return _sum_of_runs(lambda chunk: chunks_CD[chunk], first_V, segments.token_start[1:] - first_V)
