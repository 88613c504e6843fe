"""Attention: one token at a time through a longer cache gives the bits of the full pass, whatever lies behind the position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import KEY_BLOCK, attention

_attention = jax.jit(attention)

_B, _T, _H, _N, _K = 2, 37, 4, 2, 8  # 37 tokens: three key blocks, the last one not full
_POSITIONS = np.broadcast_to(np.arange(_T, dtype=np.int32), (_B, _T))


def _inputs(dtype):
    rng = np.random.default_rng(0)
    shapes = ((_B, _T, _H, _K), (_B, _T, _N, _K), (_B, _T, _N, _K))
    return tuple((2 * rng.standard_normal(shape)).astype(np.float32).astype(dtype) for shape in shapes)


def _exact(q, k, v):
    """Float64 attention, one head at a time: head h reads key/value head ``h // (H / N)``."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        keys, values = k[b, : t + 1, h // (_H // _N)], v[b, : t + 1, h // (_H // _N)]
        score = keys @ q[b, t, h] / np.sqrt(_K)
        weight = np.exp(score - score.max())
        out[b, t, h] = weight @ values / weight.sum()
    return out


# bfloat16: the weights and the result are rounded to 2^-8 of values up to 7; float32: sums of 37 terms of that size.
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 7 * 2.0**-8), (jnp.float32, 7 * 2.0**-20)])
def test_values(dtype, tolerance):
    q, k, v = _inputs(dtype)
    result = _attention(q, k, v, _POSITIONS)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), _exact(q, k, v), rtol=0, atol=tolerance)


def test_hand_computed():
    # One key so far: its value. Two equal scores: the mean. A score ahead by ln 3 (times sqrt K): weights 1/4 and 3/4.
    q = np.zeros((1, 3, 1, 4), np.float32)
    q[0, 2, 0, 0] = 2 * np.log(3)
    k, v = np.zeros((1, 3, 1, 4), np.float32), np.zeros((1, 3, 1, 4), np.float32)
    k[0, 1, 0, 0], k[0, 2, 0, 0] = 1, -1e4
    v[0, :, 0, 0] = [1, 5, 99]
    out = _attention(q, k, v, np.arange(3, dtype=np.int32)[None])
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 3, 4], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_decode_through_a_longer_cache_is_the_full_pass(assert_same_bits, dtype):
    q, k, v = _inputs(dtype)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    for garbage in (np.nan, np.inf, -1e30):
        cache_k, cache_v = (np.full((_B, 2 * _T, _N, _K), garbage, np.float32).astype(dtype) for _ in range(2))
        for t in range(_T):
            cache_k[:, t], cache_v[:, t] = k[:, t], v[:, t]
            token = _attention(q[:, t : t + 1], cache_k, cache_v, _POSITIONS[:, t : t + 1])
            assert_same_bits(token, whole[:, t : t + 1])


@pytest.mark.parametrize("chunk", [5, pytest.param(KEY_BLOCK, marks=pytest.mark.slow)])
def test_chunks_with_the_cache_behind_them_are_the_full_pass(assert_same_bits, chunk):
    q, k, v = _inputs(jnp.bfloat16)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    for start in (0, chunk, 2 * chunk):
        here = slice(start, start + chunk)
        seen = np.arange(_T)[None, :, None, None] < start + chunk
        poisoned = [np.where(seen, x, np.nan).astype(jnp.bfloat16) for x in (k, v)]
        assert_same_bits(_attention(q[:, here], *poisoned, _POSITIONS[:, here]), whole[:, here])


def test_sequences_do_not_meet(assert_same_bits):
    """Each sequence alone, in another place of the batch, and beside one of other positions."""
    q, k, v = _inputs(jnp.bfloat16)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    assert_same_bits(_attention(q[::-1], k[::-1], v[::-1], _POSITIONS), whole[::-1])
    for b in range(_B):
        one = slice(b, b + 1)
        assert_same_bits(_attention(q[one], k[one], v[one], _POSITIONS[one]), whole[one])
    for t in ([0, 36], [16, 15], [31, 32]):  # decoding, every sequence somewhere else
        token = _attention(q[np.arange(_B), t][:, None], k, v, np.array(t, np.int32)[:, None])
        assert_same_bits(np.asarray(token)[:, 0], whole[np.arange(_B), t])


