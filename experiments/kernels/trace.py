"""Which kernels a program runs on a GPU and how long each takes, from the profiler that JAX brings along.

    trace = record(lambda: jax.block_until_ready(step(*arguments)))
    trace.busy, trace.span, trace.by(lambda kernel: kernel.part)

What part of the model a kernel belongs to: `operations`.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from experiments.kernels.operations import Launch, Operations, part_of, short_name


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      name: of the kernel, without its arguments.
      part: one of `operations.PARTS`, with " backward" behind it inside a gradient, or `operations.OTHER`.
      start: seconds since the trace began.
      seconds: how long it ran.
    """

    name: str
    part: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """The launches of one run, in the order in which they started."""

    kernels: tuple[Kernel, ...]

    @property
    def span(self) -> float:
        """Seconds from the start of the first kernel to the end of the last."""
        return max((k.start + k.seconds for k in self.kernels), default=0.0) - min((k.start for k in self.kernels), default=0.0)

    @property
    def busy(self) -> float:
        """Seconds in which some kernel ran."""
        total, end = 0.0, float("-inf")
        for kernel in sorted(self.kernels, key=lambda k: k.start):
            total += max(0.0, kernel.start + kernel.seconds - max(kernel.start, end))
            end = max(end, kernel.start + kernel.seconds)
        return total

    def by(self, key: Callable[[Kernel], Any]) -> dict[Any, tuple[int, float]]:
        """Launches and seconds of each value of a key, the longest first."""
        found: dict[Any, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for kernel in self.kernels:
            entry = found[key(kernel)]
            entry[0] += 1
            entry[1] += kernel.seconds
        return {k: (int(n), s) for k, (n, s) in sorted(found.items(), key=lambda item: -item[1][1])}


def record(run: Callable[[], Any], program: Any) -> Trace:
    """Runs something under the profiler.

    Args:
      run: returns when the device is done.
      program: the compiled program that it runs (`jit(f).lower(..).compile()`), whose instructions tell the kernels' parts.
    """
    operations = Operations.of(program.as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return from_planes(jax.profiler.ProfileData.from_file(str(file)).planes, operations)


def from_planes(planes: Iterable[Any], operations: Operations) -> Trace:
    """The kernels of a profile's planes.

    Args:
      planes: of `jax.profiler.ProfileData`; only the streams of GPUs count.
      operations: of the program that ran.
    """
    kernels = []
    for plane in planes:  # a GPU each: their launches are no one sequence
        if plane.name.startswith("/device:GPU"):
            launches = _launches(plane, operations)
            for launch, path in zip(launches, operations.paths_of(launches), strict=True):
                kernels.append(
                    Kernel(short_name(launch.kernel), part_of(path), launch.start / 1e9, (launch.end - launch.start) / 1e9)
                )
    kernels.sort(key=lambda kernel: kernel.start)
    first = kernels[0].start if kernels else 0.0
    return Trace(tuple(dataclasses.replace(k, start=k.start - first) for k in kernels))


def _launches(plane: Any, operations: Operations) -> list[Launch]:
    """The launches of one GPU, in the order in which they started."""
    events = [(event, dict(event.stats)) for line in plane.lines if line.name.startswith("Stream") for event in line.events]
    events.sort(key=lambda each: each[0].start_ns)
    # Instructions of other programs have the same names. Where no launch is of ours, the profile spells programs otherwise.
    told = any(stats.get("hlo_module") == operations.module for _, stats in events)
    return [
        Launch(
            event.name,
            event.start_ns,
            event.start_ns + event.duration_ns,
            instruction="" if foreign else str(stats.get("hlo_op", "")),
            path=next((str(stats[key]) for key in ("tf_op", "name") if "/" in str(stats.get(key))), ""),
            foreign=foreign,
        )
        for event, stats in events
        for foreign in [told and stats.get("hlo_module") not in (None, operations.module)]
    ]
