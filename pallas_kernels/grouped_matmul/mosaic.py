"""Matmuls on Hopper in Pallas (Mosaic GPU), tiles loaded by the TMA unit: dense, grouped, and the weights' gradient.

Operands are bfloat16, or E4M3 in the forward direction: fp8 tensor cores read both operands with K innermost, which is how x and
w lie. How tiles come and go is in `mosaic_ring.py`; here is what they are.

A row's bits. Every output element is one chain of tensor core instructions over k in rising order from a float32 zero, in
one warpgroup. Neither the tile, nor the place of the row in it, nor the rows beside it come into that. This also makes the ends
of groups cheap: the last tile of a group that has enough rows moves up until it ends with the group, and computes some rows
twice, to the same bits. Only groups smaller than a warpgroup's rows need stores of their own: eights, 4, 2, 1 rows.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.mosaic_ring import (
    MULTIPLIERS,
    Config,
    Work,
    depth_of_step,
    run,
    skip_steps,
    store_tile,
    sum_steps,
    swizzled,
    two_views,
    two_views_of_tiles,
    views,
)

DEFAULT = Config()
_ROWS_OF_STEP = 64  # summed in one step of a sum over rows

# --- rows times matrices -------------------------------------------------------------------------------------------------------


def row_tiles(group_sizes: jax.Array, num_rows: int, rows: int) -> tuple[jax.Array, ...]:
    """Cuts groups of rows into tiles of a part of `rows` rows for each multiplier. Rows behind the last group are one more group.

    Returns:
      (group [T], start [2 T], length [2 T], [number of tiles, of those of a group]), int32. A part's length is
      `rows` (the last part of a group is moved up to end with it), 0 where the group has ended, or the group's size where that
      is less than `rows`.
    """
    tile_rows = MULTIPLIERS * rows
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
    part_TP = first_T[:, None] + rows * jnp.arange(MULTIPLIERS, dtype=jnp.int32)[None, :]
    size_TP, end_TP = (jnp.broadcast_to(each[:, None], part_TP.shape) for each in (size_T, end_T))
    start_TP = jnp.where(size_TP >= rows, jnp.minimum(part_TP, end_TP - rows), part_TP)
    length_TP = jnp.where(part_TP < end_TP, jnp.minimum(size_TP, rows), 0)
    counts = jnp.stack([tile_ends_E[-1], tile_ends_E[-1] - tiles_E[-1]])
    return group_T, start_TP.reshape(-1), length_TP.reshape(-1), counts


# What K must be a multiple of. The TMA unit fills the last step with zeros, and wants rows of whole 16 bytes.
_MULTIPLE_OF_K = {"bfloat16": 64, "float8_e4m3fn": 16}


def _check(a, b, n: int, k: int, out_dtype, *, rows_in_order: bool) -> None:
    """rows_in_order: both operands have the summed axis innermost."""
    types = f"{a.dtype} x {b.dtype} -> {jnp.dtype(out_dtype).name}"
    known = a.dtype == b.dtype and a.dtype.name in _MULTIPLE_OF_K and jnp.dtype(out_dtype).name in ("bfloat16", "float32")
    if not known or (a.dtype.itemsize == 1 and not rows_in_order):
        raise NotImplementedError(
            f"mosaic matmul: {types}: two bfloat16 operands, or two E4M3 ones of a forward product; bfloat16 or float32 results"
        )
    multiple = _MULTIPLE_OF_K[a.dtype.name]
    if n % 64 or k % multiple or not a.size or not b.size:
        raise NotImplementedError(
            f"mosaic matmul: {a.shape} x {b.shape}: N must be a multiple of 64, K of {multiple}, and nothing empty"
        )


# Functions of their own for JAX: traced and lowered once, however many layers call them.
@functools.partial(jax.jit, static_argnames=("out_dtype", "transposed", "config", "processors", "interpret"))
def multiply(a, b, group_sizes=None, a_outer=None, b_outer=None, *, out_dtype=jnp.bfloat16, transposed: bool = False,
             config: Config = DEFAULT, processors: int | None = None, interpret=None):  # fmt: skip
    """out[i] = a[i] @ b[group of i].T, times a_outer[i], times b_outer[group of i]; rows behind the last group are zeros.

    Args:
      a: [M, K] bfloat16 or E4M3, rows sorted by group.
      b: [E, N, K] of the same type; `transposed`: [E, K, N], bfloat16.
      group_sizes: [E] integers, sum at most M; None: one group of all rows.
      a_outer: [M] float32 or None.
      b_outer: [E] float32 or None.
      out_dtype: bfloat16 or float32.
      config: how the work is cut.
      processors: thread blocks to start; None: as many as the device has processors.
      interpret: parameters of Pallas's interpreter, for a machine without a GPU.

    Raises:
      NotImplementedError: other types, N not a multiple of 64, or K not one of 64 (bfloat16) or 16 (E4M3).
    """
    m, k = a.shape
    n = b.shape[2] if transposed else b.shape[1]
    _check(a, b, n, k, out_dtype, rows_in_order=not transposed)
    grouped = group_sizes is not None
    padded = max(m, config.rows)  # no operand may be smaller than what is loaded at once
    if padded > m:
        a = jnp.pad(a, ((0, padded - m), (0, 0)))
        a_outer = None if a_outer is None else jnp.pad(a_outer, (0, padded - m))

    rows, columns, block_k = config.rows, config.columns, depth_of_step(a.dtype)
    num_n, num_steps = pl.cdiv(n, columns), pl.cdiv(k, block_k)
    inputs = [a, b]
    # In groups, parts that are not stored and rows behind the last group still look their scales up.
    if a_outer is not None:
        inputs.append(jnp.pad(a_outer.astype(jnp.float32), (0, config.tile_rows if grouped else 0)))
    if b_outer is not None:
        inputs.append(jnp.pad(b_outer.reshape(-1).astype(jnp.float32), (0, 1 if grouped else 0)))
    if grouped:
        inputs += row_tiles(group_sizes, padded, rows)
    names = ["a", "b"] + ["a_outer"] * (a_outer is not None) + ["b_outer"] * (b_outer is not None)
    names += ["group", "start", "length", "count"] * grouped

    def work(refs, out, ring):
        a_smem, a_landing = views(ring.a_smem, interpret)
        b_smem, b_landing = (ring.b_smem, ring.b_smem) if transposed else views(ring.b_smem, interpret)
        gmem = dict(zip(names, refs, strict=True))
        if grouped:
            num_m, num_multiplied = gmem["count"][0], gmem["count"][1]
        else:
            num_m = pl.cdiv(padded, config.tile_rows)
        num_tiles = jnp.int32(num_m * num_n)

        def place(tile):
            """(tile of rows, first column) of a tile's number."""
            if grouped:
                i, j = lax.div(tile, jnp.int32(num_n)), lax.rem(tile, jnp.int32(num_n))
            else:
                i, j = plgpu.planar_snake(tile, (num_m, num_n), 0, config.width)
            return i, j * columns

        def group_of(i):
            return gmem["group"][i] if grouped else jnp.int32(0)

        def first_row(i, part):
            """Of one multiplier's part of a tile of rows."""
            if grouped:
                return gmem["start"][i * MULTIPLIERS + part]
            return jnp.minimum((i * MULTIPLIERS + part) * rows, padded - rows)

        def steps_of_tile(tile):
            if not grouped:
                return jnp.int32(num_steps)
            return jnp.where(place(tile)[0] < num_multiplied, jnp.int32(num_steps), 0)

        def look_up(tile):
            part = lax.axis_index("multiplier")
            i, _ = place(tile)
            if not grouped:
                return (first_row(i, part),)
            return first_row(i, part), gmem["length"][i * MULTIPLIERS + part], group_of(i)

        def copy(tile):
            i, column = place(tile)
            group, firsts = group_of(i), [first_row(i, part) for part in range(MULTIPLIERS)]

            def copy_step(step, slot):
                depth = pl.ds(step * block_k, block_k)
                for part, first in enumerate(firsts):
                    plgpu.copy_gmem_to_smem(gmem["a"].at[pl.ds(first, rows), depth], a_landing.at[slot, part], ring.full.at[slot])
                place_b = (depth, pl.ds(column, columns)) if transposed else (pl.ds(column, columns), depth)
                plgpu.copy_gmem_to_smem(gmem["b"].at[(group, *place_b)], b_landing.at[slot], ring.full.at[slot])

            return copy_step

        def multiply_tile(tile, found, steps, slot_of):
            part = lax.axis_index("multiplier")
            _, column = place(tile)
            start, length, group = found if grouped else (*found, None, jnp.int32(0))

            def product(total_ref, slot):
                b_slot = b_smem.at[slot]
                plgpu.wgmma(total_ref, a_smem.at[slot, part], b_slot if transposed else b_slot.transpose((1, 0)))

            def out_at(row, num_rows, column, num_columns):
                return out.at[pl.ds(row, num_rows), pl.ds(column, num_columns)]

            def sum_and_store():
                # The scales are asked for before the sum and used after it.
                a_scale = b_scale = None
                if a_outer is not None:
                    at = gmem["a_outer"].at[pl.ds(start, rows)]
                    a_scale = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                if b_outer is not None:
                    b_scale = gmem["b_outer"][group]
                total = sum_steps(ring, (rows, columns), steps, slot_of, product)
                if a_scale is not None:
                    total = total * lax.broadcast_in_dim(a_scale, total.shape, (0,))
                if b_scale is not None:
                    total = total * b_scale
                store_tile(total, out_at, length, start, column, *views(ring.out_smem, interpret))

            if grouped:
                pl.when(length > 0)(sum_and_store)
                pl.when(length == 0)(lambda: skip_steps(ring, steps, slot_of))
            else:
                sum_and_store()

        return Work(num_tiles, steps_of_tile, look_up, copy, multiply_tile)

    a_smem = two_views((config.stages, MULTIPLIERS, rows, block_k), a.dtype)
    if transposed:
        b_smem = plgpu.SMEM((config.stages, block_k, columns), b.dtype, transforms=swizzled(b.dtype))
    else:
        b_smem = two_views((config.stages, columns, block_k), b.dtype)
    out_type = jax.ShapeDtypeStruct((padded, n), out_dtype)
    options = dict(copies=MULTIPLIERS + 1, processors=processors, interpret=interpret)
    name = ("grouped_matmul" if grouped else "matmul") + ("_dgrad" if transposed else "")
    return run(name, work, inputs, config, out_type, a_smem, b_smem, **options)[:m]


