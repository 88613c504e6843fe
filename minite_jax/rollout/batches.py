"""Batches for the learner: demonstrations for supervised training, rewarded rollouts for reinforcement learning."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from minite_jax.learner.advantages import group_advantages
from minite_jax.learner.update import Batch
from minite_jax.sampler.requests import padded_length
from minite_jax.sampler.sampling import Rollouts
from minite_jax.tasks.base import Example, Task


def choose_problems(task: Task, split: str, count: int, *, seed: int, step: int) -> list[Example]:
    """Draws a step's problems without replacement. They depend on (seed, step) alone, so a resumed run draws the same.

    Raises:
      ValueError: more problems than the split has.
    """
    size = task.size(split)
    if count > size:
        raise ValueError(f"{count} problems asked of split {split!r}, which has {size}")
    indices = np.random.default_rng([seed, step]).choice(size, count, replace=False)
    return [task.example(split, int(i)) for i in indices]


def demonstration_batch(task: Task, examples: Sequence[Example]) -> Batch:
    """A supervised batch of fixed shape: prompts and demonstrations joined, the mask on the demonstrations' tokens."""
    pairs = [(task.encode(e.prompt), task.encode(e.demonstration)) for e in examples]
    length = padded_length(task.max_prompt_tokens) + task.max_completion_tokens
    tokens_BT = np.zeros((len(pairs), length), np.int32)
    mask_BT = np.zeros(tokens_BT.shape, bool)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        tokens_BT[row, :end] = prompt + completion
        mask_BT[row, len(prompt) : end] = True
    return Batch(tokens=jnp.asarray(tokens_BT), mask=jnp.asarray(mask_BT[:, 1:]))


def reward_rollouts(task: Task, examples: Sequence[Example], rollouts: Rollouts) -> np.ndarray:
    """Rewards [P, G] float32 of prompt-major rollouts."""
    completions = rollouts.completions()
    per_prompt = len(completions) // len(examples)
    rewards = [task.reward(examples[i // per_prompt], completion) for i, completion in enumerate(completions)]
    return np.asarray(rewards, np.float32).reshape(len(examples), per_prompt)


def rollout_batch(rollouts: Rollouts, rewards: np.ndarray, *, normalize: bool = True) -> Batch:
    """A GRPO batch from rollouts and rewards [P, G]: the sampled ids themselves, never text encoded again."""
    tokens_BT, mask_BT, log_probs_BT = rollouts.sequences()
    advantages_PG = group_advantages(jnp.asarray(rewards), normalize=normalize)
    return Batch(tokens=tokens_BT, mask=mask_BT, sampler_log_probs=log_probs_BT, advantages=advantages_PG.reshape(-1))
