"""NVFP4 arrays that are filled matrix by matrix, and what their scales may be."""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.filling import Filling
from pallas_kernels.nvfp4 import FP8_EXACT_SCALES, FP8_EXACT_SCALES_UP_TO_4, Nvfp4Array

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def _bytes_of(scales: tuple[float, ...]) -> np.ndarray:
    table = np.zeros(256, bool)
    table[np.array(scales, _E4M3).view(np.uint8)] = True
    return table


_IN_SET, _UP_TO_4 = _bytes_of(FP8_EXACT_SCALES), _bytes_of(FP8_EXACT_SCALES_UP_TO_4)


def is_fp8_exact(codes: np.ndarray, scales: np.ndarray) -> bool:
    """`pallas_kernels.nvfp4.is_fp8_exact` of arrays on the host: codes uint8 [..., K / 2], scales E4M3 [..., K / 16]."""
    stored = scales.view(np.uint8)
    beyond = ~_IN_SET[stored]
    if not beyond.any():
        return True
    if not _UP_TO_4[stored[beyond]].all():
        return False
    pairs = codes.reshape(*scales.shape, 8)[beyond]
    return bool(((pairs & 7) < 7).all() and ((pairs >> 4 & 7) < 7).all())


def check_scales(tensor: files.Tensor, scales: np.ndarray) -> None:
    """Raises CheckpointError where block scales are NaN or negative: no quantiser writes such."""
    stored = scales.view(np.uint8)
    if int(stored.max()) >= 0x7F:
        what = "NaN" if ((stored & 0x7F) == 0x7F).any() else "a negative scale"
        raise CheckpointError(f"{tensor} holds {what}: fetch the file again, or take another model")


class PackedFilling:
    """An `Nvfp4Array` of a shape [..., M, K], with one outer scale for each matrix."""

    def __init__(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding):
        self._codes = Filling((*shape[:-1], shape[-1] // 2), np.dtype(np.uint8), sharding)
        self._block_scale = Filling((*shape[:-1], shape[-1] // 16), _E4M3, sharding)
        self._outer_shape = shape[:-2]
        self._outer_sharding = _leading_axes(sharding, len(shape) - 2)
        self._outer = np.full(self._outer_shape, np.nan, np.float32)

    def put(self, codes: np.ndarray, block_scale: np.ndarray, start: tuple[int, ...]) -> None:
        """Rows of one matrix, whose first is at `start`."""
        axes = (1,) * (len(start) - codes.ndim)
        self._codes.put(codes.reshape(axes + codes.shape), start)
        self._block_scale.put(block_scale.reshape(axes + block_scale.shape), start)

    def put_outer(self, outer: Any, index: tuple[int, ...] = ()) -> None:
        """Outer scales: all of them, or that of one matrix."""
        self._outer[index] = np.asarray(outer).reshape(self._outer[index].shape)

    def finish(self) -> Nvfp4Array:
        """The array. Nothing may be put afterwards."""
        outer = Filling(self._outer_shape, np.dtype(np.float32), self._outer_sharding)
        outer.put(self._outer, (0,) * self._outer.ndim)
        return Nvfp4Array(self._codes.finish(), self._block_scale.finish(), outer.finish())


def _leading_axes(sharding: jax.sharding.Sharding, ndim: int) -> jax.sharding.Sharding:
    """The sharding of an array that has only the first axes."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[:ndim]))