# --- sums over rows ------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("config", "processors", "interpret"))
def multiply_transposed(
    g, x, group_sizes=None, *, config: Config = DEFAULT, processors: int | None = None, interpret=None
):  # fmt: skip
    """out[e] = g[rows of e].T @ x[rows of e] in float32; an empty group gives zeros.

    Args:
      g: [M, N] bfloat16, rows sorted by group.
      x: [M, K] bfloat16.
      group_sizes: [E] integers, sum at most M; None: one group of all rows.
      config, processors, interpret: see `multiply`.

    Returns:
      [E, N, K] float32.

    Raises:
      NotImplementedError: types other than bfloat16, or N or K not a multiple of 64.
    """
    m, n = g.shape
    k = x.shape[1]
    _check(g, x, n, k, jnp.float32, rows_in_order=False)
    if config.columns % (64 * MULTIPLIERS):
        raise ValueError(f"mosaic sum over rows: columns must be a multiple of {64 * MULTIPLIERS}, got {config.columns}")
    name = "matmul_wgrad" if group_sizes is None else "grouped_matmul_wgrad"
    if group_sizes is None:
        group_sizes = jnp.full((1,), m, jnp.int32)
    num_groups = group_sizes.shape[0]
    sizes_E = group_sizes.astype(jnp.int32)
    upto_EE = jnp.arange(num_groups)[:, None] >= jnp.arange(num_groups)[None, :]
    ends_E = jnp.sum(jnp.where(upto_EE, sizes_E[None, :], 0), axis=1)
    if m < _ROWS_OF_STEP:
        g, x = (jnp.pad(each, ((0, _ROWS_OF_STEP - m), (0, 0))) for each in (g, x))

    rows, columns = config.rows, config.columns
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
            return lax.div(ends[group] - starts[group] + _ROWS_OF_STEP - 1, jnp.int32(_ROWS_OF_STEP))

        def copy(tile):
            group, row, column = place(tile)
            start = starts[group]
            operands = (g_gmem, a_landing, row, config.tile_rows), (x_gmem, b_landing, column, columns)

            def copy_step(step, slot):
                first = start + step * _ROWS_OF_STEP
                for r in range(0, _ROWS_OF_STEP, 8):
                    for source, landing, at, width in operands:
                        if interpret:
                            target, piece = landing.at[slot, pl.ds(r, 8)], (pl.ds(first + r, 8), pl.ds(at, width))
                        else:
                            target = landing.at[slot, r // 8].transpose((1, 0, 2))
                            piece = (pl.ds(first + r, 8), pl.ds(lax.div(at, 64), width // 64))
                        plgpu.copy_gmem_to_smem(source.at[piece], target, ring.full.at[slot])

            return copy_step

        def clear(ref, slot, first, width, inside):
            """Zeros in the rows of a slot that are another group's: both operands', since 0 x NaN is NaN."""
            for c in range(0, width, 64):
                piece = (slot, slice(None), pl.ds(first + c, 64))
                row = plgpu.broadcasted_iota(jnp.int32, (_ROWS_OF_STEP, 64), 0, layout=plgpu.Layout.WGMMA)
                values = jnp.where(row < inside, ref[piece], jnp.zeros((), ref.dtype))
                plgpu.commit_smem()  # all have read
                ref[piece] = values

        def multiply_tile(tile, found, steps, slot_of):
            del found
            part = lax.axis_index("multiplier")
            group, row, column = place(tile)
            last = ends[group] - starts[group] - (steps - 1) * _ROWS_OF_STEP  # rows in the last step
            whole = jnp.where((last == _ROWS_OF_STEP) | (steps == 0), steps, steps - 1)

            def product(total_ref, slot):
                plgpu.wgmma(total_ref, a_smem.at[slot, :, pl.ds(part * rows, rows)].transpose((1, 0)), b_smem.at[slot])

            def clear_both(slot):
                clear(a_smem, slot, part * rows, rows, last)
                clear(b_smem, slot, part * (columns // MULTIPLIERS), columns // MULTIPLIERS, last)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ring.joined)
                plgpu.barrier_wait(ring.joined)

            total = sum_steps(ring, (rows, columns), steps, slot_of, product, whole=whole, prepare=clear_both)

            def out_at(row, num_rows, column, num_columns):
                return out.at[group, pl.ds(row, num_rows), pl.ds(column, num_columns)]

            store_tile(total, out_at, None, row + part * rows, column, *views(ring.out_smem, interpret))

        return Work(num_tiles, steps_of_tile, lambda tile: (), copy, multiply_tile)

    a_smem, b_smem = (two_views_of_tiles((config.stages, _ROWS_OF_STEP, width), g.dtype) for width in (config.tile_rows, columns))
    out_type = jax.ShapeDtypeStruct((num_groups, n, k), jnp.float32)
    if not interpret:
        g, x = (each.reshape(each.shape[0], -1, 64) for each in (g, x))
    inputs = g, x, ends_E - sizes_E, ends_E
    options = dict(copies=2 * _ROWS_OF_STEP // 8, processors=processors, interpret=interpret)
    return run(name, work, inputs, config, out_type, a_smem, b_smem, **options)
