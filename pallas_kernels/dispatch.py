"""Which implementation of an operation runs: explicit, printed once, never a silent fallback.

"reference": plain jnp, the specification, on every device. "triton": kernels for NVIDIA GPUs. "mosaic": Pallas kernels for
Hopper, which the matmuls of bfloat16 and E4M3 have. The default is a kernel on a GPU and "reference" elsewhere; `prefer` changes
it for a whole program, and every operation takes ``implementation=``.
"""

import functools
import importlib
import logging
from types import ModuleType

import jax

IMPLEMENTATIONS = ("reference", "triton", "mosaic")

_logger = logging.getLogger("pallas_kernels")
_preferred: str | None = None


def prefer(implementation: str | None) -> None:
    """Sets the implementation of every operation that is traced from now on and names none; None: the platform's default.

    Call it before anything is compiled: compiled programs stay as they are.

    Raises:
      ValueError: no such implementation.
    """
    global _preferred
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    _preferred = implementation


@functools.cache
def _announce(op: str, implementation: str, platform: str) -> None:
    _logger.info("%s: %s implementation on %s", op, implementation, platform)


def resolve(
    op: str, implementation: str | None, available: tuple[str, ...] = ("reference", "triton"), *, gpu_default: str = "triton"
) -> str:
    """Returns the name of the implementation of `op` that will run, and logs it the first time.

    Args:
      op: name of the operation, with shape and type where these decide, for the log and the error.
      implementation: a name from `IMPLEMENTATIONS`, or None for the preferred one.
      available: implementations that `op` has. One that has no kernel runs as the reference, and the log says so.
      gpu_default: what runs on a GPU where nobody names anything.

    Raises:
      NotImplementedError: the operation has no such implementation, or it does not run on this platform.
    """
    platform = jax.default_backend()
    chosen = implementation or _preferred or (gpu_default if platform == "gpu" else "reference")
    if implementation is None and chosen not in available:
        # A preference for one kind of kernel means a kernel where there is only the other kind.
        chosen = "triton" if chosen == "mosaic" and "triton" in available else available[0]
    if chosen not in available:
        raise NotImplementedError(f"{op}: no implementation {chosen!r}; there is {', '.join(available)}")
    if chosen != "reference" and platform != "gpu":
        raise NotImplementedError(f"{op}: the {chosen} implementation needs a GPU, this is {platform}; choose 'reference'")
    _announce(op, chosen, platform)
    return chosen


def module(package: str, implementation: str) -> ModuleType:
    """The module of an operation's package that holds an implementation; imported here, so that Triton is where it is used."""
    return importlib.import_module(f"{package}.{implementation}")
