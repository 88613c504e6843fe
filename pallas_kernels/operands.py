"""What a matmul reads: plain arrays or NVFP4 (packed or multiplied out), as exact float32 values and an outer scale that is
applied to the sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gpu, numerics, nvfp4

Operand = Float[Array, "..."] | nvfp4.Nvfp4Array | nvfp4.ExpandedArray


def values(operand: Operand) -> Float[Array, "..."]:
    """The numbers that are multiplied and summed, float32: code x block scale for NVFP4 (exact), else the array itself."""
    if isinstance(operand, nvfp4.Nvfp4Array):
        return nvfp4.block_values(operand)
    if isinstance(operand, nvfp4.ExpandedArray):
        return operand.values.astype(jnp.float32)
    return operand.astype(jnp.float32)


def outer_scale(operand: Operand) -> Float[Array, "..."] | None:
    """The factor that multiplies the finished sum, or None."""
    return operand.outer_scale if isinstance(operand, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray)) else None


def dequantized(operand: Operand) -> Float[Array, "..."]:
    """The numbers that the operand stands for, float32: what the backward differentiates."""
    if isinstance(operand, nvfp4.Nvfp4Array):
        return nvfp4.dequantize(operand)
    if isinstance(operand, nvfp4.ExpandedArray):
        outer = operand.outer_scale[..., None] if operand.outer_per_row else operand.outer_scale[..., None, None]
        return numerics.separate_product(operand.values.astype(jnp.float32) * outer)
    return operand.astype(jnp.float32)


def take_rows(operand: Operand, rows: Int[Array, "M"]) -> Operand:
    """Row rows[i] of the operand for each i, with its outer scale."""
    if isinstance(operand, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray)) and not operand.outer_per_row:
        shared = operand.outer_scale  # one for the whole tensor: every row has it already
        return jax.tree.map(lambda leaf: leaf if leaf is shared else leaf[rows], operand)
    return jax.tree.map(lambda leaf: leaf[rows], operand)


def check_contraction(op: str, x: Operand, w: Operand) -> None:
    """Raises ValueError where the last axes (K) differ."""
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{op}: x {tuple(x.shape)} and w {tuple(w.shape)} must agree in their last axis, K")


def product_dtype(x: Operand, w: Operand):
    """The type in which a GPU multiplies two operands: float8_e4m3fn for two `fp8_exact` ones, bfloat16 for other NVFP4, else
    that of the plain array."""
    for each in (x, w):
        if not isinstance(each, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray)):
            return each.dtype
    return jnp.dtype(jnp.float8_e4m3fn if _is_e4m3(x) and _is_e4m3(w) else jnp.bfloat16)


def _is_e4m3(operand) -> bool:
    if isinstance(operand, nvfp4.ExpandedArray):
        return operand.values.dtype == jnp.float8_e4m3fn
    return operand.fp8_exact


def gradient_dtype(operand: Operand):
    """The type in which a GPU multiplies an output gradient with an operand: bfloat16 for NVFP4, else that of the plain array."""
    nvfp4_like = isinstance(operand, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray))
    return jnp.dtype(jnp.bfloat16) if nvfp4_like else operand.dtype


# Up to so many rows for a weight matrix its packed bytes are read and expanded in the kernel; beyond, they are expanded once.
# Either way gives the same bits.
PACKED_ROWS = 64


def packed_product(x: Operand, w: Operand, num_rows: int) -> str | None:
    """How a GPU's forward multiplies with packed weights that it reads itself: for few rows, and where it has FP4 units.

    Returns:
      "native" (codes as they are), "fp8" or "bf16" (expanded in the kernel), or None: weights are expanded beforehand.
    """
    if not isinstance(w, nvfp4.Nvfp4Array) or not isinstance(x, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray)):
        return None
    if isinstance(x, nvfp4.Nvfp4Array) and gpu.multiplies_codes():
        return "native"
    if num_rows > PACKED_ROWS * (w.shape[0] if w.ndim == 3 else 1):
        return None
    return "fp8" if product_dtype(x, w) == jnp.float8_e4m3fn else "bf16"


def resolve_matmul(
    op: str, implementation: str | None, dtype, n: int, k: int, *, forward: bool = False, packed: bool = False,
    gathered: bool = False,
) -> str:  # fmt: skip
    """`dispatch.resolve` for a product in this type with a matrix of N x K.

    On Hopper bfloat16 goes to Mosaic, which has the TMA unit where Triton's kernels have pointers (1.2 times as fast), and so
    does the forward product of E4M3 (1.0 to 1.27 times). Both give the same bits.

    Args:
      op, implementation: see `dispatch.resolve`.
      dtype: what is multiplied.
      n, k: of the matrix.
      forward: both operands have the summed axis innermost, which E4M3 needs.
      packed: the kernel reads packed weights; Triton's alone does.
      gathered: rows of x are taken by number. In E4M3 Triton's kernel takes them while it loads; Mosaic's would need a copy.
    """
    e4m3 = dtype == jnp.float8_e4m3fn and forward and k % 16 == 0 and not gathered
    fits = n % 64 == 0 and not packed and (e4m3 or (dtype == jnp.bfloat16 and k % 64 == 0))
    gpu_default = "mosaic" if gpu.on_hopper() and fits else "triton"
    available = ("reference", "triton", "mosaic")
    name = op
    if dispatch.platform() == "gpu":
        name = f"{op} in {jnp.dtype(dtype).name}{' of packed weights' if packed else ''}{' of gathered rows' if gathered else ''}"
    return dispatch.resolve(name, implementation, available, gpu_default=gpu_default)
