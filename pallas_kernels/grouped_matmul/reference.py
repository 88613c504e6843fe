"""Grouped matmul in plain jnp: the specification of the kernels.

Every group is cut into tiles of `ROW_TILE` rows, the last one filled up with zeros, and a loop runs over the tiles that
exist. The number of trips is known at run time only, so XLA cannot inline the body into what surrounds it (see
`pallas_kernels.rows`), and the body is that of the dense matmul.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import operands
from pallas_kernels.matmul.reference import dot_nk, scale_sum
from pallas_kernels.numerics import round_to
from pallas_kernels.rows import ROW_TILE, to_bits


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Where each tile's rows come from, and where each row's result lies."""

    num_tiles: jax.Array  # [] tiles in use
    group_of_tile: jax.Array  # [C]
    rows_of_tile: jax.Array  # [C, ROW_TILE]; M (out of range) where the tile is filled up
    slot_of_row: jax.Array  # [M] index into the flattened tiles; out of range for rows behind the last group


def check_groups(w, group_sizes) -> None:
    if group_sizes.shape != (w.shape[0],):
        raise ValueError(f"grouped_matmul: group_sizes {group_sizes.shape} must have one entry for each of w {tuple(w.shape)}")


def _tiling(group_sizes, num_rows: int) -> _Tiling:
    num_groups = group_sizes.shape[0]
    # Each group wastes less than one tile, and no more than M groups can hold a row.
    capacity = num_rows // ROW_TILE + min(num_groups, num_rows)
    ends_E = jnp.cumsum(group_sizes)
    starts_E = ends_E - group_sizes
    tiles_E = (group_sizes + ROW_TILE - 1) // ROW_TILE
    tile_ends_E = jnp.cumsum(tiles_E)
    tile_starts_E = tile_ends_E - tiles_E

    tile_C = jnp.arange(capacity)
    group_C = jnp.minimum(jnp.searchsorted(tile_ends_E, tile_C, side="right"), num_groups - 1)
    first_C = starts_E[group_C] + (tile_C - tile_starts_E[group_C]) * ROW_TILE
    rows_CR = first_C[:, None] + jnp.arange(ROW_TILE)[None, :]
    rows_CR = jnp.where(rows_CR < ends_E[group_C][:, None], rows_CR, num_rows)

    row_M = jnp.arange(num_rows)
    group_M = jnp.minimum(jnp.searchsorted(ends_E, row_M, side="right"), num_groups - 1)
    slot_M = tile_starts_E[group_M] * ROW_TILE + row_M - starts_E[group_M]
    slot_M = jnp.where(row_M < ends_E[-1], slot_M, capacity * ROW_TILE)
    return _Tiling(tile_ends_E[-1], group_C, rows_CR, slot_M)


def _rows(x_M, index_R):
    """Rows of `x_M`, zeros where the index is out of range."""
    return x_M.at[index_R].get(mode="fill", fill_value=0)


def _multiply_tiles(x_MK, x_outer_M, w_ENK, w_outer_E, group_sizes, out_dtype):
    num_rows, num_features = x_MK.shape[0], w_ENK.shape[1]
    tiling = _tiling(group_sizes, num_rows)
    capacity = tiling.group_of_tile.shape[0]

    def body(c, result_CRN):
        group, index_R = tiling.group_of_tile[c], tiling.rows_of_tile[c]
        outer_R = None if x_outer_M is None else _rows(x_outer_M, index_R)
        w_outer = None if w_outer_E is None else w_outer_E[group]
        sum_RN = scale_sum(dot_nk(_rows(x_MK, index_R), w_ENK[group]), outer_R, w_outer)
        tile_RN = to_bits(round_to(sum_RN, out_dtype))
        return result_CRN.replace(array=lax.dynamic_update_index_in_dim(result_CRN.array, tile_RN.array, c, 0))

    zeros_CRN = to_bits(jnp.zeros((capacity, ROW_TILE, num_features), out_dtype))
    result_CRN = lax.fori_loop(0, tiling.num_tiles, body, zeros_CRN).value()
    return _rows(result_CRN.reshape(capacity * ROW_TILE, num_features), tiling.slot_of_row)


def grouped_matmul(x, w, group_sizes, *, out_dtype):
    x_MK, x_outer = operands.values(x), operands.outer_scale(x)
    if x_outer is not None:
        x_outer = jnp.broadcast_to(x_outer, x_MK.shape[:1])
    return _multiply_tiles(x_MK, x_outer, operands.values(w), operands.outer_scale(w), group_sizes, out_dtype)


def grouped_matmul_dgrad(g_MN, w, group_sizes, *, out_dtype=jnp.float32):
    w_EKN = jnp.swapaxes(operands.values(w), 1, 2)
    return _multiply_tiles(g_MN.astype(jnp.float32), None, w_EKN, operands.outer_scale(w), group_sizes, out_dtype)


def grouped_matmul_wgrad(x, g_MN, group_sizes):
    x_MK, g_MN = operands.dequantized(x), g_MN.astype(jnp.float32)
    tiling = _tiling(group_sizes, x_MK.shape[0])

    def body(c, dw_ENK):
        group, index_R = tiling.group_of_tile[c], tiling.rows_of_tile[c]
        tile_NK = dot_nk(_rows(g_MN, index_R).T, _rows(x_MK, index_R).T)
        return dw_ENK.at[group].add(tile_NK)

    zeros_ENK = jnp.zeros((group_sizes.shape[0], g_MN.shape[1], x_MK.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiling.num_tiles, body, zeros_ENK)
