"""Dense matmul in plain jnp: the specification of the kernels."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import operands
from pallas_kernels.numerics import round_to
from pallas_kernels.rows import map_row_tiles


def dot_nk(x_MK, w_NK):
    """x @ w.T in float32 without a lossy mode (TF32, bf16 passes)."""
    return lax.dot_general(
        x_MK, w_NK, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def scale_sum(sum_MN, x_outer, w_outer):
    """Applies the outer scales to a finished sum: x's (per row or one), then w's (one)."""
    if x_outer is not None:
        sum_MN = sum_MN * (x_outer[:, None] if x_outer.ndim == 1 else x_outer)
    if w_outer is not None:
        sum_MN = sum_MN * w_outer
    return sum_MN


def matmul(x, w, *, out_dtype):
    w_NK, w_outer = operands.values(w), operands.outer_scale(w)
    x_MK, x_outer = operands.values(x), operands.outer_scale(x)
    if x_outer is not None:
        x_outer = jnp.broadcast_to(x_outer, x_MK.shape[:1])

    def body(tile):
        tile_MK, outer_M = tile
        return round_to(scale_sum(dot_nk(tile_MK, w_NK), outer_M, w_outer), out_dtype)

    return map_row_tiles(body, (x_MK, x_outer))


def matmul_dgrad(g_MN, w, *, out_dtype=jnp.float32):
    # One program on one batch: it repeats bit for bit, and no contract compares it across batches.
    dx_MK = dot_nk(g_MN.astype(jnp.float32), operands.values(w).T)
    return round_to(scale_sum(dx_MK, None, operands.outer_scale(w)), out_dtype)


def matmul_wgrad(x, g_MN):
    return dot_nk(g_MN.astype(jnp.float32).T, operands.dequantized(x).T)
