"""Held-out accuracy of a policy on a task."""

import dataclasses

import jax
import numpy as np

from experiments.build import Setup, sample_prompts
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.rollout import reward_rollouts

# Prompts of the greedy pass that are decoded at once.
_GREEDY_BATCH = 256


def held_out_prompts(setup: Setup, count: int) -> list[list[int]]:
    """Token ids of the first held-out problems' prompts.

    Raises:
      UserError: the task has fewer.
    """
    has = setup.task.size("heldout")
    if count > has:
        raise UserError(f"{count} held-out problems are asked for, and the run's task has {has}: ask for fewer")
    return [setup.task.encode(setup.task.example("heldout", i).prompt) for i in range(count)]


def evaluate(setup: Setup, policy, *, num_prompts: int, batch_prompts: int, seed: int) -> dict[str, float]:
    """Answers the first `num_prompts` held-out problems, greedily and by the run's own sampling parameters, with the one forward.

    Args:
      setup: see `build`.
      policy: the policy to judge.
      num_prompts: held-out problems.
      batch_prompts: problems per batch of the sampled pass; that of training, so that the compiled program is shared.
      seed: of the sampled pass.

    Returns:
      eval/accuracy_greedy, eval/accuracy_sampled and, for each trait of the task, eval/<trait> (share of sampled completions
      that show it) and eval/accuracy_<trait> (share of those that are right; NaN if none).
    """
    task = setup.task
    examples = [task.example("heldout", i) for i in range(num_prompts)]

    def run(sampling, batch, key):
        """Rewards [P, G] and completions, prompt-major."""
        rewards, completions = [], []
        for start in range(0, num_prompts, batch):
            chunk = examples[start : start + batch]
            filled = chunk + [chunk[0]] * (batch - len(chunk))  # one compiled shape; what fills up is not counted
            prompts = [task.encode(example.prompt) for example in filled]
            rollouts = sample_prompts(
                policy, None, prompts, jax.random.fold_in(key, start), sampling, "aligned", task.max_prompt_tokens
            )
            rewards.append(reward_rollouts(task, filled, rollouts)[: len(chunk)])
            completions += rollouts.completions()[: len(chunk) * sampling.n]
        return np.concatenate(rewards), completions

    greedy = dataclasses.replace(setup.sampling, n=1, temperature=0.0, top_k=0, top_p=1.0)
    key = jax.random.key(seed)
    greedy_rewards, _ = run(greedy, min(_GREEDY_BATCH, num_prompts), key)
    rewards, completions = run(setup.sampling, min(batch_prompts, num_prompts), key)
    metrics = {
        names.ACCURACY_GREEDY: float(greedy_rewards.mean()),
        names.ACCURACY_SAMPLED: float(rewards.mean()),
    }
    traits = [task.traits(completion) for completion in completions]
    for trait in traits[0]:
        shown = np.array([each[trait] for each in traits]) > 0
        metrics[f"eval/{trait}"] = float(shown.mean())
        metrics[f"eval/accuracy_{trait}"] = float(rewards.reshape(-1)[shown].mean()) if shown.any() else float("nan")
    return metrics
