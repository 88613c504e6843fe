"""Checkpoints of a run: whole or not there at all, and never restored into something they do not fit."""

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.store import has_only_leftovers, latest_step, read_config, restore, save, steps

__all__ = ["CheckpointError", "has_only_leftovers", "latest_step", "read_config", "restore", "save", "steps"]
