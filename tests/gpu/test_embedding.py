"""The embedding's gradient on a GPU: the reference's bits, every time, exact zeros, and no token so hot that it takes long."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.embedding import embed

pytestmark = pytest.mark.gpu


def _gradient(implementation):
    @jax.jit
    def run(tokens, table, g):
        op = lambda master: embed(tokens, table, master=master, implementation=implementation)  # noqa: E731
        return jax.vjp(op, jnp.zeros(table.shape, jnp.float32))[1](g)[0]

    return run


def _inputs(num_rows, vocab_size, width, hot=0.3):
    rng = np.random.default_rng(num_rows)
    tokens = np.where(rng.random(num_rows) < hot, 3, rng.integers(0, vocab_size - vocab_size // 5, num_rows))
    g = jnp.asarray(rng.standard_normal((num_rows, width)), jnp.bfloat16)
    return jnp.asarray(tokens, jnp.int32), jnp.zeros((vocab_size, width), jnp.bfloat16), g


@pytest.mark.parametrize("num_rows, vocab_size, width", [(1, 50, 2048), (127, 50, 80), (4096, 50, 2048), (4096, 5000, 80)])
def test_bits_are_the_references_and_absent_tokens_have_zeros(num_rows, vocab_size, width):
    inputs = _inputs(num_rows, vocab_size, width)
    kernel, reference = (np.asarray(_gradient(name)(*inputs)) for name in ("triton", "reference"))
    np.testing.assert_array_equal(kernel, reference)
    absent = np.setdiff1d(np.arange(vocab_size), np.asarray(inputs[0]))
    assert len(absent) > 0 and not kernel[absent].view(np.uint32).any()


def test_forty_runs_give_one_result():
    run, inputs = _gradient("triton"), _inputs(4096, 5000, 2048)
    first = np.asarray(run(*inputs)).tobytes()
    assert all(np.asarray(run(*inputs)).tobytes() == first for _ in range(39))


def test_a_token_with_a_hundred_thousand_rows_is_no_matter():
    run, inputs = _gradient("triton"), _inputs(100_000, 151_936, 256, hot=1.0)
    run(*inputs).block_until_ready()
    start = time.perf_counter()
    gradient = run(*inputs).block_until_ready()
    assert time.perf_counter() - start < 0.1
    exact = np.asarray(inputs[2], np.float64).sum(axis=0)
    np.testing.assert_allclose(gradient[3], exact, atol=1e-3)  # sums of size 300, of partial sums of size 10
