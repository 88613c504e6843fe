"""Starting a Pallas (Mosaic GPU) kernel that goes through its tiles by itself: one thread block for each processor."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import dispatch, gpu

__all__ = ["start"]

_HOPPER_PROCESSORS = 132


def start(name: str, body, out_type, scratch, inputs, *, processors: int | None, **settings):
    """Runs `body` in so many thread blocks, along the grid's axis "block".

    Args:
      name: what profiles call it.
      body: function of references to the inputs, to the outputs and, by name, to `scratch`.
      out_type: shape and type of the output, or a tuple of several.
      scratch: shared memory and barriers by name.
      inputs: arrays.
      processors: thread blocks; None: as many as the device has processors.
      settings: of `plgpu.kernel`.
    """
    if dispatch.planned_capability() is not None:
        planned = gpu.plan(name, jax.tree.leaves(out_type), *inputs)
        return jax.tree.unflatten(jax.tree.structure(out_type), planned)
    if processors is None:
        device = jax.devices()[0]
        processors = device.core_count if device.platform == "gpu" else _HOPPER_PROCESSORS
    body.__name__ = name
    grid = dict(grid=(processors,), grid_names=("block",))
    return plgpu.kernel(body, out_type=out_type, scratch_types=scratch, **grid, **settings)(*inputs)
