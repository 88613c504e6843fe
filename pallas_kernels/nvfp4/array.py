"""The NVFP4 array: what is stored, and how stored bytes are read."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nvfp4 import formats


@flax.struct.dataclass
class Nvfp4Array:
    """A tensor of shape [..., M, K] in NVFP4. A pytree of three arrays.

    Number = code x (block_scale x outer_scale), in float32, in that order.

    Attributes:
      codes: uint8 [..., M, K / 2], two E2M1 codes a byte; element 2i is in the low nibble, element 2i + 1 in
        the high one.
      block_scale: float8_e4m3fn [..., M, K / 16]. A 16x16 tile stores its scale once for each of its 16 rows.
      outer_scale: float32 [..., M] (one per row) or [...] (one per matrix).
      fp8_exact: whether the rule that made it promises that code x block_scale is an E4M3 number (see `fp8_exact.py`), so that
        a GPU may multiply it on its fp8 units. Static. False for tensors of unknown origin, which are multiplied as bfloat16.
    """

    # `Any`, since a tree of this type also carries shapes, shardings and other things that stand for arrays.
    codes: Any
    block_scale: Any
    outer_scale: Any
    fp8_exact: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this stands for: [..., M, K]."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def outer_per_row(self) -> bool:
        """Whether there is one outer scale per row (else one per matrix)."""
        return self.outer_scale.ndim == self.codes.ndim - 1

    def __getitem__(self, index) -> "Nvfp4Array":
        """Selects along leading axes, before the two of the matrix: `stack[expert]` or `stack[2:4]`.

        Raises:
          IndexError: the index would reach the rows or columns of a matrix; slice the three arrays instead.
        """
        num_leading = self.codes.ndim - 2
        num_indices = len(index) if isinstance(index, tuple) else 1
        plain = index if isinstance(index, tuple) else (index,)
        if num_indices > num_leading or any(i is None or i is Ellipsis for i in plain):
            raise IndexError(
                f"index {index!r} on an Nvfp4Array of shape {self.shape}: "
                "only the axes before the last two can be indexed"
            )
        return jax.tree.map(lambda x: x[index], self)


def pack_codes(codes: UInt8[Array, "*batch K"]) -> UInt8[Array, "*batch K//2"]:
    """Packs E2M1 codes (0..15, one a byte) two a byte: element 2i low, element 2i + 1 high.

    Raises:
      ValueError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {codes.shape}: the last axis must be even, two codes share a byte")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)


def unpack_codes(packed: UInt8[Array, "*batch half"]) -> UInt8[Array, "*batch 2*half"]:
    """The inverse of `pack_codes`: uint8 codes 0..15, one a byte."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def block_scale_values(q: Nvfp4Array) -> Float[Array, "..."]:
    """Block scales as float32 [..., M, K / 16], read from the bits (NaN for the bytes 0x7F and 0xFF)."""
    return formats.e4m3_to_float32(lax.bitcast_convert_type(q.block_scale, jnp.uint8))


def block_values(q: Nvfp4Array) -> Float[Array, "..."]:
    """code x block_scale, without the outer scale: float32 [..., M, K], what a matmul sums.

    Each value has at most 6 significant bits, so it is exact in float32, bfloat16 and float16; with
    `fp8_exact` scales it is an E4M3 number too.
    """
    values = formats.e2m1_to_float32(unpack_codes(q.codes))
    scales = block_scale_values(q)
    blocks = values.reshape(*scales.shape, formats.BLOCK) * scales[..., None]
    return blocks.reshape(q.shape)
