"""Which implementation of an operation runs: explicit, printed once, never a silent fallback."""

import functools
import logging

import jax

IMPLEMENTATIONS = ("reference",)

_logger = logging.getLogger("pallas_kernels")


@functools.cache
def _announce(op: str, implementation: str, platform: str) -> None:
    _logger.info("%s: %s implementation on %s", op, implementation, platform)


def resolve(op: str, implementation: str | None) -> str:
    """Returns the name of the implementation of `op` that will run, and logs it the first time.

    Args:
      op: name of the operation, for the log and the error.
      implementation: a name from `IMPLEMENTATIONS`, or None for the default of the platform.

    Raises:
      NotImplementedError: the operation has no such implementation.
    """
    platform = jax.default_backend()
    chosen = implementation or "reference"
    if chosen not in IMPLEMENTATIONS:
        raise NotImplementedError(f"{op}: no implementation {chosen!r} on {platform}; there is {', '.join(IMPLEMENTATIONS)}")
    _announce(op, chosen, platform)
    return chosen
