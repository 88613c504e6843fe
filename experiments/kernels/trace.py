"""Which kernels a program runs on a GPU and how long each takes, from the profiler that JAX brings along.

    trace = record(lambda: jax.block_until_ready(step(*arguments)))
    trace.busy, trace.span, trace.by(lambda kernel: kernel.part)

The part of the model that a kernel belongs to is the innermost `jax.named_scope` of `PARTS` around the operation that it runs.

XLA starts many kernels together, as a CUDA graph, and the profile then names the graph in place of the operation. What is left to
go by: the scope that the whole graph shares, if it has one; the name of a fusion's kernel, which is that of the operation it was
made for (others with the same code share it: as a rule those of other layers); and for a Mosaic kernel, which many operations
share, those of its operations that were not seen outside of graphs: where they agree, or else in their order, if one loop or one
program runs them all. A kernel of which this says nothing is `OTHER`.
"""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_OPERATION = re.compile(r'(?=\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name="([^"]*)")(.*)')
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_MOSAIC = 'custom_call_target="mosaic_gpu'
_MOSAIC_KERNEL = re.compile(r"(\w+)_mosaic_gpu_kernel")
PARTS = ("embed", "attention", "moe", "mlp", "head", "sample", "optimizer", "pack")
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      name: of the kernel, without its arguments.
      part: one of `PARTS`, with " backward" behind it inside a gradient, or `OTHER`.
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


def part_of(op_name: str) -> str:
    """The part of the model in an operation's path: ``jit(update)/transpose(jvp(moe))/..`` is "moe backward"."""
    part = OTHER
    for piece in op_name.split("/"):
        words = re.findall(r"[a-z_]+", piece)
        part = next((word for word in reversed(words) if word in PARTS), part)
    if part in ("optimizer", "pack", OTHER):
        return part
    return part + (" backward" if "transpose(" in op_name else "")


@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations of compiled programs.

    Attributes:
      paths: path of each instruction by name.
      mosaic: computation (a loop's body, a whole program) of each instruction that runs a Mosaic kernel, by name, in the order in
        which they run.
    """

    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mosaic: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, *compiled_texts: str) -> "Operations":
        """Reads the texts of compiled programs."""
        paths, mosaic = {}, {}
        for number, text in enumerate(compiled_texts):
            computation = ""
            for line in text.splitlines():
                if (begins := _COMPUTATION.match(line)) is not None:
                    computation = f"{number}: {begins[1]}"
                elif (operation := _OPERATION.match(line)) is not None:
                    name, paths[name], rest = operation[1], operation[2], operation[3]
                    if _MOSAIC in rest:
                        mosaic[name] = computation
        return cls(paths, mosaic)

    def paths_of(self, kernels: Sequence[tuple[str, str]]) -> list[str]:
        """The path of each launch, by its instruction or, of a Mosaic kernel, by its order; "" where it cannot be told.

        Args:
          kernels: (a Mosaic kernel's name or "", instruction) of each, in the order in which they started.
        """
        seen, found = {instruction for _, instruction in kernels}, [self.paths.get(instruction, "") for _, instruction in kernels]
        for op in {name for name, _ in kernels}:
            # The last two pieces are the kernel's own name and JAX's primitive.
            left = [each for each in self.mosaic if each not in seen and self.paths[each].split("/")[-2:-1] == [op]]
            launches = [i for i, (name, _) in enumerate(kernels) if name == op and not found[i]]
            alike = len({part_of(self.paths[each]) for each in left}) == 1
            in_order = len({self.mosaic[each] for each in left}) == 1 and len(launches) % len(left) == 0
            for i, launch in enumerate(launches):
                if alike or in_order:
                    found[launch] = self.paths[left[i % len(left)]]
        return found


def short_name(name: str) -> str:
    """A kernel's name without template arguments, parameters and return type."""
    name = re.sub(r"<.*|\(.*", "", name.removeprefix("void "))
    return re.sub(r"_\d+$", "", name.split("::")[-1])


def record(run: Callable[[], Any], programs: Iterable[Any] = ()) -> Trace:
    """Runs something under the profiler.

    Args:
      run: returns when the device is done.
      programs: compiled programs that it runs (`jit(f).lower(..).compile()`), whose instructions tell the kernels' parts.
    """
    operations = Operations.of(*(program.as_text() for program in programs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return from_planes(jax.profiler.ProfileData.from_file(str(file)).planes, operations)


def from_planes(planes: Iterable[Any], operations: Operations) -> Trace:
    """The kernels of a profile's planes.

    Args:
      planes: of `jax.profiler.ProfileData`; only the streams of GPUs count.
      operations: of the programs that ran.
    """
    events = [
        (event, dict(event.stats))
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    events.sort(key=lambda each: each[0].start_ns)
    names = [_MOSAIC_KERNEL.match(short_name(event.name)) for event, _ in events]
    paths = operations.paths_of(
        [(name[1] if name else "", str(stats.get("hlo_op", ""))) for name, (_, stats) in zip(names, events, strict=True)]
    )

    def path(event: Any, stats: Mapping[str, Any], known: str) -> str:
        for told in (stats.get("tf_op"), stats.get("name")):
            if "/" in str(told):
                return str(told)
        return known or operations.paths.get(re.sub(r"_(\d+)$", r".\1", event.name), "")

    kernels = [
        Kernel(short_name(event.name), part_of(path(event, stats, known)), event.start_ns / 1e9, event.duration_ns / 1e9)
        for (event, stats), known in zip(events, paths, strict=True)
    ]
    first = kernels[0].start if kernels else 0.0
    return Trace(tuple(dataclasses.replace(k, start=k.start - first) for k in kernels))
