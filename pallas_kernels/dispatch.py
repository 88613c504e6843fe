"""Which implementation of an operation runs: explicit, printed once, never a silent fallback.

"reference": plain jnp, the specification, on every device. "triton": kernels for NVIDIA GPUs. "mosaic": Pallas kernels for
Hopper, which the matmuls of bfloat16 and E4M3 have, and attention of packed rows in bfloat16. The default is a kernel on a GPU
and "reference" elsewhere; `prefer` changes it for a whole program, and every operation takes ``implementation=``.

`planned` lets a machine without a GPU trace the programs that a GPU would run, to look at them: their shapes, their memory.
"""

import contextlib
import contextvars
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import jax

IMPLEMENTATIONS = ("reference", "triton", "mosaic")

_logger = logging.getLogger("pallas_kernels")
_preferred: str | None = None
_planned: int | None = None


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


@contextlib.contextmanager
def planned(capability: int) -> Iterator[None]:
    """Within it programs are traced as a GPU of this compute capability (90, 100, 103) would run them, whatever is here.

    They can be traced and not run: kernels are operations without an implementation (`gpu.launch_p`). What JAX has traced is
    thrown away before and after, so that no program for the one device is taken for the other's.
    """
    global _planned
    jax.clear_caches()
    before, _planned = _planned, capability
    try:
        yield
    finally:
        _planned = before
        jax.clear_caches()


def planned_capability() -> int | None:
    """The compute capability that programs are planned for, None outside of `planned`."""
    return _planned


def platform() -> str:
    """What programs are traced for: "gpu", "cpu", ...: JAX's default backend, or "gpu" within `planned`."""
    return jax.default_backend() if _planned is None else "gpu"


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
    here = platform()
    chosen = implementation or _preferred or (gpu_default if here == "gpu" else "reference")
    if implementation is None and chosen not in available:
        # A preference for one kind of kernel means a kernel where there is only the other kind.
        chosen = "triton" if chosen == "mosaic" and "triton" in available else available[0]
    if chosen not in available:
        raise NotImplementedError(f"{op}: no implementation {chosen!r}; there is {', '.join(available)}")
    if chosen != "reference" and here != "gpu":
        raise NotImplementedError(f"{op}: the {chosen} implementation needs a GPU, this is {here}; choose 'reference'")
    if _planned is None:  # a plan runs nothing
        _announce(op, chosen, here)
    return chosen


def module(package: str, implementation: str) -> ModuleType:
    """The module of an operation's package that holds an implementation; imported here, so that Triton is where it is used."""
    return importlib.import_module(f"{package}.{implementation}")


# Operations by name, each in place of ours, for what is traced now.
_substitutes: contextvars.ContextVar[Mapping[str, Callable] | None] = contextvars.ContextVar("substitutes", default=None)


def replaceable(function: Callable) -> Callable:
    """Makes a public operation one that `substituted` can replace; otherwise it is what it was."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        other = (_substitutes.get() or {}).get(function.__name__)
        return function(*args, **kwargs) if other is None else other(function, *args, **kwargs)

    return call


@contextlib.contextmanager
def substituted(operations: Mapping[str, Callable]) -> Iterator[None]:
    """Inside, operations that are traced are others: for engines that differ on purpose, so that the one forward can run with
    another engine's operation in place of ours.

    Substitutes have no gradient of their own making, and are found while tracing alone: a compiled program stays what it is.

    Args:
      operations: by name of the public function (`add_rms_norm`), what is called in its place. It gets our function, which may
        be called, and then the arguments.
    """
    token = _substitutes.set(operations)
    try:
        yield
    finally:
        _substitutes.reset(token)
