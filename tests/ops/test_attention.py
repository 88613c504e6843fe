"""Attention: one token at a time through pages, and sequences packed into rows, give the bits of a pass over one sequence alone,
whatever lies behind the position.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, key_block, paged_attention

_attention, _paged_attention = jax.jit(attention), jax.jit(paged_attention)

KEY_BLOCK = key_block()

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


def _paged(x, table, num_pages, garbage):
    """[B, T, N, K] in pages by a table [B, J]; `garbage` in every slot that no token has."""
    pages = np.full((num_pages, KEY_BLOCK, *x.shape[2:]), garbage, x.dtype)
    for b, t in np.ndindex(x.shape[:2]):
        pages[table[b, t // KEY_BLOCK], t % KEY_BLOCK] = x[b, t]
    return pages


_PAGES = 9
_TABLE = np.array([[7, 2, 5, 0], [3, 8, 1, 6]], np.int32)  # shuffled, one more than 37 tokens need, page 4 nobody's


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_decoding_through_pages_is_the_full_pass(assert_same_bits, dtype):
    """One token at a time, whatever pages hold behind it and whatever the table says behind its page."""
    q, k, v = _inputs(dtype)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    for garbage in (np.nan, np.inf, -1e30):
        for t in range(_T):
            table = _TABLE.copy()
            table[:, t // KEY_BLOCK + 1 :] = -7 if np.isnan(garbage) else 10**6
            pages = [_paged(x[:, : t + 1], _TABLE, _PAGES, garbage) for x in (k, v)]
            token = _paged_attention(q[:, t : t + 1], *pages, table, _POSITIONS[:, t : t + 1])
            assert_same_bits(token, whole[:, t : t + 1])


@pytest.mark.parametrize("chunk", [5, pytest.param(KEY_BLOCK, marks=pytest.mark.slow)])
def test_chunks_with_the_cache_behind_them_are_the_full_pass(assert_same_bits, chunk):
    q, k, v = _inputs(jnp.bfloat16)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    for start in (0, chunk, 2 * chunk):
        here = slice(start, start + chunk)
        pages = [_paged(x[:, : start + chunk], _TABLE, _PAGES, np.nan) for x in (k, v)]
        assert_same_bits(_paged_attention(q[:, here], *pages, _TABLE, _POSITIONS[:, here]), whole[:, here])


def test_page_numbers_and_shared_pages_change_nothing(assert_same_bits):
    """Two sequences of the same first 16 tokens, with a copy each, and with one page for both."""
    q, k, v = _inputs(jnp.bfloat16)
    for x in (k, v):
        x[1, :KEY_BLOCK] = x[0, :KEY_BLOCK]
    at = np.array([[36], [20]], np.int32)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    query = q[np.arange(_B)[:, None], at]
    shared = np.array([[7, 2, 5, 0], [7, 8, 1, 6]], np.int32)
    for table in (_TABLE, _TABLE[::-1], np.arange(8, dtype=np.int32).reshape(2, 4), shared):
        pages = [_paged(x, table, _PAGES, np.nan) for x in (k, v)]
        assert_same_bits(_paged_attention(query, *pages, table, at), whole[np.arange(_B)[:, None], at])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_position_of_minus_one_attends_nothing(assert_same_bits, dtype):
    """Its result is 0, and a neighbour's what it is without it; pages without a token may hold NaN."""
    q, k, v = _inputs(dtype)
    pages = [_paged(x, _TABLE, _PAGES, np.nan) for x in (k, v)]
    at = np.array([[20, -1], [-1, -1]], np.int32)
    out = np.asarray(_paged_attention(q[:, [20, 3]], *pages, _TABLE, at))
    assert not out[at == -1].astype(np.float32).any()
    assert_same_bits(out[0, 0], np.asarray(_attention(q, k, v, _POSITIONS))[0, 20])


def test_sequences_do_not_meet(assert_same_bits):
    """Each sequence alone, in another place of the batch, and beside one of other positions."""
    q, k, v = _inputs(jnp.bfloat16)
    whole = np.asarray(_attention(q, k, v, _POSITIONS))
    assert_same_bits(_attention(q[::-1], k[::-1], v[::-1], _POSITIONS), whole[::-1])
    for b in range(_B):
        one = slice(b, b + 1)
        assert_same_bits(_attention(q[one], k[one], v[one], _POSITIONS[one]), whole[one])
    pages = [_paged(x, _TABLE, _PAGES, np.nan) for x in (k, v)]
    for t in ([0, 36], [16, 15], [31, 32]):  # decoding, every sequence somewhere else
        token = _paged_attention(q[np.arange(_B), t][:, None], *pages, _TABLE, np.array(t, np.int32)[:, None])
        assert_same_bits(np.asarray(token)[:, 0], whole[np.arange(_B), t])


# Lengths around the key block, the start of each in a row of 80 tokens, and the row.
_PACKED = ((16, 0, 0), (17, 16, 0), (1, 48, 0), (15, 64, 0), (37, 0, 1), (30, 48, 1))


def _pack(sequences):
    """Arrays [length, ...] in rows [2, 80, ...], NaN elsewhere, and the positions."""
    rows = np.full((2, 80, *sequences[0].shape[1:]), np.nan, sequences[0].dtype)
    positions = np.zeros((2, 80), np.int32)
    for x, (length, start, row) in zip(sequences, _PACKED, strict=True):
        rows[row, start : start + length] = x
        positions[row, start : start + length] = np.arange(length)
    return rows, positions


