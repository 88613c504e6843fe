"""The one dense matmul. Let M be rows (tokens), N output features, K the summed axis."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, operands
from pallas_kernels.matmul import reference


@dispatch.replaceable
def matmul(
    x: operands.Operand, w: operands.Operand, *, out_dtype=jnp.bfloat16, implementation: str | None = None
) -> Float[Array, "M N"]:
    """Computes ``x @ w.T``: row i of the result depends on row i of `x` and on `w` alone, bit for bit.

    NVFP4 operands are summed as code x block scale, products of at most 12 significant bits each, in float32; the outer
    scales multiply the finished sum, first that of `x`, then that of `w`.

    Args:
      x: [M, K] activations: `Nvfp4Array` with one outer scale per row or per matrix, or bfloat16 / float32.
      w: [N, K] weights: `Nvfp4Array` with one outer scale per matrix, or bfloat16 / float32.
      out_dtype: bfloat16 (rounded once, to nearest even) or float32.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: K differs.
      NotImplementedError: unknown implementation.
    """
    operands.check_contraction("matmul", x, w)
    packed = operands.packed_product(x, w, x.shape[0]) is not None
    dtype = operands.product_dtype(x, w)
    chosen = operands.resolve_matmul("matmul", implementation, dtype, *w.shape, forward=True, packed=packed)
    if chosen != "reference":
        from pallas_kernels.matmul import triton

        return triton.matmul(x, w, out_dtype=out_dtype, kernel=chosen)
    return reference.matmul(x, w, out_dtype=out_dtype)


def matmul_dgrad(
    g: Float[Array, "M N"], w: operands.Operand, *, out_dtype=jnp.float32, implementation: str | None = None
) -> Float[Array, "M K"]:
    """Gradient with respect to `x`: ``g @ dequantized(w)``, summed in float32.

    Args:
      g: [M, N] gradient of the output. The GPU kernels multiply it as bfloat16 with NVFP4 or bfloat16 weights.
      w: [N, K] weights that the forward used.
      out_dtype: float32 or bfloat16 (rounded once).
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    chosen = operands.resolve_matmul("matmul_dgrad", implementation, operands.gradient_dtype(w), *w.shape)
    if chosen != "reference":
        from pallas_kernels.matmul import triton

        return triton.matmul_dgrad(g, w, out_dtype=out_dtype, kernel=chosen)
    return reference.matmul_dgrad(g, w, out_dtype=out_dtype)


def matmul_wgrad(x: operands.Operand, g: Float[Array, "M N"], *, implementation: str | None = None) -> Float[Array, "N K"]:
    """Gradient with respect to `w`: ``g.T @ dequantized(x)`` in float32, for the operand `x` [M, K] that the forward used.

    The GPU kernels multiply `g`, times the outer scales of `x`, as bfloat16.
    """
    chosen = operands.resolve_matmul("matmul_wgrad", implementation, operands.gradient_dtype(x), g.shape[1], x.shape[1])
    if chosen != "reference":
        from pallas_kernels.matmul import triton

        return triton.matmul_wgrad(x, g, kernel=chosen)
    return reference.matmul_wgrad(x, g)
