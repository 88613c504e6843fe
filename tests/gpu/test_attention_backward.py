"""Attention's gradients on a GPU: right within bounds, the same for a sequence alone and packed, every time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.attention import attention, key_block

pytestmark = pytest.mark.gpu

_SHAPES = {"4 heads": (4, 4, 64), "32 heads on 4": (32, 4, 128), "6 heads on 2": (6, 2, 64)}
_LENGTHS = (1, 65, 200, 1000)


@jax.jit
def _forward_and_gradients(q, k, v, positions, g):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, positions, implementation="triton"), q, k, v)
    return out, *pullback(g)


def _inputs(shape, dtype, length, batch=1, seed=0):
    """q, k, v, g."""
    heads, kv_heads, width = shape
    rng = np.random.default_rng(seed + length)
    return tuple(jnp.asarray(rng.standard_normal((batch, length, n, width)), dtype) for n in (heads, kv_heads, kv_heads, heads))


def _plain(length, batch=1):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def _exact(q, k, v, g):
    """Float64 gradients of one sequence: q, g [T, H, K], k, v [T, N, K]."""
    length, heads, width = q.shape
    kv_heads = k.shape[1]
    q, k, v, g = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q, k, v, g))
    k, v = (np.repeat(x, heads // kv_heads, axis=0) for x in (k, v))
    score = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(1, 2) * width**-0.5, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    dweight = g @ v.swapaxes(1, 2)
    dscore = weight * (dweight - (weight * dweight).sum(-1, keepdims=True)) * width**-0.5
    sum_heads = lambda x: x.reshape(kv_heads, -1, length, width).sum(1)  # noqa: E731
    results = dscore @ k, sum_heads(dscore.swapaxes(1, 2) @ q), sum_heads(weight.swapaxes(1, 2) @ g)
    return [x.swapaxes(0, 1) for x in results]


# Weights and their gradients are rounded to 2^-9 before sums of up to 1000, the results too; float32: exp2 to 2^-22.
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2.0**-7), ("float32", 2.0**-17)])
@pytest.mark.parametrize("name", _SHAPES)
def test_values(name, dtype, tolerance):
    for length in _LENGTHS:
        inputs = _inputs(_SHAPES[name], dtype, length)
        _, *actual = _forward_and_gradients(*inputs[:3], _plain(length), inputs[3])
        for a, b in zip(actual, _exact(*(x[0] for x in inputs)), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(np.asarray(a[0], np.float64), b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", _SHAPES)
def test_a_sequence_has_the_bits_packed_that_it_has_alone(name, dtype):
    """Two rows of packed sequences, with noise in the padding between and a row that ends within a block."""
    block, shape = key_block("triton"), _SHAPES[name]
    rows = ((200, 1, 65, 64), (65, 200, 130))
    starts = [np.cumsum([0, *(-(-length // block) * block for length in row[:-1])]) for row in rows]
    width = max(int(start[-1]) + row[-1] for start, row in zip(starts, rows, strict=True))
    arrays = [np.array(x) for x in _inputs(shape, dtype, width, batch=2, seed=9)]
    arrays[3][:] = 0
    positions = np.array(_plain(width, 2))
    for b, row in enumerate(rows):
        for i, (start, length) in enumerate(zip(starts[b], row, strict=True)):
            for array, own in zip(arrays, _inputs(shape, dtype, length, seed=10 * b + i), strict=True):
                array[b, start : start + length] = own[0]
            positions[b, start:] = np.arange(width - start)
    q, k, v, g = map(jnp.asarray, arrays)
    packed = [np.asarray(x) for x in _forward_and_gradients(q, k, v, jnp.asarray(positions), g)]
    for b, row in enumerate(rows):
        for i, (start, length) in enumerate(zip(starts[b], row, strict=True)):
            own = _inputs(shape, dtype, length, seed=10 * b + i)
            alone = _forward_and_gradients(*own[:3], _plain(length), own[3])
            for whole, part in zip(packed, alone, strict=True):
                assert whole[b, start : start + length].tobytes() == np.asarray(part)[0].tobytes(), (b, length)
    padding = np.ones((2, width), bool)
    for b, row in enumerate(rows):
        for start, length in zip(starts[b], row, strict=True):
            padding[b, start : start + length] = False
    assert not np.asarray(packed[1], np.float32)[padding].any()  # g is 0 there


def test_tokens_without_a_gradient_add_nothing():
    q, k, v, g = _inputs(_SHAPES["32 heads on 4"], "bfloat16", 200)
    _, *short = _forward_and_gradients(q[:, :130], k[:, :130], v[:, :130], _plain(130), g[:, :130])
    _, *long = _forward_and_gradients(q, k, v, _plain(200), g.at[:, 130:].set(0))
    for a, b in zip(long, short, strict=True):
        assert np.asarray(a)[:, :130].tobytes() == np.asarray(b).tobytes()
        assert not np.asarray(a, np.float32)[:, 130:].any()


def test_tiles_do_not_show_in_the_bits():
    length = 520
    q, k, v, g = _inputs(_SHAPES["32 heads on 4"], "bfloat16", length, batch=2)
    positions = jnp.stack([_plain(length)[0], jnp.concatenate([_plain(320)[0], _plain(200)[0]])])

    def bits(for_dq, for_dk):
        jax.clear_caches()
        with tuning.override("attention_dq_bfloat16", for_dq), tuning.override("attention_dk_bfloat16", for_dk):
            return [np.asarray(x).tobytes() for x in _forward_and_gradients(q, k, v, positions, g)]

    expected = bits({}, {})
    assert bits(dict(BLOCK_M=128, num_warps=8), dict(BLOCK_N=128, num_warps=8)) == expected
    assert bits(dict(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2), dict(num_stages=3)) == expected


def test_twenty_runs_give_one_result():
    q, k, v, g = _inputs(_SHAPES["32 heads on 4"], "bfloat16", 1000, batch=2)
    run = lambda: _forward_and_gradients(q, k, v, _plain(1000, 2), g)  # noqa: E731
    assert len({b"".join(np.asarray(x).tobytes() for x in run()) for _ in range(20)}) == 1
