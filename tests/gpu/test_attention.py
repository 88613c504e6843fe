"""Attention's forward on a GPU: the same bits however its tokens and keys are cut up, and near a softmax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.attention import attention, key_block, paged_attention

pytestmark = pytest.mark.gpu

BATCH, LONGEST = 2, 4500  # several chunks of keys, no multiple of a tile
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 200, 1000)
CHUNKS = (1000, 1, 63, 64, 65, 7, 128, 1172, 2000)  # of a chunked prefill, in order: 4500 tokens
# Query heads, key/value heads, head dimension, type.
CASES = (
    (32, 4, 128, "bfloat16"),
    (16, 8, 64, "bfloat16"),
    (4, 4, 128, "bfloat16"),
    (16, 8, 128, "float32"),
    (4, 4, 16, "float32"),
)
TILES = ((64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 4), (256, 8, 2))  # rows, warps, stages

cases = pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
bfloat16_cases = pytest.mark.parametrize("case", CASES[:3], ids=["-".join(map(str, case)) for case in CASES[:3]])


def _kernels():
    from pallas_kernels.attention import triton

    return triton


@functools.cache
def _inputs(case):
    H, N, K, dtype = case
    rng = np.random.default_rng(0)
    # Queries of norm 2 sqrt(K): scores with a standard deviation of 2, so that maxima rise and weights spread.
    shapes = ((BATCH, LONGEST, H, K), 2.0), ((BATCH, LONGEST, N, K), 1.0), ((BATCH, LONGEST, N, K), 1.0)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype) for shape, scale in shapes)


def _positions(length, batch=BATCH):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@functools.cache
def _full(case):
    """Output and log-sum-exp of the full pass: what every other way of computing them must give."""
    return tuple(map(np.asarray, _kernels().attention(*_inputs(case), _positions(LONGEST))))


@functools.cache
def _pages(case):
    """The keys and values in shuffled pages, NaN in every other slot; a table as wide as the longest sequence and a page more."""
    _, k, v = map(np.asarray, _inputs(case))
    S = key_block()
    used = -(-LONGEST // S)
    order = np.random.default_rng(1).permutation(BATCH * (used + 3))
    tables = np.full((BATCH, used + 1), 2**30, np.int32)  # no such page: reading it would end the program
    pages = np.full((2, len(order), S, *k.shape[2:]), np.nan, k.dtype)
    for b in range(BATCH):
        tables[b, :used] = order[b * used : (b + 1) * used]
        for kind, x in enumerate((k, v)):
            padded = np.full((used * S, *k.shape[2:]), np.nan, k.dtype)
            padded[:LONGEST] = x[b]
            pages[kind, tables[b, :used]] = padded.reshape(used, S, *k.shape[2:])
    return jnp.asarray(pages[0]), jnp.asarray(pages[1]), jnp.asarray(tables)


def _same(actual, expected, what):
    """Equal bits, or: how many differ, in which places first, and by how much."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    bits = f"u{actual.dtype.itemsize}"
    differs = np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits)
    if differs.any():
        places = np.argwhere(differs)
        first = tuple(places[0])
        error = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
        ranges = [f"{sorted(set(column))[:6]}" for column in places.T]
        pytest.fail(
            f"{what}: {len(places)} of {differs.size} numbers differ, by at most {error:.3g}; first at {first}: "
            f"{actual[first]!r} for {expected[first]!r}; indices that differ along each axis: {', '.join(ranges)}"
        )


