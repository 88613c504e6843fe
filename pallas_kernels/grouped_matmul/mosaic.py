"""Matmuls of bfloat16 on Hopper in Pallas (Mosaic GPU), tiles loaded by the TMA unit: dense, grouped, and the weights' gradient.

How tiles come and go is in `mosaic_ring.py`; here is what they are.

A row's bits. Every output element is one chain of tensor core instructions over k in rising steps of 64 from a float32 zero, in
one warpgroup. Neither the tile, nor the place of the row in it, nor the rows beside it come into that. This also makes the ends
of groups cheap: the last tile of a group that has enough rows moves up until it ends with the group, and computes some rows
twice, to the same bits. Only groups smaller than a warpgroup's rows need stores of their own: eights, 4, 2, 1 rows.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.mosaic_ring import (
    BLOCK_K,
    Config,
    Work,
    run,
    store_tile,
    sum_steps,
    swizzled,
    two_views,
    two_views_of_tiles,
    views,
)

TOGETHER = Config()

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
             config: Config = TOGETHER, processors: int | None = None, interpret=None):  # fmt: skip
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

    def work(refs, out, ring):
        a_smem, a_landing = views(ring.a_smem, interpret)
        gmem = dict(zip(names, refs, strict=True))
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
                    gmem["a"].at[pl.ds(part_of(i, part)[0], rows), depth], a_landing.at[slot, part], ring.full.at[slot],
                    collective_axes="cluster" if share_a else None,
                )  # fmt: skip
            place_b = (depth, pl.ds(column, columns)) if transposed else (pl.ds(column, columns), depth)
            plgpu.copy_gmem_to_smem(
                gmem["b"].at[(group_of(i), *place_b)], ring.b_smem.at[slot], ring.full.at[slot],
                collective_axes="cluster" if share_b else None,
            )  # fmt: skip

        def multiply_tile(tile, steps, slot_of):
            part = 0 if config.turns else lax.axis_index("multiplier")
            i, column = place(tile)
            start, length = part_of(i, part)

            def product(total_ref, slot):
                b_slot = ring.b_smem.at[slot]
                plgpu.wgmma(total_ref, a_smem.at[slot, part], b_slot if transposed else b_slot.transpose((1, 0)))

            total = sum_steps(ring, (rows, columns), steps, slot_of, product)
            if a_outer is not None:
                scale = plgpu.load(gmem["a_outer"].at[pl.ds(start, rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                total = total * lax.broadcast_in_dim(scale, total.shape, (0,))
            if b_outer is not None:
                total = total * gmem["b_outer"][group_of(i)]

            def out_at(row, num_rows, column, num_columns):
                return out.at[pl.ds(row, num_rows), pl.ds(column, num_columns)]

            store_tile(total, out_at, length, start, column, *views(ring.out_smem, interpret))

        return Work(num_tiles, steps_of_tile, copy, multiply_tile)

    b_shape = (BLOCK_K, columns) if transposed else (columns, BLOCK_K)
    a_smem = two_views((config.rings * config.stages, parts, rows, BLOCK_K), a.dtype)
    b_smem = plgpu.SMEM((config.rings * config.stages, *b_shape), b.dtype, transforms=swizzled(b.dtype))
    out_type = jax.ShapeDtypeStruct((padded, n), out_dtype)
    options = dict(copies=parts + 1, processors=processors, interpret=interpret)
    return run(work, inputs, config, out_type, a_smem, b_smem, **options)[:m]


# --- sums over rows ------------------------------------------------------------------------------------------------------------


def multiply_transposed(
    g, x, group_sizes=None, *, config: Config = TOGETHER, processors: int | None = None, interpret=None
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

    def work(refs, out, ring):
        g_gmem, x_gmem, starts, ends = refs
        num_tiles = jnp.int32(num_groups * num_n * num_k)
        a_smem, a_landing = views(ring.a_smem, interpret)
        b_smem, b_landing = views(ring.b_smem, interpret)

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
                    plgpu.copy_gmem_to_smem(source.at[piece], target, ring.full.at[slot])

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

            def product(total_ref, slot):
                plgpu.wgmma(total_ref, a_smem.at[slot, :, pl.ds(part * rows, rows)].transpose((1, 0)), b_smem.at[slot])

            def clear_both(slot):
                clear(a_smem, slot, part * rows, rows, last)
                clear(b_smem, slot, part * (columns // parts), columns // parts, last)
                plgpu.commit_smem()
                if parts > 1:
                    plgpu.barrier_arrive(ring.joined)
                    plgpu.barrier_wait(ring.joined)

            total = sum_steps(ring, (rows, columns), steps, slot_of, product, whole=whole, prepare=clear_both)

            def out_at(row, num_rows, column, num_columns):
                return out.at[group, pl.ds(row, num_rows), pl.ds(column, num_columns)]

            store_tile(total, out_at, None, row + part * rows, column, *views(ring.out_smem, interpret))

        return Work(num_tiles, steps_of_tile, copy, multiply_tile)

    slots = config.rings * config.stages
    a_smem, b_smem = (two_views_of_tiles((slots, BLOCK_K, width), g.dtype) for width in (config.tile_rows, columns))
    out_type = jax.ShapeDtypeStruct((num_groups, n, k), jnp.float32)
    if not interpret:
        g, x = (each.reshape(each.shape[0], -1, 64) for each in (g, x))
    inputs = g, x, ends_E - sizes_E, ends_E
    options = dict(copies=2 * BLOCK_K // 8, processors=processors, interpret=interpret)
    return run(work, inputs, config, out_type, a_smem, b_smem, **options)
