"""The error of this package."""

from minite_jax.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, is missing or damaged, or does not fit where it should go."""
