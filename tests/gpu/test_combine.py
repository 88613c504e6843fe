"""Combine and un-dispatch on a GPU: the kernels' bits are the reference's, for every number of tokens, every time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import combine
from pallas_kernels.undispatch import undispatch

pytestmark = pytest.mark.gpu

_COUNTS = (1, 2, 7, 16, 17, 64, 127, 129)
_SHAPES = [(8, 2048, "bfloat16"), (3, 80, "float32")]  # experts per token, width, type


def _inputs(num_tokens, k, width, dtype):
    rng = np.random.default_rng(num_tokens)
    rows = jnp.asarray(rng.standard_normal((num_tokens * k, width)), dtype)
    weights = jnp.asarray(rng.dirichlet(np.ones(k), num_tokens), jnp.float32)
    slot = jnp.asarray(rng.permutation(num_tokens * k).reshape(num_tokens, k), jnp.int32)
    return rows, weights, slot, jnp.asarray(rng.standard_normal((num_tokens, width)), dtype)


def _both_ways(implementation):
    @jax.jit
    def run(rows, weights, slot, g):
        op = lambda rows, weights: combine(rows, weights, slot, implementation=implementation)  # noqa: E731
        value, pullback = jax.vjp(op, rows, weights)
        undispatched = undispatch(rows.astype(jnp.float32), slot, out_dtype=rows.dtype, implementation=implementation)
        return value, *pullback(g), undispatched

    return run


def _bytes(arrays):
    return [np.asarray(x).tobytes() for x in arrays]


@pytest.mark.parametrize("k, width, dtype", _SHAPES)
@pytest.mark.parametrize("num_tokens", [7, 4096])
def test_bits_are_the_references_forward_and_backward(num_tokens, k, width, dtype):
    inputs = _inputs(num_tokens, k, width, dtype)
    for kernel, reference in zip(_both_ways("triton")(*inputs), _both_ways("reference")(*inputs), strict=True):
        np.testing.assert_array_equal(np.asarray(kernel, np.float32), np.asarray(reference, np.float32))


@pytest.mark.parametrize("k, width, dtype", _SHAPES)
def test_tokens_alone_have_the_bits_they_have_in_a_batch(k, width, dtype):
    rows, weights, _, _ = _inputs(4096, k, width, dtype)
    outputs = rows.reshape(4096, k, width)
    run = jax.jit(lambda outputs, weights: combine(outputs, weights, implementation="triton"))
    whole = np.asarray(run(outputs, weights))
    for count in _COUNTS:
        for first in (0, 4096 - count):
            part = slice(first, first + count)
            assert np.asarray(run(outputs[part], weights[part])).tobytes() == whole[part].tobytes(), (count, first)


def test_forty_runs_give_one_result():
    inputs = _inputs(4096, *_SHAPES[0])
    run = _both_ways("triton")
    first = _bytes(run(*inputs))
    for _ in range(39):
        assert _bytes(run(*inputs)) == first
