"""What the Mosaic matmuls are made of: a ring of tiles in shared memory, one warpgroup that fills it, two that multiply.

A thread block holds two warpgroups that multiply and one that does nothing but ask the TMA unit for the next tiles of both
operands. They meet at a ring of `stages` slots in shared memory: a slot is loaded ("full"), multiplied, and given back ("empty").
Both multipliers work on one tile of the output, each on its own rows, and share the other operand. The loader runs ahead into
the next tile while they still store the last one. As many blocks as there are processors go through all tiles; which tile is
whose is arithmetic on the tile's number.

A kernel (`mosaic.py`) says what its tiles are (`Work`); `run` does the rest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

_CHUNK_BYTES = 128  # of a row, loaded in a step or stored by one copy: the width of the swizzle
_CHUNK_ROWS = 64
MULTIPLIERS = 2  # warpgroups that share a tile
_REGISTERS = (40, 232)  # of a loader's and of a multiplier's thread
# Pallas can put a barrier of the warpgroup around every access to shared memory. Here threads meet where it is said: at the
# ring's barriers, in `commit_smem`, and in `wait_smem_to_gmem`.
AUTOMATIC_BARRIERS = False


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut. Changes speed, never bits.

    Attributes:
      rows: rows of the output tile of one warpgroup, 64 or 128.
      columns: columns of the output tile, up to 256.
      stages: slots of the ring.
      width: this many tiles of rows go through all columns together, so that what is read again is in the cache.
      chunks: parts of a result, 64 rows x 128 bytes, that may be on their way out of a multiplier; where all of a tile's are, it
        does not wait for them.
    """

    rows: int = 64
    columns: int = 256
    stages: int = 4
    width: int = 8
    chunks: int = 2

    @property
    def tile_rows(self) -> int:
        return self.rows * MULTIPLIERS


def depth_of_step(dtype) -> int:
    """How many numbers of K one step sums: 128 bytes of them."""
    return _CHUNK_BYTES // jnp.dtype(dtype).itemsize


def swizzled(dtype) -> tuple:
    """Rows of 128 bytes in the order that the tensor cores read without bank conflicts."""
    width = _CHUNK_BYTES // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(_CHUNK_BYTES))


def two_views(shape, dtype) -> plgpu.RefUnion:
    """Shared memory [.., R, 128 bytes] as the tensor cores and registers see it, and as the TMA unit sees it.

    The bytes are the same: 8 rows of 128 bytes after 8 rows of 128 bytes are R rows of 128 bytes. But Mosaic copies to tiled
    memory only from rows whose number it knows to be a multiple of 8, where groups begin at any row, and only where whole tiles
    make up the axis, where K may end within one.
    """
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
        plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(_CHUNK_BYTES),)),
    )


