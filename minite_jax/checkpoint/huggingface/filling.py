"""Arrays that are filled block by block where they will live, so that the host never holds a second copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


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
