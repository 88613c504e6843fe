"""Matmuls of bfloat16 on Hopper in Pallas (Mosaic GPU), tiles loaded by the TMA unit: dense, grouped, and the weights' gradient.

A thread block holds two warpgroups that multiply and one that does nothing but ask the TMA unit for the next tiles of both
operands. They meet at a ring of `stages` slots in shared memory: a slot is loaded ("full"), multiplied, and given back ("empty").
The loader runs ahead into the next tile of the output while the multipliers still store the last one. As many blocks as there
are processors go through all tiles of the output; which tile is whose is arithmetic on the tile's number.

*Together* (the default): both multipliers work on one tile, each on its own rows, and share the other operand.
*In turns* (`Config.turns`): each has a tile and a ring of its own. The loader fills the rings tile after tile, so that one
multiplier stores while the other has the tensor cores: for sums so short that storing takes as long as multiplying.

A row's bits. Every output element is one chain of tensor core instructions over k in rising steps of 64 from a float32 zero, in
one warpgroup. Neither the tile, nor the place of the row in it, nor the rows beside it come into that. This also makes the ends
of groups cheap: the last tile of a group that has enough rows moves up until it ends with the group, and computes some rows
twice, to the same bits. Only groups smaller than a warpgroup's rows need stores of their own: eights, 4, 2, 1 rows.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

BLOCK_K = 64  # summed in one step: 128 bytes, the width of the swizzle
_CHUNK_BYTES = 128  # of a row, stored by one copy
_CHUNK_ROWS = 64
_HOPPER_PROCESSORS = 132
_MULTIPLIERS = 2  # warpgroups
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
      stages: slots of a ring.
      turns: each multiplier has tiles and a ring of its own.
      cluster: 2: two blocks load an operand together that both need; 1: each loads its own.
      share: what the blocks of a cluster share: "a" (tiles side by side) or "b" (tiles one above the other, not for groups).
      width: this many tiles of rows go through all columns together, so that what is read again is in the cache.
    """

    rows: int = 64
    columns: int = 256
    stages: int = 4
    turns: bool = False
    cluster: int = 1
    share: str = "b"
    width: int = 8

    @property
    def parts(self) -> int:
        """Multipliers that share a tile."""
        return 1 if self.turns else _MULTIPLIERS

    @property
    def rings(self) -> int:
        return _MULTIPLIERS if self.turns else 1

    @property
    def tile_rows(self) -> int:
        return self.rows * self.parts


# --- what both kernels are made of ---------------------------------------------------------------------------------------------


def _swizzled(dtype) -> tuple:
    """Rows of 128 bytes in the order that the tensor cores read without bank conflicts."""
    width = _CHUNK_BYTES // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(_CHUNK_BYTES))


def _two_views(shape, dtype) -> plgpu.RefUnion:
    """Shared memory [.., R, 128 bytes] as the tensor cores and registers see it, and as the TMA unit sees it.

    The bytes are the same: 8 rows of 128 bytes after 8 rows of 128 bytes are R rows of 128 bytes. But Mosaic copies tiled memory
    only from rows whose number it knows to be a multiple of 8, and groups begin at any row.
    """
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=_swizzled(dtype)),
        plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(_CHUNK_BYTES),)),
    )


