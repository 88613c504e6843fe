"""Packing of sequences into rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.rollout import pack_sequences

ROW, BLOCK = 64, 16


def _sequences(lengths):
    numbers = iter(range(1, 10**6))
    return [[next(numbers) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_one_place(seed):
    rng = np.random.default_rng(seed)
    sequences = _sequences(rng.integers(1, ROW + 1, rng.integers(1, 40)))
    packed = pack_sequences(sequences, ROW, block=BLOCK)
    tokens, positions, mask = (np.asarray(x) for x in (packed.tokens, packed.positions, packed.mask))
    assert sorted(tokens[mask].tolist()) == list(range(1, sum(map(len, sequences)) + 1))
    assert (tokens[~mask] == 0).all()
    assert (np.asarray(packed.start) % BLOCK == 0).all()
    assert (positions >= 0).all() and (positions <= np.arange(ROW)).all()
    assert ((np.arange(ROW) - positions) % BLOCK == 0).all()  # padding too
    for sequence, row, start in zip(sequences, packed.row, packed.start, strict=True):
        here = slice(int(start), int(start) + len(sequence))
        assert tokens[row, here].tolist() == sequence
        np.testing.assert_array_equal(positions[row, here], np.arange(len(sequence)))
        ends = np.flatnonzero(positions[row, here.start + 1 :] == 0)  # where the next one begins
        assert len(ends) == 0 or ends[0] + 1 >= len(sequence)
    unpacked = np.asarray(packed.unpack(packed.tokens, ROW))
    assert [row[: len(s)].tolist() for row, s in zip(unpacked, sequences, strict=True)] == sequences
    assert np.count_nonzero(unpacked) == mask.sum()


def test_first_fit_decreasing():
    """64 | 40 + 16, where 40 takes three blocks | 33 + 15."""
    packed = pack_sequences(_sequences([15, 40, 33, 16, 64]), ROW, block=BLOCK)
    assert packed.row.tolist() == [2, 1, 2, 1, 0]
    assert packed.start.tolist() == [48, 0, 0, 48, 0]


def test_a_row_may_end_inside_a_block():
    packed = pack_sequences(_sequences([16, 17, 4]), 20, block=BLOCK)
    assert packed.row.tolist() == [1, 0, 1] and packed.start.tolist() == [0, 0, 16]


def test_log_probs_of_the_next_token_end_one_column_earlier():
    packed = pack_sequences(_sequences([3, 20]), ROW, block=BLOCK, num_rows=2)
    assert packed.tokens.shape == (2, ROW)
    next_tokens = packed.tokens[:, 1:].astype(jnp.float32)
    np.testing.assert_array_equal(packed.unpack(next_tokens, 4), [[2, 3, 0, 0], [5, 6, 7, 8]])
    wide = packed.unpack(jnp.stack([next_tokens, -next_tokens], axis=-1), 4)
    np.testing.assert_array_equal(wide[0], [[2, -2], [3, -3], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("lengths", "num_rows", "wanted"),
    [
        ([], None, "no sequences to pack: give at least one"),
        ([3, 0], None, "sequence 1 is empty"),
        ([1, 65], None, "sequence 1 has 65 tokens, more than row_length=64; make rows longer"),
        ([64, 1], 1, "the sequences need 2 rows of 64 tokens, more than num_rows=1"),
    ],
)
def test_what_does_not_fit_is_refused(lengths, num_rows, wanted):
    with pytest.raises(ValueError, match=wanted):
        pack_sequences(_sequences(lengths), ROW, num_rows=num_rows, block=BLOCK)
