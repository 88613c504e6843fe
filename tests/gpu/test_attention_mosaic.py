"""The Pallas attention for Hopper on a GPU: bit for bit the Triton kernel, near a softmax in float64, the same in every run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import assert_same

from pallas_kernels.attention import attention, mosaic

pytestmark = pytest.mark.gpu

LENGTHS = (64, 200, 1000, 4500)  # one tile's sequence; no multiple of a block; one chunk of keys; three
CASES = ((32, 4, 128), (16, 8, 64))  # query heads, key/value heads, head dimension


@functools.cache
def _inputs(case, length, batch=2):
    H, N, K = case
    rng = np.random.default_rng(length)
    # Queries of norm 2 sqrt(K): scores with a standard deviation of 2, so that maxima rise and weights spread.
    shapes = ((batch, length, H, K), 2.0), ((batch, length, N, K), 1.0), ((batch, length, N, K), 1.0)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.bfloat16) for shape, scale in shapes)


def _positions(length, batch=2):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@functools.cache
def _mosaic(config=None):
    return jax.jit(functools.partial(mosaic.attention, config=config or mosaic.Config()))


@functools.cache
def _triton():
    from pallas_kernels.attention import triton

    return jax.jit(triton.attention)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_are_the_triton_kernels(case, length):
    args = *_inputs(case, length), _positions(length)
    out, lse = _mosaic()(*args)
    want_out, want_lse = _triton()(*args)
    assert_same(out, want_out)
    assert_same(lse, want_lse)


def test_packed_sequences():
    """Every sequence's bits are the Triton kernel's, padding behind the first two."""
    positions = jnp.asarray(np.r_[np.arange(640), np.arange(64), np.arange(300)][None], jnp.int32)
    args = *_inputs(CASES[0], positions.shape[1], 1), positions
    for got, want in zip(_mosaic()(*args), _triton()(*args), strict=True):
        assert_same(got, want)


def test_values():
    length, case = 200, CASES[0]
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in _inputs(case, length))
    k, v = (np.repeat(x, case[0] // case[1], axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) * case[2] ** -0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("bhts,bshk->bthk", weights / weights.sum(axis=-1, keepdims=True), v)
    out, _ = _mosaic()(*_inputs(case, length), _positions(length))
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), want, rtol=2e-2, atol=2e-2)


def test_forty_runs_and_other_configs_give_the_same_bits():
    args = *_inputs(CASES[0], 4500), _positions(4500)
    want = tuple(map(np.asarray, _mosaic()(*args)))
    for config in (mosaic.Config(stages=2),):
        for got, each in zip(_mosaic(config)(*args), want, strict=True):
            assert_same(got, each)
    for _ in range(40):
        for got, each in zip(_mosaic()(*args), want, strict=True):
            assert_same(got, each)


def test_gradients_are_the_triton_kernels():
    q, k, v = _inputs(CASES[0], 200)

    def gradients(implementation):
        def loss(q, k, v):
            return jnp.sum(attention(q, k, v, _positions(200), implementation=implementation).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for got, want in zip(gradients("mosaic"), gradients("triton"), strict=True):
        assert_same(got, want)
