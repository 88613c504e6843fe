"""The Pallas gradients of attention for Hopper: indexing, barriers and masks in Pallas's GPU interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas's GPU interpreter is too young before jax 0.11", allow_module_level=True)

from pallas_kernels.attention import mosaic_backward, mosaic_backward_queries, reference  # noqa: E402

# Two thread blocks share the tiles; slots are few, so that they come back often.
FEW = mosaic_backward.Config(stages=2, key_stages=2)
HOST = dict(processors=2, config=FEW, interpret=plgpu.InterpretGPUParams(detect_races=True))


@functools.cache
def _run():
    """Gradients of q, k and v."""
    queries, keys = mosaic_backward_queries.queries_gradient, mosaic_backward.keys_gradient
    return jax.jit(lambda *args: (queries(*args, **HOST), *keys(*args, **HOST)))


def _inputs(length, heads, kv_heads, head_dim, batch=1, seed=0):
    """q, k, v, g."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes)


def _lse_and_delta(q, k, v, positions, g):
    """What the forward and `delta` give, [B, H, T], from float64; the former in base 2."""
    q, k, v, g = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, g))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) * q.shape[3] ** -0.5
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])[None, :]
    seen = (behind >= 0)[None] & (behind[None] <= np.asarray(positions)[:, :, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    sums = np.exp(scores).sum(axis=-1)
    out = np.einsum("bhts,bshk->bthk", np.exp(scores) / sums[..., None], v)
    delta = np.swapaxes((out * g).sum(axis=-1), 1, 2)
    return jnp.asarray(np.log2(sums), jnp.float32), jnp.asarray(delta, jnp.float32)


def _check(inputs, positions):
    q, k, v, g = inputs
    lse, delta = _lse_and_delta(q, k, v, positions, g)
    got = _run()(q, k, v, positions, lse, delta, g)
    want = reference.attention_backward(q, k, v, positions, None, None, g)
    for a, b in zip(got, want, strict=True):
        b = np.asarray(b.astype(jnp.float32))
        # Weights, their gradients and results are rounded to 2^-9. Of one token, gradients are differences of equal numbers.
        atol = max(2.0**-7 * np.abs(b).max(), 2.0**-20)
        np.testing.assert_allclose(np.asarray(a.astype(jnp.float32)), b, rtol=0, atol=atol)
    return got


def test_rows_of_a_batch():
    """Sequences of 64 and 100 tokens, of which two share a tile; padding whose second block sees nothing of the first, and its
    last one both before it. The last tile has one block, which is not full."""
    packed = np.r_[np.arange(64), np.arange(100)]
    padding = np.r_[np.arange(64), np.arange(64), np.arange(128, 164)]
    _check(_inputs(164, 4, 2, 64, batch=2), jnp.asarray(np.stack([packed, padding]), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "heads"), [(1, 2), (65, 64)])
def test_one_token_and_the_most_heads_of_a_key_value_head(length, heads):
    _check(_inputs(length, heads, 1, 64), jnp.arange(length, dtype=jnp.int32)[None])


@pytest.mark.slow
def test_rows_of_padding_alone():
    """Every block of padding begins anew, as `pack_sequences` has it; the second row has nothing else."""
    anew = np.arange(200) % 64
    positions = jnp.asarray(np.stack([np.r_[np.arange(100), np.arange(100, 128), anew[:72]], anew]), jnp.int32)
    _check(_inputs(200, 4, 2, 128, batch=2), positions)


@pytest.mark.slow
def test_packed_sequences_have_their_bits_in_any_place():
    """Sequences begin at the first and at the second of two blocks that share a tile; the last tile has one block."""
    lengths, orders = {"a": 64, "b": 128, "c": 64, "d": 20}, ("abcd", "bacd")
    at = {name: 64 * sum(-(-lengths[each] // 64) for each in "abcd"[:i]) for i, name in enumerate("abcd")}
    whole = _inputs(276, 4, 2, 64)
    results = []
    for order in orders:
        inputs = [jnp.concatenate([x[:, at[name] : at[name] + lengths[name]] for name in order], axis=1) for x in whole]
        positions = np.concatenate([np.arange(lengths[name]) for name in order])
        found = _check(inputs, jnp.asarray(positions[None], jnp.int32))
        begins = np.cumsum([0, *(-(-lengths[name] // 64) * 64 for name in order[:-1])])
        parts = {name: slice(begin, begin + lengths[name]) for name, begin in zip(order, begins, strict=True)}
        results.append([{name: np.asarray(x[:, part]) for name, part in parts.items()} for x in found])
    for one, other in zip(*results, strict=True):
        for name in lengths:
            assert one[name].tobytes() == other[name].tobytes(), name