@cases
def test_near_the_softmax_in_float64(case):
    H, N, K, dtype = case
    out, lse = _full(case)
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in _inputs(case))
    rows = np.unique(np.concatenate([[0, 1, 62, 63, 64, 2047, 2048, 4095, 4096, LONGEST - 1], np.arange(0, LONGEST, 271)]))
    score = np.einsum("tngk,snk->ngts", q[0, rows].reshape(-1, N, H // N, K), k[0]) * K**-0.5
    score = np.where(np.arange(LONGEST)[None, :] <= rows[:, None], score, -np.inf)
    maximum = score.max(-1, keepdims=True)
    weight = np.exp(score - maximum)
    total = weight.sum(-1, keepdims=True)
    exact, size = (np.einsum("ngts,snk->tngk", weight / total, x).reshape(-1, H, K) for x in (v[0], np.abs(v[0])))
    # bfloat16: weights and outputs are rounded, 2^-8 each (8 bits of significand), and the rest is much smaller. float32: the
    # scores are sums of K products, so weights have relative errors of some 2^-20.
    bound = 1.05 * 2.0**-7 if dtype == "bfloat16" else 2.0**-16
    error = np.abs(out[0, rows].astype(np.float64) - exact) / size
    assert error.max() <= bound, f"error {error.max():.3g} of sum p |v| at {np.unravel_index(error.argmax(), error.shape)}"
    exact_lse = ((maximum + np.log(total))[..., 0] / np.log(2)).reshape(H, -1)
    np.testing.assert_allclose(lse[0][:, rows], exact_lse, rtol=0, atol=2e-5)


@cases
def test_a_shorter_pass_gives_the_first_rows(case):
    for length in LENGTHS if case == CASES[0] else (65, 1000):
        out, lse = _kernels().attention(*(x[:, :length] for x in _inputs(case)), _positions(length))
        _same(out, _full(case)[0][:, :length], f"{length} tokens")
        _same(lse, _full(case)[1][:, :, :length], f"log-sum-exp of {length} tokens")


@cases
def test_packed_sequences_are_as_if_alone(case):
    q, k, v = map(np.asarray, _inputs(case))
    lengths, S = (200, 64, 127, 2500, 1, 63, 1000), key_block()
    starts = np.cumsum([0, *(-(-length // S) * S for length in lengths)])
    rng = np.random.default_rng(2)

    def packed(x):
        rows = rng.standard_normal((BATCH, starts[-1] - 3, *x.shape[2:]), np.float32).astype(x.dtype) * 100  # padding
        for start, length in zip(starts, lengths, strict=False):
            rows[:, start : start + length] = x[:, :length]
        return jnp.asarray(rows)

    positions = rng.integers(0, np.arange(starts[-1] - 3) + 1, (BATCH, starts[-1] - 3)).astype(np.int32)  # any, in the padding
    for start, length in zip(starts, lengths, strict=False):
        positions[:, start : start + length] = np.arange(length)
    out, lse = _kernels().attention(packed(q), packed(k), packed(v), jnp.asarray(positions))
    assert not np.isnan(np.asarray(out, np.float32)).any()
    for start, length in zip(starts, lengths, strict=False):
        length = min(length, starts[-1] - 3 - start)
        _same(out[:, start : start + length], _full(case)[0][:, :length], f"{length} tokens at {start}")
        _same(lse[:, :, start : start + length], _full(case)[1][:, :, :length], f"log-sum-exp of {length} tokens at {start}")


@cases
def test_chunked_prefill_through_pages(case):
    first = 0
    for tokens in CHUNKS:
        rows = slice(first, first + tokens)
        out = paged_attention(_inputs(case)[0][:, rows], *_pages(case), first + _positions(tokens))
        _same(out, _full(case)[0][:, rows], f"tokens {first} to {first + tokens}")
        first += tokens
    assert first == LONGEST


def _decode(case, rows, split, b=0):
    """One token of each of so many sequences, all of them copies of sequence b that have come to other places."""
    k_pages, v_pages, tables = _pages(case)
    tables = jnp.broadcast_to(tables[b], (len(rows), tables.shape[1]))
    q = _inputs(case)[0][b, rows][:, None]
    return _kernels().paged_attention(q, k_pages, v_pages, tables, jnp.asarray(rows, jnp.int32)[:, None], split=split)[:, 0]


@cases
@pytest.mark.parametrize("split", [False, True], ids=["one_program", "split"])
def test_one_token_at_a_time(case, split):
    """At 256 places, in one program for each sequence or one for each chunk of its keys."""
    rows = np.unique(np.concatenate([np.linspace(0, LONGEST - 1, 250).astype(int), [2047, 2048, 4095, 4096, 63, 64]]))
    _same(_decode(case, rows, split), _full(case)[0][0, rows], "decoded tokens")
    _same(_decode(case, rows[::-1], split, b=1), _full(case)[0][1, rows[::-1]], "tokens decoded in another order")


@bfloat16_cases
@pytest.mark.parametrize("split", [False, True], ids=["one_program", "split"])
def test_a_sequence_does_not_depend_on_the_batch(case, split):
    rows = np.random.default_rng(3).integers(0, LONGEST, 256)
    whole = np.asarray(_decode(case, rows, split))
    for batch in (1, 2, 7, 64, 256) if case == CASES[0] else (64,):
        first = min(100, 256 - batch)
        _same(_decode(case, rows[first : first + batch], split), whole[first : first + batch], f"{batch} sequences")


@bfloat16_cases
def test_bits_do_not_depend_on_the_tile(case):
    H, N, _, _ = case
    q, k, v = (x[:, 1000:4000] for x in _inputs(case))
    first = _kernels().attention(q, k, v, _positions(3000))
    rows = np.arange(4000, 4064)
    decoded = _full(case)[0][0, rows]
    seen = set()
    for block, warps, stages in TILES:
        parameters = dict(BLOCK_M=block, num_warps=warps, num_stages=stages)
        with tuning.override("attention_prefill_bfloat16", parameters), tuning.override("attention_decode_bfloat16", parameters):
            launch = _kernels().attention_launch(BATCH, 3000, H, N, q.shape[3], q.dtype)
            tile = launch.constants["BLOCK_M"], launch.num_warps, launch.num_stages
            if tile in seen:
                continue
            seen.add(tile)
            out, lse = _kernels().attention(q, k, v, _positions(3000))
            _same(out, first[0], f"tile {tile}")
            _same(lse, first[1], f"log-sum-exp with tile {tile}")
            if case == CASES[0] and block <= 128:
                _same(_decode(case, rows, False), decoded, f"decoding with tile {tile}")


def test_forty_runs():
    case = CASES[0]
    rows = np.arange(0, LONGEST, 18)
    prefill = jax.jit(lambda q, k, v: attention(q, k, v, _positions(LONGEST)))
    for _ in range(40):
        _same(prefill(*_inputs(case)), _full(case)[0], "a repeated pass")
        _same(_decode(case, rows, True), _full(case)[0][0, rows], "repeated decoding")


def test_a_position_of_minus_one_attends_nothing():
    case = CASES[0]
    k_pages, v_pages, tables = _pages(case)
    q = _inputs(case)[0][:, :4]
    positions = jnp.asarray([[10, -1, 3000, -1], [-1, -1, -1, -1]], jnp.int32)
    for split in (False, True):
        out = np.asarray(_kernels().paged_attention(q, k_pages, v_pages, tables, positions, split=split), np.float32)
        assert (out[0, [1, 3]] == 0).all() and (out[1] == 0).all() and not np.isnan(out).any()
        assert (out[0, [0, 2]] != 0).all()


def test_other_head_dimensions_are_refused():
    q, k = jnp.zeros((1, 2, 2, 80), jnp.bfloat16), jnp.zeros((1, 2, 1, 80), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"no triton kernel for q of shape \(1, 2, 2, 80\) in bfloat16 on gpu"):
        attention(q, k, k, jnp.zeros((1, 2), jnp.int32) + jnp.arange(2, dtype=jnp.int32)[None], implementation="triton")
