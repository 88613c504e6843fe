"""NVFP4 tensors with codes and block scales multiplied out: what a GPU without FP4 units reads."""

from typing import Any

import flax.struct
import jax.numpy as jnp

from pallas_kernels.nvfp4.array import Nvfp4Array, block_values


@flax.struct.dataclass
class ExpandedArray:
    """The numbers of an `Nvfp4Array` of shape [..., M, K], one by one. A pytree of two arrays.

    Number = value x outer_scale, in float32. Exact: nothing is rounded on the way from the codes.

    Attributes:
      values: code x block_scale [..., M, K]: float8_e4m3fn (only for `fp8_exact` tensors) or bfloat16.
      outer_scale: float32 [..., M] (one per row) or [...] (one per matrix).
    """

    # `Any`, as in `Nvfp4Array`.
    values: Any
    outer_scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., M, K]."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def outer_per_row(self) -> bool:
        """Whether there is one outer scale per row (else one per matrix)."""
        return self.outer_scale.ndim == self.values.ndim - 1


def check_expandable(fp8_exact: bool, dtype) -> None:
    """Raises where values of such scales cannot be held exactly.

    Raises:
      ValueError: another type than float8_e4m3fn or bfloat16, or float8_e4m3fn where the scales are not `fp8_exact`.
    """
    if dtype not in (jnp.float8_e4m3fn, jnp.bfloat16):
        raise ValueError(f"values expand to float8_e4m3fn or bfloat16, not {jnp.dtype(dtype)}")
    if dtype == jnp.float8_e4m3fn and not fp8_exact:
        raise ValueError(
            "code x block scale of this tensor may not be an E4M3 number (its rule is not fp8_exact); expand it to bfloat16"
        )


def expand_reference(q: Nvfp4Array, dtype) -> ExpandedArray:
    """`nvfp4.expand` in plain jnp. The cast is exact, so that it is harmless if a compiler drops it."""
    return ExpandedArray(values=block_values(q).astype(dtype), outer_scale=q.outer_scale)
