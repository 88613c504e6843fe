"""The grouped matmul. Let M be rows, E groups (experts), N output features, K the summed axis."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, operands
from pallas_kernels.grouped_matmul import reference


@dispatch.replaceable
def grouped_matmul(
    x: operands.Operand,
    w: operands.Operand,
    group_sizes: Int[Array, "E"],
    *,
    rows: Int[Array, "M"] | None = None,
    out_dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiplies consecutive groups of rows, each with its own matrix: row i of group e gives ``x[i] @ w[e].T``.

    The semantics are those of `jax.lax.ragged_dot`: rows behind the last group give zeros, groups may be empty. A row's bits
    do not depend on the sizes of the groups, and equal those of `matmul` with the same matrix.

    Args:
      x: [M, K], rows sorted by group: `Nvfp4Array` with an outer scale per row or one, or bfloat16 / float32.
      w: [E, N, K]: `Nvfp4Array` with one outer scale per group [E], or bfloat16 / float32.
      group_sizes: [E] int32, sum at most M.
      rows: [M] int32, or None. With it `x` is [any, K], and row i of the product is that of ``x[rows[i]]``: a token's row need
        not be copied to each of its experts.
      out_dtype: bfloat16 or float32.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: K or E differs.
    """
    operands.check_contraction("grouped_matmul", x, w)
    reference.check_groups(w, group_sizes)
    packed = operands.packed_product(x, w, x.shape[0] if rows is None else rows.shape[0]) is not None
    dtype = operands.product_dtype(x, w)
    how = dict(forward=True, packed=packed, gathered=rows is not None)
    chosen = operands.resolve_matmul("grouped_matmul", implementation, dtype, *w.shape[1:], **how)
    if chosen != "reference":
        from pallas_kernels.grouped_matmul import triton

        return triton.grouped_matmul(x, w, group_sizes, rows=rows, out_dtype=out_dtype, kernel=chosen)
    if rows is not None:
        x = operands.take_rows(x, rows)
    return reference.grouped_matmul(x, w, group_sizes, out_dtype=out_dtype)


def grouped_matmul_dgrad(
    g: Float[Array, "M N"],
    w: operands.Operand,
    group_sizes: Int[Array, "E"],
    *,
    out_dtype=jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "M K"]:
    """Gradient with respect to `x`: ``g[i] @ dequantized(w[e])``; zeros for rows behind the last group.

    Args: see `pallas_kernels.matmul.matmul_dgrad` and `grouped_matmul`.
    """
    chosen = operands.resolve_matmul("grouped_matmul_dgrad", implementation, operands.gradient_dtype(w), *w.shape[1:])
    if chosen != "reference":
        from pallas_kernels.grouped_matmul import triton

        return triton.grouped_matmul_dgrad(g, w, group_sizes, out_dtype=out_dtype, kernel=chosen)
    return reference.grouped_matmul_dgrad(g, w, group_sizes, out_dtype=out_dtype)


def grouped_matmul_wgrad(
    x: operands.Operand, g: Float[Array, "M N"], group_sizes: Int[Array, "E"], *, implementation: str | None = None
) -> Float[Array, "E N K"]:
    """Gradient with respect to `w`: per group ``g.T @ dequantized(x)`` in float32; exact zeros for an empty group."""
    dtype = operands.gradient_dtype(x)
    chosen = operands.resolve_matmul("grouped_matmul_wgrad", implementation, dtype, g.shape[1], x.shape[1])
    if chosen != "reference":
        from pallas_kernels.grouped_matmul import triton

        return triton.grouped_matmul_wgrad(x, g, group_sizes, kernel=chosen)
    return reference.grouped_matmul_wgrad(x, g, group_sizes)
