"""From problems to training batches."""

from minite_jax.rollout.batches import choose_problems, demonstration_batch, reward_rollouts, rollout_batch
from minite_jax.rollout.packing import PackedSequences, pack_sequences

__all__ = [
    "PackedSequences", "choose_problems", "demonstration_batch", "pack_sequences", "reward_rollouts", "rollout_batch",
]  # fmt: skip
