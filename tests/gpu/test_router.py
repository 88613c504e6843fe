"""The router on a GPU: experts are the reference's wherever logits differ by more than rounding; a token's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import router

pytestmark = pytest.mark.gpu

_ROWS = 4096
_COUNTS = (1, 2, 7, 16, 17, 64, 127, 129)
_SHAPES = {"30B-A3B": (2048, 128, 8, True), "small": (64, 8, 2, True), "odd": (80, 12, 3, False)}  # D, E, k, normalise


def _inputs(width, num_experts):
    rng = np.random.default_rng(width)
    x = jnp.asarray(rng.standard_normal((_ROWS, width)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((num_experts, width)) * width**-0.5, jnp.float32)


def _router(implementation, k, normalize):
    return jax.jit(lambda x, weight: router(x, weight, top_k=k, normalize=normalize, implementation=implementation))


@pytest.mark.parametrize("name", _SHAPES)
def test_experts_and_weights_against_float64(name):
    width, num_experts, k, normalize = _SHAPES[name]
    x, weight = _inputs(width, num_experts)
    weights, experts = map(np.asarray, _router("triton", k, normalize)(x, weight))
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    order = np.argsort(-logits, axis=1, kind="stable")
    falling = np.take_along_axis(logits, order, axis=1)
    # A float32 sum of `width` products of size ~1 / sqrt(width) is off by less than this. 4096 x 128 logits of deviation 1 lie
    # closer than that in a handful of rows.
    clear = (falling[:, :k] - falling[:, 1 : k + 1]).min(axis=1) > 1e-5
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(experts[clear], order[clear, :k])
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    expected = np.take_along_axis(probs, experts, axis=1)
    if normalize:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=3e-5)


def test_ties_and_numbers_that_are_none():
    x = jnp.zeros((3, 64), jnp.float32).at[1, 0].set(1.0).at[2].set(jnp.nan)
    weight = jnp.zeros((8, 64), jnp.float32).at[5, 0].set(1.0)
    weights, experts = _router("triton", 3, True)(x, weight)
    np.testing.assert_array_equal(experts, [[0, 1, 2], [5, 0, 1], [0, 1, 2]])
    assert np.isfinite(weights[:2]).all() and np.isnan(weights[2]).all()


@pytest.mark.parametrize("name", _SHAPES)
def test_tokens_alone_have_the_bits_they_have_in_a_batch(name):
    width, num_experts, k, normalize = _SHAPES[name]
    x, weight = _inputs(width, num_experts)
    run = _router("triton", k, normalize)
    whole = [np.asarray(y) for y in run(x, weight)]
    for count in _COUNTS:
        for first in (0, 5, _ROWS - count):  # 5: at another place of the tile
            part = slice(first, first + count)
            for alone, batch in zip(run(x[part], weight), whole, strict=True):
                assert np.asarray(alone).tobytes() == batch[part].tobytes(), (count, first)


def test_forty_runs_give_one_result_forward_and_backward():
    width, num_experts, k, normalize = _SHAPES["30B-A3B"]
    x, weight = _inputs(width, num_experts)
    g = jnp.asarray(np.random.default_rng(3).standard_normal((_ROWS, k)), jnp.float32)

    @jax.jit
    def run(x, weight, g):
        op = lambda x, weight: router(x, weight, top_k=k, normalize=normalize, implementation="triton")  # noqa: E731
        (weights, experts), pullback = jax.vjp(op, x, weight)
        return weights, experts, *pullback((g, np.zeros(experts.shape, jax.dtypes.float0)))

    first = [np.asarray(y).tobytes() for y in run(x, weight, g)]
    for _ in range(39):
        assert [np.asarray(y).tobytes() for y in run(x, weight, g)] == first
