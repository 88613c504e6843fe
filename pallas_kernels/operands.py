"""What a matmul reads: plain arrays or NVFP4 (packed or multiplied out), as exact float32 values and an outer scale that is
applied to the sum."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import numerics, nvfp4

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


def check_contraction(op: str, x: Operand, w: Operand) -> None:
    """Raises ValueError where the last axes (K) differ."""
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{op}: x {tuple(x.shape)} and w {tuple(w.shape)} must agree in their last axis, K")
