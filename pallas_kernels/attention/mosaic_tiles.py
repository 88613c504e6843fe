"""What the Mosaic kernels of attention share: blocks of 64, how tiles are shared out, who does what, how a kernel is started.

A thread block has two warpgroups that multiply and one that loads (`kernel`). There are as many thread blocks as processors, and
each goes through its tiles (`take_turns`).
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul.mosaic_ring import swizzled

__all__ = ["BLOCK", "MULTIPLIERS", "divide_work", "kernel", "slots", "take_turns"]

BLOCK = 64  # keys of a block, and rows of a multiplier: part of the order of sums
MULTIPLIERS = 2


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


def divide_work(me, registers: tuple[int, int], my_tiles, load_tile, multiply_tile, *, stages: int, wait_for_slot, wait_for_tile):
    """The loader loads all tiles and waits until everything came back; the others multiply them.

    Args:
      me: number of this warpgroup.
      registers: of a loader's and of a multiplier's thread.
      my_tiles: how many tiles the thread block has.
      load_tile, multiply_tile: (tile, steps done before it) -> steps done after it.
      stages: slots of the loader's rings.
      wait_for_slot: waits until the slots of a step are given back.
      wait_for_tile: the same for what a tile has once.
    """

    def load_all():
        plgpu.set_max_registers(registers[0], action="decrease")
        done = lax.fori_loop(0, my_tiles, load_tile, jnp.int32(0))
        lax.fori_loop(jnp.maximum(done - stages, 0), done, lambda step, _: wait_for_slot(step), None)
        pl.when(my_tiles > 0)(wait_for_tile)

    def multiply_all():
        plgpu.set_max_registers(registers[1], action="increase")
        lax.fori_loop(0, my_tiles, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(me == MULTIPLIERS, load_all, multiply_all)


def kernel(name, body, out_type, scratch, inputs, *, processors: int | None, interpret):
    """`mosaic.start` with two multipliers and a loader in each thread block, the warpgroups of the axis "warpgroup"."""
    return mosaic.start(
        name, body, out_type, scratch, inputs, processors=processors, interpret=interpret, num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup", compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )  # fmt: skip
