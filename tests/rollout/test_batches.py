"""Batches: which column belongs to which token, what the masks hold, and that the sampled ids themselves are trained on."""

import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.rollout import choose_problems, demonstration_batch, reward_rollouts, rollout_batch
from minite_jax.sampler import FINISH_LENGTH, FINISH_STOP, Rollouts
from minite_jax.sampler.requests import pad_prompts
from minite_jax.tasks import DigitSum, Example


@pytest.fixture(scope="module")
def task():
    return DigitSum(num_digits=3)


def test_problems_depend_on_seed_and_step_alone(task):
    chosen = choose_problems(task, "rl", 30, seed=1, step=5)
    assert chosen == choose_problems(DigitSum(num_digits=3), "rl", 30, seed=1, step=5)
    assert len({example.prompt for example in chosen}) == 30  # without replacement
    others = [choose_problems(task, "rl", 30, seed=s, step=t) for s, t in ((1, 6), (2, 5), (5, 1))]
    assert all(other != chosen for other in others)
    rl = {task.example("rl", i).prompt for i in range(task.size("rl"))}
    assert {example.prompt for example in chosen} <= rl


def test_a_whole_split_and_no_more(task):
    assert len({e.prompt for e in choose_problems(task, "heldout", 200, seed=0, step=0)}) == 200
    with pytest.raises(ValueError, match="201 problems asked of split 'heldout', which has 200"):
        choose_problems(task, "heldout", 201, seed=0, step=0)


def test_demonstrations(task):
    examples = [Example("123?", "=6.", "6"), Example("999?", "987=7.", "7")]
    batch = demonstration_batch(task, examples)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    assert tokens.shape == (2, 8 + task.max_completion_tokens) and tokens.dtype == np.int32
    assert mask.shape == (2, tokens.shape[1] - 1) and mask.dtype == bool
    assert batch.sampler_log_probs is None and batch.advantages is None
    for row, text in enumerate(("123?=6.", "999?987=7.")):
        assert bytes(tokens[row, : len(text)].tolist()).decode() == text
        assert not tokens[row, len(text) :].any()
        # Column t belongs to token t + 1: the demonstration's tokens, the end mark included, and nothing else.
        assert bytes(tokens[row, 1:][mask[row]].tolist()).decode() == text[4:]
        np.testing.assert_array_equal(np.flatnonzero(mask[row]), np.arange(3, len(text) - 1))


def test_demonstrations_of_every_choice_have_one_shape(task):
    shapes = {demonstration_batch(task, choose_problems(task, "sft", 4, seed=0, step=t)).tokens.shape for t in range(5)}
    assert len(shapes) == 1


def _rollouts(completions, prompts, max_tokens, finish):
    """What a sampler returns for given completions; log-prob j of rollout i is -(10 i + j + 1) / 100."""
    batch = len(completions)
    tokens, log_probs = np.zeros((batch, max_tokens), np.int32), np.zeros((batch, max_tokens), np.float32)
    mask = np.zeros((batch, max_tokens), bool)
    prompt_tokens = np.zeros((batch, 8), np.int32)
    for i, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        tokens[i, : len(completion)] = completion
        mask[i, : len(completion)] = True
        log_probs[i, : len(completion)] = -(10 * i + np.arange(len(completion)) + 1) / 100
        prompt_tokens[i, : len(prompt)] = prompt
    return Rollouts(
        tokens=jnp.asarray(tokens), log_probs=jnp.asarray(log_probs), mask=jnp.asarray(mask),
        finish_reason=jnp.asarray(finish, jnp.int32), prompt_tokens=jnp.asarray(prompt_tokens),
        prompt_length=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
    )  # fmt: skip


def test_rewards_go_to_their_prompt(task):
    examples = [Example("123?", "=6.", "6"), Example("999?", "=7.", "7")]
    texts = ["=6.", "=7.", "=6", "=7.", "=6.", "777=7."]  # three per prompt
    rollouts = _rollouts([task.encode(t) for t in texts], [task.encode("123?")] * 3 + [task.encode("999?")] * 3, 8, [0] * 6)
    rewards = reward_rollouts(task, examples, rollouts)
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [[1, 0, 0], [1, 0, 1]])


def test_a_rollout_batch_trains_on_the_sampled_ids():
    # Bytes that are no UTF-8: decoding and encoding again would change them. Prompts of unequal length; one rollout is cut short.
    completions = [[0xFF, 0xC3, 46], [46], [61, 50, 61, 50], [0xC3, 0xA9, 46]]
    prompts = [[49, 50, 63]] * 2 + [[49, 50, 51, 52, 63]] * 2
    rollouts = _rollouts(completions, prompts, 4, [FINISH_STOP, FINISH_STOP, FINISH_LENGTH, FINISH_STOP])
    batch = rollout_batch(rollouts, np.float32([[1, 0], [0.5, 0.5]]))
    tokens, mask, log_probs = (np.asarray(x) for x in (batch.tokens, batch.mask, batch.sampler_log_probs))
    assert tokens.shape == (4, 12) and mask.shape == log_probs.shape == (4, 11)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        np.testing.assert_array_equal(tokens[i, : len(prompt + completion)], prompt + completion)
        assert not tokens[i, len(prompt + completion) :].any()
        first = len(prompt) - 1  # the first completion token is scored from the last prompt token
        np.testing.assert_array_equal(np.flatnonzero(mask[i]), np.arange(first, first + len(completion)))
        np.testing.assert_array_equal(log_probs[i][mask[i]], np.float32(-(10 * i + np.arange(len(completion)) + 1) / 100))
        assert not log_probs[i][~mask[i]].any()
    np.testing.assert_allclose(batch.advantages, [1, -1, 0, 0], atol=1e-6)


def test_advantages_can_stay_unnormalised():
    rollouts = _rollouts([[46]] * 4, [[63]] * 4, 1, [FINISH_STOP] * 4)
    batch = rollout_batch(rollouts, np.float32([[1, 0, 0, 0]]), normalize=False)
    np.testing.assert_allclose(batch.advantages, [0.75, -0.25, -0.25, -0.25])


def test_prompts_of_other_lengths_have_one_shape_where_there_is_room():
    task = DigitSum(num_digits=3, max_shots=4)
    shapes, lengths = set(), set()
    for step in range(8):
        prompts = [task.encode(e.prompt) for e in choose_problems(task, "rl", 2, seed=0, step=step)]
        tokens, length = pad_prompts(prompts, 256, room=task.max_prompt_tokens)
        assert length.tolist() == [len(prompt) for prompt in prompts]
        assert [row[:n].tolist() for row, n in zip(tokens, length, strict=True)] == prompts
        shapes.add(tokens.shape)
        lengths.add(pad_prompts(prompts, 256)[0].shape)
    assert shapes == {(2, 48)} and len(lengths) > 1  # 44 tokens at most
