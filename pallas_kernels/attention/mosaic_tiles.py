"""What the Mosaic kernels of attention share: blocks of 64, how tiles are shared out to thread blocks, how a kernel is started.

A thread block has two warpgroups that multiply and one that loads (`kernel`). There are as many thread blocks as processors, and
each goes through its tiles (`take_turns`).
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, gpu
from pallas_kernels.grouped_matmul.mosaic_ring import swizzled

__all__ = ["BLOCK", "MULTIPLIERS", "kernel", "slots", "take_turns"]

BLOCK = 64  # keys of a block, and rows of a multiplier: part of the order of sums
MULTIPLIERS = 2
_HOPPER_PROCESSORS = 132


def slots(shape):
    """Shared memory for tiles [.., rows, K] bfloat16 that the tensor cores read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16))


def take_turns(num_tiles: int):
    """(how many tiles this thread block has, number of its i-th). The first are the longest.

    Every other round goes backwards, so that no block has the longest tile of every round.
    """
    first, stride = lax.axis_index("block"), lax.axis_size("block")

    def number(i):
        odd = lax.rem(i, jnp.int32(2)) == 1
        return i * stride + jnp.where(odd, stride - 1 - first, first)

    rounds, rest = divmod(num_tiles, stride)
    return rounds + jnp.where(jnp.where(rounds % 2 == 1, stride - 1 - first, first) < rest, 1, 0), number


def kernel(name, body, out_type, scratch, inputs, *, processors: int | None, interpret):
    """Runs `body` on as many thread blocks as there are processors (None: the device's): two multipliers and a loader each.

    Args:
      name: what profiles call it.
      body: function of references to the inputs, to the outputs and, by name, to `scratch`.
      out_type: shape and type of the output, or a tuple of several.
    """
    if dispatch.planned_capability() is not None:
        planned = gpu.plan(name, jax.tree.leaves(out_type), *inputs)
        return jax.tree.unflatten(jax.tree.structure(out_type), planned)
    body.__name__ = name
    if processors is None:
        device = jax.devices()[0]
        processors = device.core_count if device.platform == "gpu" else _HOPPER_PROCESSORS
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(processors,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*inputs)