def two_views_of_tiles(shape, dtype) -> plgpu.RefUnion:
    """The same for [.., R, C] with rows longer than 128 bytes: the TMA unit sees 8-row groups of tiles of 8 x 128 bytes."""
    *leading, rows, columns = shape
    width = _CHUNK_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
        plgpu.SMEM((*leading, rows // 8, columns // width, 8, width), dtype, transforms=(plgpu.SwizzleTransform(_CHUNK_BYTES),)),
    )


def views(union, interpret) -> tuple:
    """The views of `two_views`. Pallas's interpreter knows no layouts and keeps each view by itself: there the first is both."""
    tiled, rows = union
    return (tiled, tiled) if interpret else (tiled, rows)


def _scratch(config: Config, a_smem, b_smem, out_dtype, copies: int) -> dict:
    chunk = (_CHUNK_ROWS, _CHUNK_BYTES // jnp.dtype(out_dtype).itemsize)
    return dict(
        a_smem=a_smem,
        b_smem=b_smem,
        out_smem=two_views((MULTIPLIERS, config.chunks, *chunk), out_dtype),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=config.stages),
        joined=plgpu.Barrier(num_arrivals=MULTIPLIERS),
    )


def _block() -> tuple[jax.Array, int]:
    """This block's number, and how many there are."""
    return lax.axis_index("block"), lax.axis_size("block")


def _my_tiles(num_tiles):
    """How many tiles this block has, if it takes every `lax.axis_size`-th one."""
    first, stride = _block()
    return lax.div(num_tiles - first + stride - 1, jnp.int32(stride))


def _load_tiles(config: Config, num_tiles, steps_of_tile, copy, full, empty) -> None:
    """The loader: `copy(tile)(k, slot)` for each step k of each tile, as slots become empty."""
    plgpu.set_max_registers(_REGISTERS[0], action="decrease")
    first, stride = _block()

    def load_tile(i, done):
        tile = first + i * stride
        copy_step = copy(tile)

        def load(k, _):
            step = done + k
            slot = lax.rem(step, jnp.int32(config.stages))

            @pl.when(step >= config.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            copy_step(k, slot)

        steps = steps_of_tile(tile)
        lax.fori_loop(0, steps, load, None)
        return done + steps

    done = lax.fori_loop(0, _my_tiles(num_tiles), load_tile, jnp.int32(0))

    # Every slot comes back before the block ends: the interpreter takes a barrier that nobody saw pass as an error.
    def wait(step, _):
        plgpu.barrier_wait(empty.at[lax.rem(step, jnp.int32(config.stages))])

    lax.fori_loop(jnp.maximum(done - config.stages, 0), done, wait, None)


def _multiply_tiles(config: Config, num_tiles, steps_of_tile, look_up, multiply_tile) -> None:
    """A multiplier: `multiply_tile(tile, found, steps, slot_of)` for each of its tiles; slot_of(k) is the slot of step k."""
    plgpu.set_max_registers(_REGISTERS[1], action="increase")
    first, stride = _block()

    def find(i):
        return look_up(jnp.minimum(first + i * stride, num_tiles - 1))

    def one(i, carry):
        done, found = carry
        tile = first + i * stride
        # Asked for a whole tile ahead, since a multiplier that waits for memory keeps the tensor cores waiting.
        found_next = find(i + 1)
        steps = steps_of_tile(tile)
        slot_of = lambda k: lax.rem(done + k, jnp.int32(config.stages))  # noqa: E731
        multiply_tile(tile, found, steps, slot_of)
        return done + steps, found_next

    lax.fori_loop(0, _my_tiles(num_tiles), one, (jnp.int32(0), find(0)))


def store_tile(total, out_at, rows, first_row, first_column, chunks, leaving) -> None:
    """Stores the first `rows` rows of a multiplier's tile, in chunks, from registers through shared memory.

    Args:
      total: the tile, float32.
      out_at: (row, number of rows, column, number of columns) to a part of the output.
      rows: how many rows are the group's; None: all. Fewer than the tile's only for small groups.
      first_row, first_column: of the tile, in the output.
      chunks, leaving: the two views of shared memory.
    """
    multiplier = lax.axis_index("multiplier")
    num_slots, height, width = chunks.shape[1:]
    tile_rows, tile_columns = total.shape
    places = [(r, c) for r in range(0, tile_rows, height) for c in range(0, tile_columns, width)]

    def store(copy_chunk) -> None:
        for i, (r, c) in enumerate(places):
            slot = i % num_slots
            plgpu.wait_smem_to_gmem(num_slots - 1, wait_read_only=True)  # what this slot held has left
            chunks[multiplier, slot] = total[r : r + height, c : c + width].astype(chunks.dtype)
            plgpu.commit_smem()
            copy_chunk(leaving.at[multiplier, slot], r, first_column + c)

    def copy_all(chunk, r, column) -> None:
        plgpu.copy_smem_to_gmem(chunk, out_at(first_row + r, height, column, width))

    def copy_some(chunk, r, column) -> None:
        left = jnp.clip(rows - r, 0, height)

        def copy_rows(done, number) -> None:
            part = chunk.at[pl.ds(done, number)]
            plgpu.copy_smem_to_gmem(part, out_at(first_row + r + done, number, column, width), commit_group=False)

        lax.fori_loop(0, lax.div(left, jnp.int32(8)), lambda i, _: copy_rows(8 * i, 8), None)
        for number in (4, 2, 1):
            pl.when((left & number) != 0)(lambda number=number: copy_rows(left & ~(2 * number - 1), number))
        plgpu.commit_smem_to_gmem_group()

    if rows is None:
        store(copy_all)
        return

    @pl.when(rows == tile_rows)
    def _():
        store(copy_all)

    @pl.when((rows > 0) & (rows < tile_rows))
    def _():
        store(copy_some)


@dataclasses.dataclass(frozen=True)
class Ring:
    """What the warpgroups of a block share: slots of both operands, chunks on their way out, and barriers."""

    a_smem: Any
    b_smem: Any
    out_smem: Any
    full: Any
    empty: Any
    joined: Any


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel says about its tiles.

    Attributes:
      num_tiles: of the output, at least 1.
      steps: tile -> how many steps its sum has.
      look_up: tile -> integers about it that a multiplier reads from memory, a tuple.
      copy: tile -> a function (step, slot) that asks for the operands of a step.
      multiply: (tile, found, steps, slot_of): sums a multiplier's part of a tile and stores it. found: what `look_up` gave;
        slot_of(k): the slot of step k.
    """

    num_tiles: Any
    steps: Callable
    look_up: Callable
    copy: Callable
    multiply: Callable


def sum_steps(ring: Ring, shape: tuple[int, int], steps, slot_of, product, *, whole=None, prepare=None) -> jax.Array:
    """The float32 sum over all steps of a tile, each slot waited for and given back.

    Args:
      ring: the block's.
      shape: of the sum.
      steps: how many.
      slot_of: the slot of a step.
      product: (reference to the sum, slot): adds a step's product.
      whole: how many steps need no `prepare`; None: all.
      prepare: (slot): done to a loaded slot before it is multiplied.
    """

    def sum_up(total_ref):
        def step(s, _, *, prepare):
            slot = slot_of(s)
            plgpu.barrier_wait(ring.full.at[slot])
            if prepare is not None:
                prepare(slot)
            product(total_ref, slot)
            plgpu.wgmma_wait(1)  # the step before this one is done, its slot free

            @pl.when(s > 0)
            def _():
                plgpu.barrier_arrive(ring.empty.at[slot_of(s - 1)])

        lax.fori_loop(0, steps if whole is None else whole, functools.partial(step, prepare=None), None)
        if whole is not None:
            lax.fori_loop(whole, steps, functools.partial(step, prepare=prepare), None)
        return total_ref[...]

    total = pl.run_scoped(sum_up, plgpu.ACC(shape, jnp.float32))

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_arrive(ring.empty.at[slot_of(steps - 1)])

    return total


def skip_steps(ring: Ring, steps, slot_of) -> None:
    """Gives all steps of a tile back unread: what `sum_steps` is for a multiplier that has no rows of it."""

    def skip(s, _):
        plgpu.barrier_wait(ring.full.at[slot_of(s)])
        plgpu.barrier_arrive(ring.empty.at[slot_of(s)])

    lax.fori_loop(0, steps, skip, None)


def run(
    name, work_of, inputs, config: Config, out_type, a_smem, b_smem, *, copies: int, processors: int | None, interpret
) -> jax.Array:
    """Runs a kernel.

    Args:
      name: what profiles call it.
      work_of: (references to the inputs, reference to the output, the ring) -> `Work`.
      inputs: arrays.
      config: how the work is cut.
      out_type: shape and type of the output.
      a_smem, b_smem: the slots of both operands.
      copies: of a step, each of which arrives by itself.
      processors: thread blocks to start; None: as many as the device has processors.
      interpret: parameters of Pallas's interpreter, for a machine without a GPU.
    """
    def body(*refs, **shared):
        work = work_of(refs[:-1], refs[-1], Ring(**shared))

        def load():
            _load_tiles(config, work.num_tiles, work.steps, work.copy, shared["full"], shared["empty"])

        def multiply_all():
            _multiply_tiles(config, work.num_tiles, work.steps, work.look_up, work.multiply)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(lax.axis_index("multiplier") == MULTIPLIERS, load, multiply_all)

    semantics = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=not AUTOMATIC_BARRIERS
    )
    scratch = _scratch(config, a_smem, b_smem, out_type.dtype, copies)
    return mosaic.start(
        name, body, out_type, scratch, inputs, processors=processors, interpret=interpret, num_threads=MULTIPLIERS + 1,
        thread_name="multiplier", compiler_params=semantics,
    )  # fmt: skip
