import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.embedding import embed
from pallas_kernels.embedding.segments import CHUNK, make_segments, max_chunks


def _inputs(num_rows=700, vocab_size=11, width=8):
    rng = np.random.default_rng(20)
    tokens = np.where(rng.random(num_rows) < 0.6, 4, rng.integers(0, vocab_size - 2, num_rows))  # 4 is hot, 9 and 10 are absent
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(rng.standard_normal((num_rows, width)), jnp.float32)


def _in_order(tokens, g, vocab_size):
    """The definition, in numpy."""
    result = np.zeros((vocab_size, g.shape[1]), np.float32)
    for token in range(vocab_size):
        rows = np.asarray(g, np.float32)[np.asarray(tokens) == token]
        chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
        sums = [np.add.accumulate(chunk)[-1] for chunk in chunks]
        result[token] = np.add.accumulate(sums)[-1] if sums else 0
    return result


@jax.jit
def _master_gradient(tokens, table, g):
    return jax.vjp(lambda master: embed(tokens, table, master=master), jnp.zeros(table.shape))[1](g)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_tokens_rows_are_added_in_chunks_and_the_master_gets_float32(dtype):
    tokens, g = _inputs()
    assert int((tokens == 4).sum()) > 3 * CHUNK
    table = jnp.ones((11, 8), dtype)
    gradient = _master_gradient(tokens, table, g.astype(dtype))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, _in_order(tokens, g.astype(dtype), 11))
    assert np.asarray(gradient[9:]).tobytes() == bytes(2 * 8 * 4)


def test_without_a_master_the_table_gets_the_gradient_rounded_once():
    tokens, g = _inputs()
    table = jnp.ones((11, 8), jnp.bfloat16)
    value, pullback = jax.vjp(lambda table: embed(tokens, table), table)
    assert value.dtype == jnp.bfloat16
    gradient = pullback(g.astype(jnp.bfloat16))[0]
    np.testing.assert_array_equal(gradient, _in_order(tokens, g.astype(jnp.bfloat16), 11).astype(jnp.bfloat16))


def test_a_tokens_sum_does_not_depend_on_the_other_tokens():
    tokens, g = _inputs()
    mine = np.flatnonzero(np.asarray(tokens) == 4)
    table = jnp.ones((11, 8))
    whole = _master_gradient(tokens, table, g)
    np.testing.assert_array_equal(_master_gradient(tokens[mine], table, g[mine])[4], whole[4])


def test_forward_is_the_table():
    tokens, _ = _inputs()
    table = jnp.asarray(np.random.default_rng(21).standard_normal((11, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(embed)(tokens, table), np.asarray(table)[np.asarray(tokens)])


@pytest.mark.parametrize("num_rows, vocab_size", [(1, 1), (CHUNK, 3), (2 * CHUNK + 1, 1), (5, 1000)])
def test_chunks_cover_every_row_once(num_rows, vocab_size):
    tokens = jnp.asarray(np.random.default_rng(num_rows).integers(0, vocab_size, num_rows), jnp.int32)
    segments = jax.tree.map(np.asarray, make_segments(tokens, vocab_size))
    sizes, starts = segments.chunk_size, segments.chunk_start
    assert len(sizes) == max_chunks(num_rows, vocab_size) >= segments.token_start[-1]
    covered = [row for start, size in zip(starts, sizes, strict=True) for row in range(start, start + size)]
    assert sorted(covered) == list(range(num_rows))
    assert (sizes[segments.token_start[-1] :] == 0).all()
