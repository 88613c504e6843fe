"""Several sequences in one row, for a pass that computes few padding tokens."""

from collections.abc import Sequence
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.attention import key_block


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class PackedSequences:
    """N sequences in R rows of T columns.

    Attributes:
      tokens: [R, T] int32; 0 where there is none.
      positions: [R, T] int32, each token's position in its sequence, for `minite_jax.model.hidden_states`.
      mask: [R, T] bool, the columns that hold a token.
      row: [N] int32, the row of each sequence.
      start: [N] int32, its first column, a multiple of the key block.
      length: [N] int32, its tokens.
    """

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    mask: Bool[Array, "R T"]
    row: Int[Array, "N"]
    start: Int[Array, "N"]
    length: Int[Array, "N"]

    def unpack(self, values: Array, slots: int) -> Array:
        """What [R, T', ...] (T' is T, or T - 1 for log-probs) holds for each sequence: [N, slots, ...], 0 behind its end.

        Column t belongs to column ``start + t`` of the row. Of log-probs, column t scores token t + 1 of the sequence, and the
        end is one token earlier. Differentiable.
        """
        ends_N1 = (self.length - (self.tokens.shape[1] - values.shape[1]))[:, None]
        slot_1S = jnp.arange(slots)[None, :]
        column_NS = jnp.minimum(self.start[:, None] + slot_1S, values.shape[1] - 1)
        taken = values[self.row[:, None], column_NS]
        inside_NS = slot_1S < ends_N1
        return jnp.where(inside_NS.reshape(*inside_NS.shape, *[1] * (taken.ndim - 2)), taken, 0)


def pack_sequences(
    sequences: Sequence[Sequence[int]], row_length: int, *, num_rows: int | None = None, block: int | None = None
) -> PackedSequences:
    """Packs sequences into rows by first-fit decreasing (Johnson 1973): the longest first, each into the first row with room.

    Each sequence starts at a multiple of `block`, so that its key blocks in the row are those that it has alone, and with them
    its bits. No sequence attends the padding: behind a sequence's end it counts on to the end of the block, and every block of
    padding alone counts anew.

    Args:
      sequences: token ids, none empty. Their order is kept in `row`, `start` and `length`.
      row_length: columns of a row, at least the longest sequence; a multiple of `block` wastes none.
      num_rows: rows of the result, for one compiled shape; None: as many as are needed.
      block: the key block; None: `pallas_kernels.attention.key_block`.

    Raises:
      ValueError: no sequence, an empty one, one that is longer than a row, or more than `num_rows` rows needed.
    """
    block = key_block() if block is None else block
    if not len(sequences):
        raise ValueError("no sequences to pack: give at least one")
    length_N = np.array([len(s) for s in sequences], np.int32)
    if (length_N == 0).any():
        raise ValueError(f"sequence {int(np.argmin(length_N))} is empty; a packed sequence needs at least one token")
    if length_N.max() > row_length:
        i = int(np.argmax(length_N))
        raise ValueError(f"sequence {i} has {length_N[i]} tokens, more than row_length={row_length}; make rows longer")

    row_N, start_N = np.zeros((2, len(length_N)), np.int32)
    filled: list[int] = []  # columns of each row, up to a multiple of the block
    for i in np.argsort(-length_N, kind="stable"):
        row = next((r for r, columns in enumerate(filled) if columns + length_N[i] <= row_length), len(filled))
        if row == len(filled):
            filled.append(0)
        row_N[i], start_N[i] = row, filled[row]
        filled[row] += -(-int(length_N[i]) // block) * block
    if num_rows is not None and len(filled) > num_rows:
        raise ValueError(f"the sequences need {len(filled)} rows of {row_length} tokens, more than num_rows={num_rows}")

    shape = (num_rows or len(filled), row_length)
    tokens_RT = np.zeros(shape, np.int32)
    column_T = np.arange(row_length, dtype=np.int32)
    begin_RT = np.broadcast_to(np.where(column_T % block, 0, column_T), shape).copy()
    mask_RT = np.zeros(shape, bool)
    for i, (row, start, length) in enumerate(zip(row_N, start_N, length_N, strict=True)):
        tokens_RT[row, start : start + length] = sequences[i]
        begin_RT[row, start + 1 : start + length] = 0
        mask_RT[row, start : start + length] = True
    positions_RT = column_T - np.maximum.accumulate(begin_RT, axis=1)
    arrays = dict(tokens=tokens_RT, positions=positions_RT, mask=mask_RT, row=row_N, start=start_N, length=length_N)
    return PackedSequences(**jax.tree.map(jnp.asarray, arrays))
