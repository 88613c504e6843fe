"""Arrays that are filled block by block where they will live, so that the host never holds a second copy."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.names import Placement
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec, abstract_params, path_name

Target = jax.sharding.Sharding | Callable[[ParamSpec], jax.sharding.Sharding] | None
Pieces = Callable[[Placement], Iterator[tuple[int, int, np.ndarray]]]


class Filling:
    """One array, given its shape, type and sharding."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding):
        self._shape, self._sharding = shape, sharding
        self._shards = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
            local = tuple(last - first for first, last in bounds)
            self._shards.append((_shard_on(device)(device, local, dtype), bounds))

    def put(self, block: np.ndarray, start: tuple[int, ...]) -> None:
        """Writes a block of the whole array, whose corner is at `start`, to the shards that it meets."""
        for shard, bounds in self._shards:
            meets = [
                (max(first, at), min(last, at + size)) for (first, last), at, size in zip(bounds, start, block.shape, strict=True)
            ]
            if all(low < high for low, high in meets):
                part = block[(*(slice(low - at, high - at) for (low, high), at in zip(meets, start, strict=True)), ...)]
                shard.put(part, tuple(low - first for (low, _), (first, _) in zip(meets, bounds, strict=True)))

    def finish(self) -> jax.Array:
        """The array. Nothing may be put afterwards."""
        arrays = [shard.finish() for shard, _ in self._shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


class _HostShard:
    """A shard of a CPU device: written by numpy, then handed over without a copy."""

    def __init__(self, device, shape, dtype):
        self._device = device
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.empty(size + 64, np.uint8)
        aligned = memory[-memory.ctypes.data % 64 :][:size]  # jax copies what does not begin at a multiple of 64
        self._array = aligned.view(dtype).reshape(shape)

    def put(self, part: np.ndarray, start: tuple[int, ...]) -> None:
        self._array[tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))] = part

    def finish(self) -> jax.Array:
        array = jax.device_put(self._array, self._device, may_alias=True)
        del self._array
        return array


class _DeviceShard:
    """A shard of another device: each part goes there alone and is written in place."""

    def __init__(self, device, shape, dtype):
        self._device = device
        self._array = jnp.zeros(shape, dtype, device=device)

    def put(self, part: np.ndarray, start: tuple[int, ...]) -> None:
        part = jax.device_put(part, self._device)
        # Wait: the host would otherwise read on, and parts that are under way pile up.
        self._array = _write_part(self._array, part, tuple(map(np.int32, start))).block_until_ready()

    def finish(self) -> jax.Array:
        return self._array


@functools.partial(jax.jit, donate_argnums=0)
def _write_part(array, part, start):
    return jax.lax.dynamic_update_slice(array, part, start)


def _shard_on(device) -> type:
    return _HostShard if device.platform == "cpu" else _DeviceShard


def fill_params(
    config: ModelConfig,
    placements: Sequence[Placement],
    pieces: Pieces,
    dtype: np.dtype,
    sharding: Target,
    progress: Callable[[int], None] | None,
) -> dict:
    """The tree of `abstract_params`, each leaf filled block by block where it will live.

    Args:
      config: shape of the model.
      placements: where each tensor lies in the tree.
      pieces: gives a tensor in runs of its first axis: number of the first row, bytes in the file, and the numbers in `dtype`.
      dtype: float32 or bfloat16.
      sharding: of every parameter, or a function that says it for each `ParamSpec`. None: the default device.
      progress: called with the number of bytes of each piece.

    Raises:
      ValueError: another dtype.
    """
    check_dtype(dtype)
    by_leaf = group_by_leaf(placements)

    def fill(path, spec: ParamSpec) -> jax.Array:
        return fill_leaf(spec.shape, dtype, target(sharding, spec), by_leaf[path_name(path)], pieces, progress)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def check_dtype(dtype: np.dtype) -> None:
    """Raises ValueError for a type that parameters are not held in."""
    if dtype not in (np.dtype(np.float32), files.DTYPES["BF16"]):
        raise ValueError(f"dtype={dtype} must be float32 or bfloat16")


def target(sharding: Target, spec: ParamSpec) -> jax.sharding.Sharding:
    """Where a parameter goes."""
    return sharding(spec) if callable(sharding) else sharding or jnp.zeros(()).sharding


def group_by_leaf(placements: Iterable[Placement]) -> dict[str, list[Placement]]:
    """Placements by the leaf that they are blocks of."""
    by_leaf: dict[str, list[Placement]] = {}
    for each in placements:
        by_leaf.setdefault(each.leaf, []).append(each)
    return by_leaf


def fill_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    placements: Sequence[Placement],
    pieces: Pieces,
    progress: Callable[[int], None] | None,
) -> jax.Array:
    """One parameter, see `fill_params`."""
    leaf = Filling(shape, dtype, sharding)
    for each in placements:
        for first, nbytes, values in pieces(each):
            leaf.put(values.reshape((1,) * (len(each.start) - values.ndim) + values.shape), each.corner(first))
            if progress is not None:
                progress(nbytes)
    return leaf.finish()


def finite_in(dtype: np.dtype, piece: np.ndarray, tensor: files.Tensor) -> np.ndarray:
    """Numbers of a tensor in another type.

    Raises:
      CheckpointError: some are NaN, infinite, or beyond the type.
    """
    with np.errstate(over="ignore"):  # reported below
        values = piece.astype(dtype, copy=False)
    if not files.is_finite(values):
        what = f"infinity in {dtype}" if files.is_finite(piece) else "NaN or infinity"
        raise CheckpointError(f"{tensor} holds {what}: fetch the file again, or take another model")
    return values
