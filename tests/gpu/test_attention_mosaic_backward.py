"""The Pallas gradients of attention for Hopper on a GPU: the Triton kernels' bits, packed and alone, in every run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import assert_same

from pallas_kernels.attention import mosaic, mosaic_backward

pytestmark = pytest.mark.gpu

LENGTHS = (1, 64, 200, 1000, 4500)  # less than a tile; one; no multiple of a block; several rounds of tiles
CASES = ((32, 4, 128), (16, 8, 64), (64, 1, 128))  # query heads, key/value heads, head dimension


def _plain(length, batch=1):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@functools.cache
def _inputs(case, length, batch=2):
    """q, k, v, g."""
    H, N, K = case
    rng = np.random.default_rng(length)
    shapes = [(batch, length, n, K) for n in (H, N, N, H)]
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes)


@functools.cache
def _gradients(config):
    """Of q, k, v, positions and g: the gradients of q, k and v."""

    @jax.jit
    def run(q, k, v, positions, g):
        out, lse = mosaic.attention(q, k, v, positions)
        return mosaic.attention_backward(q, k, v, positions, out, lse, g, config=config)

    return run


def _mosaic(*args):
    return _gradients(mosaic_backward.DEFAULT)(*args)


def _check(args):
    for got, want in zip(_mosaic(*args), _gradients(None)(*args), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_are_the_triton_kernels(case, length):
    q, k, v, g = _inputs(case, length)
    _check((q, k, v, _plain(length, 2), g))


def test_values():
    length, (H, N, K) = 200, CASES[0]
    q, k, v, g = (np.asarray(x.astype(jnp.float32), np.float64)[0].swapaxes(0, 1) for x in _inputs(CASES[0], length))
    k, v = (np.repeat(x, H // N, axis=0) for x in (k, v))
    scores = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(1, 2) * K**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = g @ v.swapaxes(1, 2)
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) * K**-0.5
    got = _mosaic(*(x[:1] for x in _inputs(CASES[0], length)[:3]), _plain(length), _inputs(CASES[0], length)[3][:1])
    sum_heads = lambda x: x.reshape(N, H // N, length, K).sum(axis=1)  # noqa: E731
    wanted = dscores @ k, sum_heads(dscores.swapaxes(1, 2) @ q), sum_heads(weights.swapaxes(1, 2) @ g)
    for actual, want in zip(got, (x.swapaxes(0, 1) for x in wanted), strict=True):
        # Weights, their gradients and results are rounded to 2^-9.
        np.testing.assert_allclose(np.asarray(actual[0].astype(jnp.float32)), want, rtol=0, atol=2.0**-7 * np.abs(want).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_has_the_bits_packed_that_it_has_alone(case):
    """Sequences that begin at the first and at the second block of a tile; the last ends within a block."""
    lengths = (640, 64, 64, 192, 1024, 300)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in lengths])[None], jnp.int32)
    q, k, v, g = _inputs(case, positions.shape[1], 1)
    packed = _mosaic(q, k, v, positions, g)
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        own = [x[:, start : start + length] for x in (q, k, v, g)]
        for whole, part in zip(packed, _mosaic(*own[:3], _plain(length), own[3]), strict=True):
            assert_same(whole[:, start : start + length], part)


def test_padding_between_and_padding_that_attends_what_lies_before():
    """Every second row of a batch of such rows; both kernels take the blocks as the forward does."""
    lengths = (200, 1, 65, 64, 700)
    starts = np.cumsum([0, *(-(-n // 64) * 64 for n in lengths)])
    positions = np.array(_plain(int(starts[-1]), 2))
    for start in starts[:-1]:
        positions[0, start:] = np.arange(len(positions[0]) - start)
    positions[1, 512:576] = np.arange(64)  # a block that sees itself only; those behind it see all
    q, k, v, g = _inputs(CASES[0], positions.shape[1])
    _check((q, k, v, jnp.asarray(positions), g))


def test_forty_runs_and_other_configs_give_the_same_bits():
    q, k, v, g = _inputs(CASES[0], 4500)
    args = q, k, v, _plain(4500, 2), g
    want = tuple(map(np.asarray, _mosaic(*args)))
    for config in (mosaic_backward.Config(stages=2, key_stages=3), mosaic_backward.Config(stages=4, key_stages=2)):
        for got, each in zip(_gradients(config)(*args), want, strict=True):
            assert_same(got, each)
    for _ in range(40):
        for got, each in zip(_mosaic(*args), want, strict=True):
            assert_same(got, each)
