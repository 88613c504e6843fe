"""The naive engine is sound, close to the aligned policy, and has the fault that it is there to show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from experiments.baselines import naive_engine
from minite_jax.diagnostics.gap import gap_metrics
from minite_jax.model.config import tiny_dense, tiny_moe
from minite_jax.sampler.requests import pad_prompts
from minite_jax.sampler.sampling import FINISH_LENGTH, FINISH_STOP

pytestmark = pytest.mark.timeout(1200)  # programs compile for minutes on a machine with other load

_MOE = tiny_moe(num_hidden_layers=1, vocab_size=32)
_DENSE = tiny_dense(num_hidden_layers=1, vocab_size=32, tie_word_embeddings=False)
_PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 3, 21, 22, 1]]
_SAMPLING = mt.SamplingParams(n=4, max_tokens=6, stop_ids=(2, 3))


@functools.cache
def _params(config):
    return mt.init_params(config, jax.random.key(0))


@functools.cache
def _policy(config, recipe_name):
    return mt.prepare(_params(config), config, mt.recipe(recipe_name))


def _naive(config, recipe_name, sampling, prompts=_PROMPTS):
    tokens_PL, length_P = pad_prompts(prompts, config.vocab_size)
    return naive_engine.generate(
        _params(config), config, mt.recipe(recipe_name), jnp.asarray(tokens_PL), jnp.asarray(length_P),
        jnp.arange(len(prompts), dtype=jnp.uint32), jax.random.key(7), sampling,
    )  # fmt: skip


def _aligned(config, recipe_name, sampling, prompts=_PROMPTS):
    return mt.sample(_policy(config, recipe_name), prompts, sampling, key=jax.random.key(7))


@pytest.mark.slow
def test_in_float32_it_draws_the_tokens_of_the_aligned_sampler():
    """Same weights, same random numbers, same convention: what is left is the order of float32 sums."""
    sampling = mt.SamplingParams(n=4, max_tokens=6, stop_ids=(2, 3), temperature=0.7)
    naive, aligned = _naive(_MOE, "fp32", sampling), _aligned(_MOE, "fp32", sampling)
    for name in ("tokens", "mask", "finish_reason", "prompt_tokens", "prompt_length"):
        np.testing.assert_array_equal(getattr(naive, name), getattr(aligned, name), err_msg=name)
        assert getattr(naive, name).dtype == getattr(aligned, name).dtype
    # Logits of size 4, a few roundings of 2^-24 each: 1e-6 measured. A wrong operation gives 0.1 and more.
    np.testing.assert_allclose(naive.log_probs, aligned.log_probs, rtol=0, atol=3e-5)


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(2, 1.0, [1, 3]), (0, 0.5, [1]), (0, 0.75, [1, 3]), (3, 0.99, [1, 2, 3])])
def test_truncation_keeps_the_most_probable(top_k, top_p, kept):
    """Probabilities 0.1, 0.6, 0.1 + a little, 0.2 at temperature 2."""
    logits_BV = 2.0 * jnp.log(jnp.asarray([[0.1, 0.6, 0.101, 0.2]]))
    sampling = mt.SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p)
    truncated_BV = naive_engine._truncated(logits_BV, sampling)
    assert np.flatnonzero(truncated_BV[0] > -jnp.inf).tolist() == kept
    np.testing.assert_array_equal(truncated_BV[0, jnp.asarray(kept)], (logits_BV / 2.0)[0, jnp.asarray(kept)])


@pytest.mark.slow
def test_greedy_takes_the_aligned_policys_choice_for_most_tokens():
    """Bfloat16 logits of the two differ by about 0.01, the two largest of 32 by about 0.4: few choices differ."""
    sampling = mt.SamplingParams(n=1, max_tokens=6, temperature=0.0)
    prompts = [[i, 31 - i, 7] for i in range(4, 20)]
    tokens_BT, mask_BT, _ = _naive(_DENSE, "bf16", sampling, prompts).sequences()
    choice_BT = jnp.argmax(mt.forward(_policy(_DENSE, "bf16"), tokens_BT), axis=-1)[:, :-1]
    assert mask_BT.sum() == 16 * 6
    assert np.mean(np.asarray(choice_BT == tokens_BT[:, 1:])[np.asarray(mask_BT)]) > 0.9


@pytest.mark.slow
def test_rollouts_end_with_a_stop_token_or_at_the_length():
    rollouts = _naive(_DENSE, "nvfp4", _SAMPLING)
    assert rollouts.tokens.shape == (16, 6)
    np.testing.assert_array_equal(rollouts.prompt_length, np.repeat([3, 1, 9, 5], 4))
    mask_BC, log_probs_BC = np.asarray(rollouts.mask), np.asarray(rollouts.log_probs)
    reasons = np.asarray(rollouts.finish_reason)
    assert set(reasons) == {FINISH_STOP, FINISH_LENGTH}, "the seed must show both ends"
    for completion, reason, mask_C in zip(rollouts.completions(), reasons, mask_BC, strict=True):
        assert mask_C[: len(completion)].all() and not mask_C[len(completion) :].any()
        assert not set(completion[:-1]) & set(_SAMPLING.stop_ids)
        assert (completion[-1] in _SAMPLING.stop_ids) == (reason == FINISH_STOP)
        assert reason == FINISH_STOP or len(completion) == _SAMPLING.max_tokens
    assert (np.asarray(rollouts.tokens)[~mask_BC] == 0).all() and (log_probs_BC[~mask_BC] == 0).all()
    assert np.isfinite(log_probs_BC).all() and (log_probs_BC[mask_BC] < 0).all()


@pytest.mark.slow
def test_gap_to_the_aligned_policy_is_above_zero_and_bounded():
    """Rounding an operand to 4 bits has a relative squared error of 0.009, and the engines round differently:
    two operands, two engines and four matmuls in a row give 0.14, that is 0.4 of a logit of deviation 1.
    Unrelated logits would differ by more than 1.1 on average.
    """
    tokens_BT, mask_BT, log_probs_BT = _naive(_DENSE, "nvfp4", _SAMPLING).sequences()
    trained_BT = mt.token_log_probs(_policy(_DENSE, "nvfp4"), tokens_BT, _SAMPLING.truncation)
    gap = gap_metrics(trained_BT, log_probs_BT, mask_BT)
    assert 0.01 < gap["train_rollout_logprob_abs_diff/mean"] < 0.6
    assert gap["train_rollout_logprob_abs_diff/exact_fraction"] < 0.1


@pytest.mark.parametrize(
    ("engine", "depends"), [(_naive, True), pytest.param(_aligned, False, marks=pytest.mark.slow)], ids=["naive", "aligned"]
)
def test_only_the_naive_engine_feels_a_neighbour(engine, depends):
    """Another first prompt, of another length: do the other prompts' rollouts change?"""
    before = engine(_DENSE, "nvfp4", _SAMPLING)
    after = engine(_DENSE, "nvfp4", _SAMPLING, [[30, 29, 28, 27], *_PROMPTS[1:]])
    others = slice(_SAMPLING.n, None)
    difference = np.max(np.abs(np.asarray(before.log_probs)[others] - np.asarray(after.log_probs)[others]))
    assert difference > 1e-4 if depends else difference == 0


def test_recipe_that_quantises_nothing_is_refused():
    with pytest.raises(ValueError, match="nvfp4_experts quantises nothing"):
        _naive(_DENSE, "nvfp4_experts", _SAMPLING)