def test_rows(check_rows):
    """130 sequences of 5 cached keys, one query token each."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((130, 1, _H, _K)).astype(jnp.bfloat16)
    k, v = rng.standard_normal((2, 130, 5, _N, _K)).astype(jnp.bfloat16)
    check_rows(lambda rows: attention(*rows), (q, k, v, rng.integers(0, 5, (130, 1)).astype(np.int32)))


def test_a_head_group_reads_its_own_keys():
    q, k, v = _inputs(jnp.float32)
    v[:, :, 1] = 7.0
    out = np.asarray(_attention(q, k, v, _POSITIONS))
    np.testing.assert_allclose(out[:, :, 2:], 7.0, rtol=1e-6)
    assert np.abs(out[:, :, :2] - 7.0).max() > 1


def test_a_token_that_is_not_finite_spoils_no_earlier_one_and_no_other_sequence():
    q, k, v = _inputs(jnp.bfloat16)
    whole = np.asarray(_attention(q, k, v, _POSITIONS), np.float32)
    q[0, 20], k[0, 20], v[0, 20] = np.nan, np.nan, np.nan
    out = np.asarray(_attention(q, k, v, _POSITIONS), np.float32)
    np.testing.assert_array_equal(out[0, :20], whole[0, :20])
    np.testing.assert_array_equal(out[1], whole[1])
    assert np.isnan(out[0, 20:]).all()


def _plain(q, k, v, positions):
    k, v = (jnp.repeat(x, _H // _N, axis=2) for x in (k, v))
    score = jnp.einsum("bthk,bshk->bhts", q, k) * _K**-0.5
    seen = jnp.arange(k.shape[1])[None, None, None, :] <= positions[:, None, :, None]
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, score, -jnp.inf), axis=-1), v)


@jax.jit
def _gradients(q, k, v, positions, g):
    return jax.vjp(lambda q, k, v: attention(q, k, v, positions), q, k, v)[1](g)


def test_gradient():
    q, k, v = _inputs(jnp.float32)
    g = np.random.default_rng(2).standard_normal(q.shape).astype(np.float32)
    expected = jax.jit(lambda q, k, v, g: jax.vjp(lambda *qkv: _plain(*qkv, _POSITIONS), q, k, v)[1](g))(q, k, v, g)
    for a, b in zip(_gradients(q, k, v, _POSITIONS, g), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # float32 sums of 37 terms, each up to 50


def test_gradient_does_not_read_slots_behind_every_position(assert_same_bits):
    q, k, v = _inputs(jnp.float32)
    g = np.random.default_rng(2).standard_normal(q.shape).astype(np.float32)
    at = slice(0, 20)
    clean, poisoned = ([x.copy() for x in (k, v)] for _ in range(2))
    for x in clean:
        x[:, 20:] = 0
    for x in poisoned:
        x[:, 20:] = np.nan
    expected = _gradients(q[:, at], *clean, _POSITIONS[:, at], g[:, at])
    actual = _gradients(q[:, at], *poisoned, _POSITIONS[:, at], g[:, at])
    assert_same_bits(actual, expected)
    assert not np.asarray(actual[1])[:, 20:].any() and not np.asarray(actual[2])[:, 20:].any()


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key/value heads"):
        attention(jnp.ones((1, 1, 3, 4)), jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 1), jnp.int32))


def test_forty_runs_give_one_result():
    q, k, v = _inputs(jnp.bfloat16)
    run = lambda: (_attention(q, k, v, _POSITIONS), *_gradients(q, k, v, _POSITIONS, q))  # noqa: E731
    assert len({b"".join(np.asarray(a).tobytes() for a in run()) for _ in range(40)}) == 1