def _two_views_of_tiles(shape, dtype) -> plgpu.RefUnion:
    """The same for [.., R, C] with rows longer than 128 bytes: the TMA unit sees 8-row groups of tiles of 8 x 128 bytes."""
    *leading, rows, columns = shape
    width = _CHUNK_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=_swizzled(dtype)),
        plgpu.SMEM((*leading, rows // 8, columns // width, 8, width), dtype, transforms=(plgpu.SwizzleTransform(_CHUNK_BYTES),)),
    )


def _views(union, interpret) -> tuple:
    """The views of `_two_views`. Pallas's interpreter knows no layouts and keeps each view by itself: there the first is both."""
    tiled, rows = union
    return (tiled, tiled) if interpret else (tiled, rows)


def _scratch(config: Config, a_smem, b_smem, out_dtype, copies: int) -> dict:
    slots = config.rings * config.stages
    chunk = (_CHUNK_ROWS, _CHUNK_BYTES // jnp.dtype(out_dtype).itemsize)
    # A slot comes back from every multiplier that reads it, in every block that it was sent to.
    readers = config.parts
    if config.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=readers, num_barriers=slots)
    else:
        empty = plgpu.Barrier(num_arrivals=readers, num_barriers=slots)
    return dict(
        a_smem=a_smem,
        b_smem=b_smem,
        out_smem=_two_views((_MULTIPLIERS, 2, *chunk), out_dtype),  # two chunks on their way out for each multiplier
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        empty=empty,
        joined=plgpu.Barrier(num_arrivals=_MULTIPLIERS),
    )


def _block() -> tuple[jax.Array, int]:
    """This block's place among those that choose tiles (a cluster chooses as one), and how many there are."""
    return lax.axis_index("block"), lax.axis_size("block")


def _my_tiles(num_tiles):
    """How many tiles this block has, if it takes every `lax.axis_size`-th one."""
    first, stride = _block()
    return lax.div(num_tiles - first + stride - 1, jnp.int32(stride))


def _load_tiles(config: Config, num_tiles, steps_of_tile, copy, full, empty) -> None:
    """The loader: `copy(tile, k, slot)` for each step of each tile, as slots become empty."""
    plgpu.set_max_registers(_REGISTERS[0], action="decrease")
    first, stride = _block()

    def load_tile(i, taken):
        tile = first + i * stride
        ring = lax.rem(i, config.rings) if config.rings > 1 else jnp.int32(0)
        done = taken[0] if config.rings == 1 else jnp.where(ring == 0, taken[0], taken[1])

        def load(k, _):
            step = done + k
            slot = ring * config.stages + lax.rem(step, jnp.int32(config.stages))

            @pl.when(step >= config.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            copy(tile, k, slot)

        steps = steps_of_tile(tile)
        lax.fori_loop(0, steps, load, None)
        return tuple(each + jnp.where(ring == r, steps, 0) for r, each in enumerate(taken))

    taken = lax.fori_loop(0, _my_tiles(num_tiles), load_tile, (jnp.int32(0),) * config.rings)
    # Every slot comes back before the block ends, from neighbours too.
    for ring, done in enumerate(taken):

        def wait(step, _, ring=ring):
            plgpu.barrier_wait(empty.at[ring * config.stages + lax.rem(step, jnp.int32(config.stages))])

        lax.fori_loop(jnp.maximum(done - config.stages, 0), done, wait, None)


def _multiply_tiles(config: Config, num_tiles, steps_of_tile, multiply_tile) -> None:
    """A multiplier: `multiply_tile(tile, steps, slot_of)` for each of its tiles; slot_of(k) is the slot of step k."""
    plgpu.set_max_registers(_REGISTERS[1], action="increase")
    multiplier = lax.axis_index("multiplier")
    first, stride = _block()
    ring = multiplier if config.turns else 0

    def one(i, done):
        if config.turns:
            i = i * _MULTIPLIERS + multiplier
        tile = first + i * stride
        steps = steps_of_tile(tile)
        multiply_tile(tile, steps, lambda k: ring * config.stages + lax.rem(done + k, jnp.int32(config.stages)))
        return done + steps

    count = _my_tiles(num_tiles)
    if config.turns:
        count = lax.div(count - multiplier + 1, jnp.int32(_MULTIPLIERS))
    lax.fori_loop(0, count, one, jnp.int32(0))


def _store_tile(total, out_at, rows, first_row, first_column, chunks, leaving) -> None:
    """Stores the first `rows` rows of a multiplier's tile, in chunks, from registers through shared memory.

    Args:
      total: the tile, float32.
      out_at: (row, number of rows, column, number of columns) to a part of the output.
      rows: how many rows are the group's; None: all. Fewer than the tile's only for small groups.
      first_row, first_column: of the tile, in the output.
      chunks, leaving: the two views of shared memory.
    """
    multiplier = lax.axis_index("multiplier")
    height, width = chunks.shape[2:]
    tile_rows, tile_columns = total.shape
    places = [(r, c) for r in range(0, tile_rows, height) for c in range(0, tile_columns, width)]

    def store(copy_chunk) -> None:
        for i, (r, c) in enumerate(places):
            slot = i % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the chunk before the last has left
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


def _run(body, config: Config, out_type, scratch, *, processors: int | None, interpret):
    if processors is None:
        device = jax.devices()[0]
        processors = device.core_count if device.platform == "gpu" else _HOPPER_PROCESSORS
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(processors // config.cluster,),
        grid_names=("block",),
        cluster=(config.cluster,) if config.cluster > 1 else (),
        cluster_names=("cluster",) if config.cluster > 1 else (),
        num_threads=_MULTIPLIERS + 1,
        thread_name="multiplier",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=not AUTOMATIC_BARRIERS
        ),
        interpret=interpret,
    )


def _split(load, multiply) -> None:
    lax.cond(lax.axis_index("multiplier") == _MULTIPLIERS, load, multiply)


# --- rows times matrices -------------------------------------------------------------------------------------------------------


def row_tiles(group_sizes: jax.Array, num_rows: int, rows: int, parts: int) -> tuple[jax.Array, ...]:
    """Cuts groups of rows into tiles of `parts` x `rows` rows. Rows behind the last group are one more group.

    Returns:
      (group [T], start [T * parts], length [T * parts], number of tiles [1]), int32. A part's length is `rows` (the last part of
      a group is moved up to end with it), 0 where the group has ended, or the group's size where that is less than `rows`.
    """
    tile_rows = parts * rows
    num_groups = group_sizes.shape[0] + 1
    capacity = num_rows // tile_rows + min(num_groups, num_rows)
    sizes_E = group_sizes.astype(jnp.int32)
    sizes_E = jnp.concatenate([sizes_E, num_rows - jnp.sum(sizes_E, keepdims=True)])
    tiles_E = (sizes_E + tile_rows - 1) // tile_rows
    # Sums of compared numbers rather than scans: XLA makes fewer kernels of them.
    upto_EE = jnp.arange(num_groups)[:, None] >= jnp.arange(num_groups)[None, :]
    ends_E = jnp.sum(jnp.where(upto_EE, sizes_E[None, :], 0), axis=1)
    tile_ends_E = jnp.sum(jnp.where(upto_EE, tiles_E[None, :], 0), axis=1)
    tile_T = jnp.arange(capacity, dtype=jnp.int32)
    group_T = jnp.sum((tile_ends_E[None, :] <= tile_T[:, None]).astype(jnp.int32), axis=1)
    group_T = jnp.minimum(group_T, num_groups - 1)
    size_T, end_T = sizes_E[group_T], ends_E[group_T]
    first_T = end_T - size_T + (tile_T - (tile_ends_E - tiles_E)[group_T]) * tile_rows
    part_TP = first_T[:, None] + rows * jnp.arange(parts, dtype=jnp.int32)[None, :]
    size_TP, end_TP = (jnp.broadcast_to(each[:, None], part_TP.shape) for each in (size_T, end_T))
    start_TP = jnp.where(size_TP >= rows, jnp.minimum(part_TP, end_TP - rows), part_TP)
    length_TP = jnp.where(part_TP < end_TP, jnp.minimum(size_TP, rows), 0)
    return group_T, start_TP.reshape(-1), length_TP.reshape(-1), tile_ends_E[-1:]


def _check(a, b, n: int, k: int, out_dtype) -> None:
    types = f"{a.dtype} x {b.dtype} -> {jnp.dtype(out_dtype).name}"
    if types not in ("bfloat16 x bfloat16 -> bfloat16", "bfloat16 x bfloat16 -> float32"):
        raise NotImplementedError(f"mosaic matmul: {types}: only bfloat16 operands, and bfloat16 or float32 results")
    if n % 64 or k % 64 or not a.size or not b.size:
        raise NotImplementedError(f"mosaic matmul: {a.shape} x {b.shape}: N and K must be multiples of 64, and nothing empty")


def multiply(a, b, group_sizes=None, a_outer=None, b_outer=None, *, out_dtype=jnp.bfloat16, transposed: bool = False,
             config: Config = Config(), processors: int | None = None, interpret=None):  # fmt: skip
    """out[i] = a[i] @ b[group of i].T, times a_outer[i], times b_outer[group of i]; rows behind the last group are zeros.

    Args:
      a: [M, K] bfloat16, rows sorted by group.
      b: [E, N, K] bfloat16; `transposed`: [E, K, N].
      group_sizes: [E] integers, sum at most M; None: one group of all rows.
      a_outer: [M] float32 or None.
      b_outer: [E] float32 or None.
      out_dtype: bfloat16 or float32.
      config: how the work is cut.
      processors: thread blocks to start; None: as many as the device has processors.
      interpret: parameters of Pallas's interpreter, for a machine without a GPU.

    Raises:
      NotImplementedError: types other than bfloat16, or N or K not a multiple of 64.
    """
    m, k = a.shape
    n = b.shape[2] if transposed else b.shape[1]
    num_groups = b.shape[0]
    _check(a, b, n, k, out_dtype)
    grouped = group_sizes is not None
    if config.cluster > 1 and (config.turns or (grouped and config.share == "b")):
        raise NotImplementedError(f"mosaic matmul: {config} does not share an operand {'between groups' if grouped else ''}")
    padded = max(m, config.rows)  # no operand may be smaller than what is loaded at once
    if padded > m:
        a = jnp.pad(a, ((0, padded - m), (0, 0)))
        a_outer = None if a_outer is None else jnp.pad(a_outer, (0, padded - m))

    rows, columns, parts = config.rows, config.columns, config.parts
    num_n = pl.cdiv(n, columns)
    share_a, share_b = (config.cluster > 1 and config.share == each for each in "ab")
    inputs = [a, b]
    if a_outer is not None:
        # Parts that are not stored still look their scales up.
        inputs.append(jnp.pad(a_outer.astype(jnp.float32), (0, config.tile_rows)))
    if b_outer is not None:
        inputs.append(jnp.pad(b_outer.reshape(-1).astype(jnp.float32), (0, 1)))
    if grouped:
        inputs += row_tiles(group_sizes, padded, rows, parts)
    names = ["a", "b"] + ["a_outer"] * (a_outer is not None) + ["b_outer"] * (b_outer is not None)
    names += ["group", "start", "length", "count"] * grouped

    def body(*refs, a_smem, b_smem, out_smem, full, empty, joined):
        del joined
        a_smem, a_landing = _views(a_smem, interpret)
        gmem = dict(zip(names, refs, strict=False))
        out = refs[len(names)]
        neighbour = lax.axis_index("cluster") if config.cluster > 1 else 0

        num_pairs_n = pl.cdiv(num_n, config.cluster) if share_a else num_n
        if grouped:
            num_tiles = gmem["count"][0] * num_pairs_n
        else:
            num_m = pl.cdiv(padded, config.tile_rows)
            num_pairs_m = pl.cdiv(num_m, config.cluster) if share_b else num_m
            num_tiles = jnp.int32(num_pairs_m * num_pairs_n)

        def place(tile):
            """(tile of rows, first column) of a tile's number."""
            if grouped:
                i, j = lax.div(tile, jnp.int32(num_pairs_n)), lax.rem(tile, jnp.int32(num_pairs_n))
            else:
                i, j = plgpu.planar_snake(tile, (num_pairs_m, num_pairs_n), 0, config.width)
            if share_b:
                i = i * config.cluster + neighbour
            if share_a:
                j = j * config.cluster + neighbour
            return i, j * columns

        def group_of(i):
            return gmem["group"][i] if grouped else jnp.int32(0)

        def part_of(i, part):
            """(first row, number of rows, or None for all) of one multiplier's part of a tile of rows."""
            if grouped:
                return gmem["start"][i * parts + part], gmem["length"][i * parts + part]
            first = i * config.tile_rows + part * rows
            return jnp.minimum(first, padded - rows), None

        def steps_of_tile(tile):
            if not grouped:
                return jnp.int32(k // BLOCK_K)
            return jnp.where(group_of(place(tile)[0]) < num_groups, jnp.int32(k // BLOCK_K), 0)

        def copy(tile, step, slot):
            i, column = place(tile)
            depth = pl.ds(step * BLOCK_K, BLOCK_K)
            for part in range(parts):
                plgpu.copy_gmem_to_smem(
                    gmem["a"].at[pl.ds(part_of(i, part)[0], rows), depth], a_landing.at[slot, part], full.at[slot],
                    collective_axes="cluster" if share_a else None,
                )  # fmt: skip
            place_b = (depth, pl.ds(column, columns)) if transposed else (pl.ds(column, columns), depth)
            plgpu.copy_gmem_to_smem(
                gmem["b"].at[(group_of(i), *place_b)], b_smem.at[slot], full.at[slot],
                collective_axes="cluster" if share_b else None,
            )  # fmt: skip

        def multiply_tile(tile, steps, slot_of):
            part = 0 if config.turns else lax.axis_index("multiplier")
            i, column = place(tile)
            start, length = part_of(i, part)

            def sum_up(total_ref):
                def step(s, _):
                    slot = slot_of(s)
                    plgpu.barrier_wait(full.at[slot])
                    b_slot = b_smem.at[slot]
                    plgpu.wgmma(total_ref, a_smem.at[slot, part], b_slot if transposed else b_slot.transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # the step before this one is done, its slot free

                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(s - 1)])

                lax.fori_loop(0, steps, step, None)
                return total_ref[...]

            total = pl.run_scoped(sum_up, plgpu.ACC((rows, columns), jnp.float32))

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot_of(steps - 1)])

            if a_outer is not None:
                scale = plgpu.load(gmem["a_outer"].at[pl.ds(start, rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                total = total * lax.broadcast_in_dim(scale, total.shape, (0,))
            if b_outer is not None:
                total = total * gmem["b_outer"][group_of(i)]

            def out_at(row, num_rows, column, num_columns):
                return out.at[pl.ds(row, num_rows), pl.ds(column, num_columns)]

            _store_tile(total, out_at, length, start, column, *_views(out_smem, interpret))

        def load():
            _load_tiles(config, num_tiles, steps_of_tile, copy, full, empty)

        def multiply_all():
            _multiply_tiles(config, num_tiles, steps_of_tile, multiply_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        _split(load, multiply_all)

    b_shape = (BLOCK_K, columns) if transposed else (columns, BLOCK_K)
    a_smem = _two_views((config.rings * config.stages, parts, rows, BLOCK_K), a.dtype)
    b_smem = plgpu.SMEM((config.rings * config.stages, *b_shape), b.dtype, transforms=_swizzled(b.dtype))
    scratch = _scratch(config, a_smem, b_smem, out_dtype, copies=parts + 1)
    out_type = jax.ShapeDtypeStruct((padded, n), out_dtype)
    return _run(body, config, out_type, scratch, processors=processors, interpret=interpret)(*inputs)[:m]


# --- sums over rows ------------------------------------------------------------------------------------------------------------


def multiply_transposed(
    g, x, group_sizes=None, *, config: Config = Config(), processors: int | None = None, interpret=None
):  # fmt: skip
    """out[e] = g[rows of e].T @ x[rows of e] in float32; an empty group gives zeros.

    Args:
      g: [M, N] bfloat16, rows sorted by group.
      x: [M, K] bfloat16.
      group_sizes: [E] integers, sum at most M; None: one group of all rows.
      config, processors, interpret: see `multiply`; no clusters.

    Returns:
      [E, N, K] float32.

    Raises:
      NotImplementedError: types other than bfloat16, or N or K not a multiple of 64.
    """
    m, n = g.shape
    k = x.shape[1]
    _check(g, x, n, k, jnp.float32)
    if config.cluster > 1:
        raise NotImplementedError(f"mosaic sum over rows: {config}: blocks share no operand")
    if config.columns % (64 * config.parts):
        raise ValueError(f"mosaic sum over rows: columns must be a multiple of {64 * config.parts}, got {config.columns}")
    if group_sizes is None:
        group_sizes = jnp.full((1,), m, jnp.int32)
    num_groups = group_sizes.shape[0]
    sizes_E = group_sizes.astype(jnp.int32)
    upto_EE = jnp.arange(num_groups)[:, None] >= jnp.arange(num_groups)[None, :]
    ends_E = jnp.sum(jnp.where(upto_EE, sizes_E[None, :], 0), axis=1)
    if m < BLOCK_K:
        g, x = (jnp.pad(each, ((0, BLOCK_K - m), (0, 0))) for each in (g, x))

    rows, columns, parts = config.rows, config.columns, config.parts
    num_n, num_k = pl.cdiv(n, config.tile_rows), pl.cdiv(k, columns)

    def body(g_gmem, x_gmem, starts, ends, out, *, a_smem, b_smem, out_smem, full, empty, joined):
        num_tiles = jnp.int32(num_groups * num_n * num_k)
        a_smem, a_landing = _views(a_smem, interpret)
        b_smem, b_landing = _views(b_smem, interpret)

        def place(tile):
            group, rest = lax.div(tile, jnp.int32(num_n * num_k)), lax.rem(tile, jnp.int32(num_n * num_k))
            i, j = plgpu.planar_snake(rest, (num_n, num_k), 0, config.width)
            return group, i * config.tile_rows, j * columns

        def steps_of_tile(tile):
            group = place(tile)[0]
            return lax.div(ends[group] - starts[group] + BLOCK_K - 1, jnp.int32(BLOCK_K))

        def copy(tile, step, slot):
            group, row, column = place(tile)
            first = starts[group] + step * BLOCK_K
            operands = (g_gmem, a_landing, row, config.tile_rows), (x_gmem, b_landing, column, columns)
            for r in range(0, BLOCK_K, 8):
                for source, landing, at, width in operands:
                    if interpret:
                        target, piece = landing.at[slot, pl.ds(r, 8)], (pl.ds(first + r, 8), pl.ds(at, width))
                    else:
                        target = landing.at[slot, r // 8].transpose((1, 0, 2))
                        piece = (pl.ds(first + r, 8), pl.ds(lax.div(at, 64), width // 64))
                    plgpu.copy_gmem_to_smem(source.at[piece], target, full.at[slot])

        def clear(ref, slot, first, width, inside):
            """Zeros in the rows of a slot that are another group's: both operands', since 0 x NaN is NaN."""
            for c in range(0, width, 64):
                piece = (slot, slice(None), pl.ds(first + c, 64))
                row = plgpu.broadcasted_iota(jnp.int32, (BLOCK_K, 64), 0, layout=plgpu.Layout.WGMMA)
                values = jnp.where(row < inside, ref[piece], jnp.zeros((), ref.dtype))
                plgpu.commit_smem()  # all have read
                ref[piece] = values

        def multiply_tile(tile, steps, slot_of):
            part = jnp.int32(0) if config.turns else lax.axis_index("multiplier")
            group, row, column = place(tile)
            last = ends[group] - starts[group] - (steps - 1) * BLOCK_K  # rows in the last step
            whole = jnp.where((last == BLOCK_K) | (steps == 0), steps, steps - 1)

            def sum_up(total_ref):
                def step(s):
                    slot = slot_of(s)
                    plgpu.wgmma(total_ref, a_smem.at[slot, :, pl.ds(part * rows, rows)].transpose((1, 0)), b_smem.at[slot])
                    plgpu.wgmma_wait(1)

                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(s - 1)])

                def whole_step(s, _):
                    plgpu.barrier_wait(full.at[slot_of(s)])
                    step(s)

                def last_step(s, _):
                    slot = slot_of(s)
                    plgpu.barrier_wait(full.at[slot])
                    clear(a_smem, slot, part * rows, rows, last)
                    clear(b_smem, slot, part * (columns // parts), columns // parts, last)
                    plgpu.commit_smem()
                    if parts > 1:
                        plgpu.barrier_arrive(joined)
                        plgpu.barrier_wait(joined)
                    step(s)

                lax.fori_loop(0, whole, whole_step, None)
                lax.fori_loop(whole, steps, last_step, None)
                return total_ref[...]

            total = pl.run_scoped(sum_up, plgpu.ACC((rows, columns), jnp.float32))

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot_of(steps - 1)])

            def out_at(row, num_rows, column, num_columns):
                return out.at[group, pl.ds(row, num_rows), pl.ds(column, num_columns)]

            _store_tile(total, out_at, None, row + part * rows, column, *_views(out_smem, interpret))

        def load():
            _load_tiles(config, num_tiles, steps_of_tile, copy, full, empty)

        def multiply_all():
            _multiply_tiles(config, num_tiles, steps_of_tile, multiply_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        _split(load, multiply_all)

    slots = config.rings * config.stages
    a_smem, b_smem = (_two_views_of_tiles((slots, BLOCK_K, width), g.dtype) for width in (config.tile_rows, columns))
    scratch = _scratch(config, a_smem, b_smem, jnp.float32, copies=2 * BLOCK_K // 8)
    out_type = jax.ShapeDtypeStruct((num_groups, n, k), jnp.float32)
    run = _run(body, config, out_type, scratch, processors=processors, interpret=interpret)
    if not interpret:
        g, x = (each.reshape(each.shape[0], -1, 64) for each in (g, x))
    return run(g, x, ends_E - sizes_E, ends_E)
