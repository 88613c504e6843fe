"""Log-probs and sampling under one convention: temperature, then top-k, then top-p, renormalised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits, sample_tokens, token_log_prob
from pallas_kernels.matmul import matmul

_M, _D, _V = 300, 16, 40  # more rows than one chunk of logits

# Cut, not cut, greedy; `_exact_log_probs` says the same in float64.
_TRUNCATIONS = [
    Truncation(), Truncation(temperature=0.7), Truncation(temperature=0.0), Truncation(top_k=5),
    Truncation(temperature=1.3, top_p=0.6), Truncation(temperature=0.8, top_k=9, top_p=0.8),
]  # fmt: skip
_EACH = [*(pytest.param(t, marks=pytest.mark.slow) for t in _TRUNCATIONS[:5]), _TRUNCATIONS[5]]  # the last one does everything


@functools.partial(jax.jit, static_argnums=2)
def _of_logits(logits, tokens, truncation):
    return log_prob_of_logits(logits, tokens, truncation, kept_tokens(logits, truncation))


@functools.partial(jax.jit, static_argnums=2)
def _of_hidden(hidden, tokens, truncation, head):
    return token_log_prob(hidden, head, tokens, truncation)


@functools.partial(jax.jit, static_argnums=2)
def _sample(logits, keys, truncation):
    return sample_tokens(logits, keys, truncation, kept_tokens(logits, truncation))


_kept = jax.jit(kept_tokens, static_argnums=1)


def _inputs(num_rows=_M, dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((num_rows, _D)).astype(dtype)
    return hidden, rng.standard_normal((_V, _D)).astype(np.float32), rng.integers(0, _V, num_rows).astype(np.int32)


def _log(*probs):
    with np.errstate(divide="ignore"):
        return np.log(np.float32([probs]))


def _exact_log_probs(logits, truncation):
    """Float64 [M, V] log-probs, -inf where a token is dropped, by the words of the convention."""
    logits = np.asarray(logits, np.float64) / (truncation.temperature or 1.0)
    result = np.full(logits.shape, -np.inf)
    for row, out in zip(logits, result, strict=True):
        order = np.argsort(-row, kind="stable")
        if not truncation.greedy:
            order = order[: truncation.top_k] if truncation.top_k > 0 else order
            probs = np.exp(row[order] - row[order[0]])
            before = np.cumsum(probs / probs.sum()) - probs / probs.sum()
            order = order[before < truncation.top_p]
        out[order] = row[order] - row[order[0]] - np.log(np.exp(row[order] - row[order[0]]).sum())
    return result


@pytest.mark.parametrize("truncation", _EACH, ids=str)
def test_values(truncation):
    logits = (np.random.default_rng(1).standard_normal((33, _V)) * 3).astype(np.float32)
    exact = _exact_log_probs(logits, truncation)
    tokens = np.argmax(np.where(np.isfinite(exact), np.random.default_rng(2).random(exact.shape), -1), axis=1).astype(np.int32)
    log_probs, entropy = _of_logits(logits, tokens, truncation)
    assert log_probs.dtype == entropy.dtype == jnp.float32
    # Numbers up to 20 nats: float32 holds them to 2^-20.
    np.testing.assert_allclose(log_probs, np.take_along_axis(exact, tokens[:, None], 1)[:, 0], rtol=0, atol=2e-6)
    finite = np.where(np.isfinite(exact), exact, 0)
    np.testing.assert_allclose(entropy, -(np.exp(exact) * finite).sum(axis=1), rtol=0, atol=4e-6)
    dropped = np.argmin(exact, axis=1).astype(np.int32)
    log_probs, _ = _of_logits(logits, dropped, truncation)
    np.testing.assert_array_equal(np.isneginf(log_probs), np.isneginf(exact.min(axis=1)))


def test_log_softmax_over_a_real_vocabulary_is_float32():
    log_prob, entropy = _of_logits(np.full((1, 151936), 3.25, np.float32), np.zeros(1, np.int32), Truncation())
    np.testing.assert_allclose(log_prob, [-11.931215], atol=2e-6)  # bfloat16: -11.9375
    np.testing.assert_allclose(entropy, [11.931215], atol=2e-6)


def test_temperature():
    logits, token = np.float32([[2, 0]]), np.zeros(1, np.int32)
    np.testing.assert_allclose(_of_logits(logits, token, Truncation(temperature=0.5))[0], [-0.018150], atol=1e-6)
    # Greedy: the log-prob at temperature 1, not the NaN of a division by 0.
    np.testing.assert_allclose(_of_logits(logits, token, Truncation(temperature=0.0))[0], [-0.126928], atol=1e-6)


def test_greedy_takes_the_largest_and_the_lower_of_two():
    logits = np.float32([[0, 5, 5, 1], [9, -1, 9, 9], [-3, -2, -4, -1]])
    keys = jax.random.split(jax.random.key(0), 3)
    np.testing.assert_array_equal(_sample(logits, keys, Truncation(temperature=0.0)), [1, 0, 3])
    # Truncation does not apply to greedy decoding, whatever its numbers.
    entropy = _of_logits(logits, np.zeros(3, np.int32), Truncation(temperature=0.0, top_k=1, top_p=0.1))[1]
    assert (np.asarray(entropy) > 0).all()


@pytest.mark.parametrize(
    "options, counts",
    [
        (dict(top_p=0.8), {3}), (dict(top_p=0.1), {1}), (dict(top_p=1.0), {4}),
        (dict(top_p=0.7), {2, 3}),  # float32: 0.4 + 0.3 may fall just short of 0.7
        (dict(top_k=1, top_p=0.8, temperature=0.01), {1}), (dict(top_p=1e-9), {1}),
        (dict(top_k=0), {4}), (dict(top_k=-1), {4}), (dict(top_k=5), {4}), (dict(top_k=5, top_p=0.8), {3}), (dict(top_k=2), {2}),
    ],
    ids=str,
)  # fmt: skip
def test_boundaries(options, counts):
    kept = _kept(_log(0.4, 0.3, 0.2, 0.1), Truncation(**options))
    if kept is None:
        assert counts == {4}
        return
    count = int(kept.sum())
    assert count in counts
    np.testing.assert_array_equal(kept[0], np.arange(4) < count)


def test_ties_at_the_cut_keep_exactly_k_the_lower_index_first():
    logits = np.concatenate([_log(0.4, 0.3, 0.3, 0.0), _log(0.1, 0.3, 0.3, 0.3)])
    np.testing.assert_array_equal(_kept(logits, Truncation(top_k=2)), [[True, True, False, False], [False, True, True, False]])
    np.testing.assert_array_equal(np.sum(_kept(logits, Truncation(top_p=0.5)), axis=1), [2, 2])


@pytest.mark.parametrize("truncation", [Truncation(top_k=2), Truncation(top_p=0.5), Truncation(temperature=0.7)], ids=str)
def test_a_logit_that_is_not_a_number_shows(truncation):
    logits = np.tile(_log(0.4, 0.3, 0.2, 0.1), (3, 1))
    logits[1, 3] = np.nan
    log_probs, entropy = _of_logits(logits, np.zeros(3, np.int32), truncation)
    np.testing.assert_array_equal(np.isnan(log_probs), [False, True, False])
    np.testing.assert_array_equal(np.isnan(entropy), [False, True, False])


@pytest.mark.parametrize(
    "truncation", [pytest.param(Truncation(), marks=pytest.mark.slow), Truncation(temperature=2.0, top_k=3, top_p=0.8)], ids=str
)
def test_frequencies_of_100000_draws(truncation):
    draws = 100_000
    logits = _log(0.4, 0.1, 0.3, 0.2)
    keys = jax.random.split(jax.random.key(7), draws)
    tokens = np.asarray(_sample(np.tile(logits, (draws, 1)), keys, truncation))
    expected = np.exp(_exact_log_probs(logits, truncation))[0]
    # Five standard deviations of a frequency; a token that is dropped never occurs.
    assert (np.abs(np.bincount(tokens, minlength=4) / draws - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()


@pytest.mark.slow
def test_draws_from_many_equal_logits_do_not_repeat():
    keys = jax.random.split(jax.random.key(3), 2048)
    tokens = jax.jit(lambda keys: sample_tokens(jnp.zeros((2048, 50_000)), keys, Truncation(), None))(keys)
    assert 1960 < len(np.unique(tokens)) < 2048  # 2007 expected; noise in bfloat16 gives 441


@pytest.mark.parametrize("truncation", _EACH, ids=str)
def test_in_chunks_and_from_logits_the_bits_are_the_same(assert_same_bits, truncation):
    hidden, head, tokens = _inputs()
    in_chunks = jax.tree.map(np.asarray, _of_hidden(hidden, tokens, truncation, head))
    logits = jax.jit(functools.partial(matmul, out_dtype=jnp.float32))(hidden, head)
    assert_same_bits(_of_logits(logits, tokens, truncation), in_chunks)  # all rows at once, as the sampler does
    sampled = _sample(logits, jax.random.split(jax.random.key(1), _M), truncation)
    assert np.isfinite(_of_logits(logits, sampled, truncation)[0]).all()


@pytest.mark.parametrize(
    "truncation", [_TRUNCATIONS[1], pytest.param(_TRUNCATIONS[0], marks=pytest.mark.slow),
                   pytest.param(_TRUNCATIONS[5], marks=pytest.mark.slow)], ids=str
)  # fmt: skip
def test_rows(check_rows, truncation):
    hidden, head, tokens = _inputs(130, jnp.bfloat16)
    check_rows(lambda rows: token_log_prob(rows[0], jnp.asarray(head), rows[1], truncation), (hidden, tokens))


def test_kept_tokens_by_a_full_sort():
    """Top-k alone does not sort: the same tokens as a sort of the whole vocabulary keeps, with equals, zeros of both signs,
    infinities and NaN."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((12, _V)).astype(np.float32)
    logits[0], logits[1], logits[2, 3] = 0.0, np.round(logits[1]), np.nan
    logits[3, ::2], logits[4, 5], logits[5] = -np.inf, np.inf, np.nan
    logits[6] = np.where(rng.random(_V) < 0.5, 0.0, -0.0)
    logits[7, 1:] = -np.inf
    for top_k in (1, 7):
        order = np.argsort(-logits, axis=1, kind="stable")
        wanted = np.zeros(logits.shape, bool)
        np.put_along_axis(wanted, order[:, :top_k], True, axis=1)
        np.testing.assert_array_equal(_kept(logits, Truncation(top_k=top_k)), wanted | np.isnan(logits))
    alone = np.concatenate([_kept(logits[i : i + 1], Truncation(top_p=0.7)) for i in range(12)])
    np.testing.assert_array_equal(alone, _kept(logits, Truncation(top_p=0.7)))


