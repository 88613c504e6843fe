"""Row-tile programs: how the jnp references get bits that depend on nothing but the row.

XLA chooses the order of a reduction, the vector width and the fused multiply-adds from the shapes it sees and from the code
around an operation, so on a CPU as on a GPU the same row has other bits alone than in a batch. A kernel does not have this
problem: it is one compiled program that runs on tiles of one shape. `map_row_tiles` gives a jnp function the same property. It
cuts the rows into tiles of `ROW_TILE`, and runs the function on one tile at a time inside a loop. The body of a loop is
compiled apart from what surrounds it, always for the same shape, so its bits do not depend on how many rows there are, on who
the neighbours are, or on whether the caller is a sampler or the forward half of a gradient.
"""

from collections.abc import Callable
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

# Measured on two cores, 64..576 columns: tiles of 16 cost 10-40 % more, tiles of 64 gain nothing in training and waste work
# in decoding. A multiple of 16 keeps every row on the same path of Eigen's matrix product.
ROW_TILE = 32


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class Bits:
    """An array that a loop carries: bfloat16 as uint16, everything else as it is."""

    array: jax.Array
    is_bfloat16: bool = flax.struct.field(pytree_node=False)

    def value(self) -> jax.Array:
        """The array in its own type."""
        return lax.bitcast_convert_type(self.array, jnp.bfloat16) if self.is_bfloat16 else self.array

    @staticmethod
    def is_bits(x) -> bool:
        return isinstance(x, Bits)


def to_bits(x: jax.Array) -> Bits:
    """Wraps an array for a loop. Values do not change."""
    is_bfloat16 = x.dtype == jnp.bfloat16
    return Bits(lax.bitcast_convert_type(x, jnp.uint16) if is_bfloat16 else x, is_bfloat16)


def map_row_tiles(body: Callable, rows, *, tile: int = ROW_TILE):
    """Applies `body` to tiles of rows, one compiled shape for every number of rows.

    Args:
      body: function of a pytree of arrays [tile, ...] that returns a pytree of arrays [tile, ...]. Row i of the result must
        depend on row i of the arguments alone. It may close over arrays that all rows share (weights).
      rows: pytree of arrays [M, ...], M >= 1.
      tile: rows per trip.

    Returns:
      Pytree of arrays [M, ...].
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    # At least two trips: XLA inlines a loop of one trip into its surroundings, and the seal would be broken.
    trips = max(2, -(-num_rows // tile))
    padding = trips * tile - num_rows

    def to_tiles(x):
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(trips, tile, *x.shape[1:])

    # The loop carries bits: XLA for CPU (jax 0.10) otherwise converts a bfloat16 result to float32 and back, whole, in every
    # trip.
    results = lax.map(
        lambda tile_rows: jax.tree.map(to_bits, body(jax.tree.map(Bits.value, tile_rows, is_leaf=Bits.is_bits))),
        jax.tree.map(lambda x: to_bits(to_tiles(x)), rows),
    )
    return jax.tree.map(
        lambda bits: bits.value().reshape(trips * tile, *bits.array.shape[2:])[:num_rows], results, is_leaf=Bits.is_bits
    )


def tile_sums(terms_MD: jax.Array) -> jax.Array:
    """[M, D] float32 -> [tiles, D]: sums of `ROW_TILE` rows, added one after another. A gradient that is summed over rows takes
    these, and then `numerics.ordered_sum`.
    """
    num_rows, width = terms_MD.shape
    tiles = -(-num_rows // ROW_TILE)
    terms_TRD = jnp.pad(terms_MD, [(0, tiles * ROW_TILE - num_rows), (0, 0)]).reshape(tiles, ROW_TILE, width)
    total_TD = terms_TRD[:, 0]
    for row in range(1, ROW_TILE):
        total_TD = total_TD + terms_TRD[:, row]
    return total_TD
