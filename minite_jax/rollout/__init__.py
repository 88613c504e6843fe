"""From problems to training batches."""

from minite_jax.rollout.batches import choose_problems, demonstration_batch, reward_rollouts, rollout_batch

__all__ = ["choose_problems", "demonstration_batch", "reward_rollouts", "rollout_batch"]