@pytest.mark.slow
def test_rows_of_sampling(check_rows):
    logits = np.random.default_rng(4).standard_normal((130, _V)).astype(np.float32)
    key_data = jax.random.key_data(jax.random.split(jax.random.key(5), 130))
    truncation = Truncation(temperature=0.9, top_p=0.9)

    def sample(rows):
        kept = kept_tokens(rows[0], truncation)
        return sample_tokens(rows[0], jax.random.wrap_key_data(rows[1]), truncation, kept)

    check_rows(sample, (logits, key_data), differentiable=False)


@pytest.mark.parametrize("truncation", _EACH, ids=str)
def test_gradients_of_log_prob_and_entropy(truncation):
    hidden, head, tokens = _inputs()
    g = np.random.default_rng(6).standard_normal((2, _M)).astype(np.float32)
    logits = hidden @ head.T
    kept = _kept(logits, truncation)
    if kept is not None:
        tokens = np.argmax(logits, axis=1).astype(np.int32)  # a token that is kept
    temperature = truncation.temperature or 1.0

    def plain(hidden, head):
        logits = hidden @ head.T / temperature
        log_probs = jax.nn.log_softmax(logits if kept is None else jnp.where(kept, logits, -jnp.inf), axis=-1)
        entropy = -jnp.sum(jnp.exp(log_probs) * jnp.where(jnp.isfinite(log_probs), log_probs, 0), axis=-1)
        return log_probs[jnp.arange(_M), tokens], entropy

    def ours(hidden, master):
        return token_log_prob(hidden, jnp.asarray(head), jnp.asarray(tokens), truncation, head_master=master)

    of = lambda op: jax.jit(lambda hidden, head, g: jax.vjp(op, hidden, head)[1]((g[0], g[1])))  # noqa: E731
    expected = of(plain)(hidden, head, g)
    actual = of(ours)(hidden, np.full_like(head, np.nan), g)  # the master's values are not read
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)  # float32 sums of 40 (hidden) and 300 (head) terms


def test_a_sampler_asks_for_no_gradient_of_the_head():
    hidden, head, tokens = _inputs(4)
    head, tokens = jnp.asarray(head), jnp.asarray(tokens)
    gradient = jax.jit(jax.grad(lambda hidden: jnp.sum(token_log_prob(hidden, head, tokens, Truncation())[0])))
    assert np.isfinite(gradient(hidden)).all()


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="temperature=-1.0 must be 0"):
        Truncation(temperature=-1.0)
    with pytest.raises(ValueError, match="temperature=nan"):
        Truncation(temperature=float("nan"))
    for top_p in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            Truncation(top_p=top_p)
    with pytest.raises(ValueError, match="must agree in their last axis"):
        token_log_prob(jnp.ones((2, 16)), jnp.ones((3, 32)), jnp.zeros(2, jnp.int32), Truncation())
