"""Which tiles of query tokens meet a block of keys, in the backward of packed causal attention."""

import jax.numpy as jnp

__all__ = ["walks"]


def walks(positions_BT, *, block: int, tile: int):
    """Which query tiles a block of keys meets: from the block's own tile to before `ends`; from `middles` on without a mask.

    Returns:
      middles and ends, each [B, blocks] int32, in tiles.
    """
    length = positions_BT.shape[1]
    start_BT = jnp.arange(length, dtype=jnp.int32)[None, :] - positions_BT
    num_tiles, num_blocks = -(-length // tile), -(-length // block)
    padding = [(0, 0), (0, num_tiles * tile - length)]

    def by_tile(fill, reduce):
        padded_BT = jnp.pad(start_BT, padding, constant_values=fill)
        return reduce(padded_BT.reshape(-1, 1, num_tiles, tile), axis=-1)

    # Rows behind the end are zeros to the kernel, whatever they see.
    lowest_B1I, highest_B1I = by_tile(length, jnp.min), by_tile(-1, jnp.max)
    tile_I = jnp.arange(num_tiles, dtype=jnp.int32)[None, None, :]
    first_J1 = jnp.arange(num_blocks, dtype=jnp.int32)[None, :, None] * block
    after_J1 = (first_J1 + block + tile - 1) // tile  # behind the tiles that hold the block's own tokens
    begin_J1 = first_J1 // tile
    meets_BJI = (lowest_B1I < first_J1 + block) & (tile_I >= begin_J1)
    ends_BJ = jnp.max(jnp.where(meets_BJI, tile_I + 1, 0), axis=-1)
    masked_BJ = jnp.any((tile_I >= after_J1) & (tile_I < ends_BJ[:, :, None]) & (highest_B1I > first_J1), axis=-1)
    middles_BJ = jnp.where(masked_BJ, ends_BJ, jnp.minimum(after_J1[:, :, 0], ends_BJ))
    return middles_BJ, ends_BJ
