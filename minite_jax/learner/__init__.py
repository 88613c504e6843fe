"""Advantages, losses and the one jitted update."""

from minite_jax.learner.advantages import group_advantages
from minite_jax.learner.losses import grpo_loss, kl_k3, negative_log_likelihood
from minite_jax.learner.update import Batch, OptimizerConfig, TrainState, init_state, make_optimizer, make_update, schedule

__all__ = [
    "Batch", "OptimizerConfig", "TrainState", "group_advantages", "grpo_loss", "init_state", "kl_k3", "make_optimizer",
    "make_update", "negative_log_likelihood", "schedule",
]  # fmt: skip
