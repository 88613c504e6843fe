"""What is sampled: temperature, top-k, top-p, and randomness that does not run short."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits, sample_tokens

FOUR = (0.4, 0.3, 0.2, 0.1)


def _logits(probabilities):
    return jnp.log(jnp.asarray([probabilities], jnp.float32))


def _kept(probabilities, **fields):
    kept = kept_tokens(_logits(probabilities), Truncation(**fields))
    return [True] * len(probabilities) if kept is None else np.asarray(kept)[0].tolist()


@pytest.mark.parametrize(
    ("probabilities", "fields", "count"),
    [
        (FOUR, dict(top_p=0.8), 3),
        # 0.4 + 0.3 in float32 lies above 0.7 or below it; the sums of this implementation reach it.
        (FOUR, dict(top_p=0.7), 2),
        (FOUR, dict(top_p=0.1), 1),
        (FOUR, dict(top_p=1.0), 4),
        (FOUR, dict(top_p=0.8, top_k=1, temperature=0.01), 1),
        (FOUR, dict(top_k=0), 4),
        (FOUR, dict(top_k=-1), 4),
        (FOUR, dict(top_k=5), 4),
        (FOUR, dict(top_k=4), 4),
        ((0.4, 0.3, 0.3, 0.0), dict(top_k=2), 2),
        # Top-p counts what top-k left: 0.4 / 0.7 reaches 0.5.
        (FOUR, dict(top_k=2, top_p=0.5), 1),
    ],
)
def test_how_many_tokens_are_kept(probabilities, fields, count):
    """H20. Falling order, ties to the lower index."""
    assert _kept(probabilities, **fields) == [True] * count + [False] * (len(probabilities) - count)


def test_the_kept_are_the_most_probable_wherever_they_lie():
    assert _kept((0.1, 0.4, 0.2, 0.3), top_k=2) == [False, True, False, True]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (dict(), FOUR),
        (dict(top_p=0.8), (4 / 9, 3 / 9, 2 / 9, 0)),
        (dict(top_k=2), (4 / 7, 3 / 7, 0, 0)),
        (dict(temperature=0.5), (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
        (dict(temperature=0.0), (1, 0, 0, 0)),
    ],
)
def test_frequencies_are_the_probabilities_that_are_reported(fields, wanted):
    """H20: 100,000 draws, each with its own key; and the log-probs that go with them."""
    draws, truncation = 100_000, Truncation(**fields)

    @jax.jit
    def draw(keys):
        logits = jnp.broadcast_to(_logits(FOUR), (draws, 4))
        return sample_tokens(logits, keys, truncation, kept_tokens(logits, truncation))

    tokens = np.asarray(draw(jax.random.split(jax.random.key(0), draws)))
    wanted = np.asarray(wanted)
    # Four standard deviations.
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / draws, wanted, atol=1e-9 + 4 * np.sqrt(0.25 / draws))
    assert (np.bincount(tokens, minlength=4)[wanted == 0] == 0).all()
    if not truncation.greedy:
        logits = jnp.broadcast_to(_logits(FOUR), (4, 4))
        log_probs, _ = log_prob_of_logits(logits, jnp.arange(4), truncation, kept_tokens(logits, truncation))
        np.testing.assert_allclose(np.exp(log_probs), wanted, rtol=1e-6)


def test_temperature_divides_logits_before_the_softmax():
    """H19: logits [2, 0], T = 0.5. Raw logits would give -0.126928, the log-prob divided by T -0.253856."""
    log_prob, _ = log_prob_of_logits(jnp.asarray([[2.0, 0.0]]), jnp.asarray([0]), Truncation(temperature=0.5), None)
    assert float(log_prob[0]) == pytest.approx(-0.018150, abs=1e-6)


def test_the_smallest_temperature_is_finite_and_takes_the_largest_logit():
    """At 2^-126 logits of 5 are infinite, all of them alike."""
    logits, cold = jnp.asarray([[-90.0, 60.0, 60.5, 60.25]]), Truncation(temperature=2.0**-100)
    token = sample_tokens(logits, jax.random.split(jax.random.key(0), 1), cold, None)
    log_prob, entropy = log_prob_of_logits(logits, token, cold, None)
    assert (token.tolist(), log_prob.tolist(), entropy.tolist()) == ([2], [0.0], [0.0])


def test_greedy_is_finite_and_ties_go_to_the_lower_index():
    logits, greedy = jnp.asarray([[0.0, 1.0, 1.0]]), Truncation(temperature=0.0)
    token = sample_tokens(logits, jax.random.split(jax.random.key(0), 1), greedy, None)
    log_prob, entropy = log_prob_of_logits(logits, token, greedy, None)
    assert token.tolist() == [1]
    assert float(log_prob[0]) == pytest.approx(np.log(np.e / (1 + 2 * np.e)), abs=1e-6) and np.isfinite(entropy[0])


@pytest.mark.parametrize("draws", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_noise_has_enough_values_for_a_large_vocabulary(draws):
    """H21: draws from 50,000 equal logits. Of 2,048 about 2,007 are distinct; noise in bfloat16 gives 441."""
    rows, vocabulary = 256, 50_000
    draw = jax.jit(lambda keys: sample_tokens(jnp.zeros((rows, vocabulary)), keys, Truncation(), None))
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = np.concatenate([draw(keys[i : i + rows]) for i in range(0, draws, rows)])
    # Repeats are Poisson: draws^2 / (2 vocabulary) of them; four standard deviations.
    repeats = draws - vocabulary * (1 - np.exp(-draws / vocabulary))
    assert len(set(tokens.tolist())) == pytest.approx(draws - repeats, abs=4 * np.sqrt(repeats))