def _alone(x, padding):
    """One sequence as a row of 37 tokens."""
    return np.concatenate([x, np.full((_T - len(x), *x.shape[1:]), padding, x.dtype)])[None]


def _sequences(dtype):
    """q, k, v and a cotangent of each packed sequence."""
    rng = np.random.default_rng(3)
    shapes = ((_H, _K), (_N, _K), (_N, _K), (_H, _K))
    return [
        [(2 * rng.standard_normal((length, *shape))).astype(np.float32).astype(dtype) for shape in shapes]
        for length, _, _ in _PACKED
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_packed_sequences_are_the_sequences_alone(assert_same_bits, dtype):
    """NaN in the padding between them touches none, and neither do the neighbours."""
    sequences = _sequences(dtype)
    (q, positions), (k, _), (v, _) = (_pack(xs) for xs in list(zip(*sequences, strict=True))[:3])
    packed = np.asarray(_attention(q, k, v, positions))
    for (*qkv, _), (length, start, row) in zip(sequences, _PACKED, strict=True):
        alone = _attention(*(_alone(x, np.nan) for x in qkv), _POSITIONS[:1])
        assert_same_bits(packed[row, start : start + length], np.asarray(alone)[0, :length])


def test_gradients_of_packed_sequences_are_those_of_the_sequences():
    sequences = _sequences(jnp.float32)
    (q, positions), (k, _), (v, _), (g, _) = (_pack(xs) for xs in zip(*sequences, strict=True))
    packed = _gradients(*(np.nan_to_num(x) for x in (q, k, v)), positions, np.nan_to_num(g))
    for (q, k, v, g), (length, start, row) in zip(sequences, _PACKED, strict=True):
        alone = _gradients(*(_alone(x, 0) for x in (q, k, v)), _POSITIONS[:1], _alone(g, 0))
        for a, b in zip(packed, alone, strict=True):
            # Float32 sums of at most 37 terms, each up to 50, in another order.
            a, b = np.asarray(a)[row, start : start + length], np.asarray(b)[0, :length]
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rows(check_rows):
    """130 sequences of 5 cached keys, one query token each."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((130, 1, _H, _K)).astype(jnp.bfloat16)
    k, v = jnp.asarray(rng.standard_normal((2, 130, KEY_BLOCK, _N, _K)), jnp.bfloat16)
    tables = rng.permutation(130).astype(np.int32)[:, None]
    check_rows(
        lambda rows: paged_attention(rows[0], k, v, rows[1], rows[2]),
        (q, tables, rng.integers(0, 5, (130, 1)).astype(np.int32)),
        differentiable=False,
    )


def test_rows_of_a_packed_pass(check_rows):
    """130 sequences of 5 tokens."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((130, 5, _H, _K)).astype(jnp.bfloat16)
    k, v = rng.standard_normal((2, 130, 5, _N, _K)).astype(jnp.bfloat16)
    check_rows(lambda rows: attention(*rows), (q, k, v, np.broadcast_to(np.arange(5, dtype=np.int32), (130, 5))))


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


@pytest.mark.parametrize("op", ["attention", "paged_attention"])
def test_wrong_arguments_are_refused(op):
    def call(num_heads, dtype):
        pages = jnp.ones((1, KEY_BLOCK, 2, 4), dtype)
        q, positions = jnp.ones((1, KEY_BLOCK, num_heads, 4)), jnp.zeros((1, KEY_BLOCK), jnp.int32)
        where = (positions,) if op == "attention" else (jnp.zeros((1, 1), jnp.int32), positions)
        return dict(attention=attention, paged_attention=paged_attention)[op](q, pages, pages, *where)

    with pytest.raises(ValueError, match=f"{op}: 3 query heads are not a multiple of 2 key/value heads"):
        call(3, jnp.float32)
    with pytest.raises(ValueError, match=f"{op}: q, k and v must have one type, not float32, bfloat16 and bfloat16"):
        call(4, jnp.bfloat16)


def test_pages_of_another_size_are_refused():
    pages, at = jnp.ones((1, 8, 2, 4)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="pages have 8 slots; a page is a key block, 16 slots"):
        paged_attention(jnp.ones((1, 1, 2, 4)), pages, pages, at, at)


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, jnp.bfloat16), (64, jnp.float16)])
def test_what_the_kernels_do_not_have_is_refused_by_name(monkeypatch, head_dim, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((1, 2, 2, head_dim), dtype)
    wanted = rf"attention: no triton kernel for q of shape \(1, 2, 2, {head_dim}\) in {jnp.dtype(dtype)} on gpu"
    with pytest.raises(NotImplementedError, match=wanted):
        attention(x, x, x, jnp.zeros((1, 2), jnp.int32), implementation="triton")


def test_forty_runs_give_one_result():
    q, k, v = _inputs(jnp.bfloat16)
    run = lambda: (_attention(q, k, v, _POSITIONS), *_gradients(q, k, v, _POSITIONS, q))  # noqa: E731
    assert len({b"".join(np.asarray(a).tobytes() for a in run()) for _ in range(40)}) == 1
