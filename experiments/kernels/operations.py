"""Which operation of a compiled program each launch of a profile ran, and which part of the model that is.

The part of the model that an operation belongs to is the innermost `jax.named_scope` of `PARTS` around it.

XLA starts many kernels together, as a CUDA graph, and the profile then names the graph in place of the operation. What is left to
go by: the scope that the whole graph shares, if it has one; the name of a fusion's kernel, which is that of one of the operations
with its code; and for a Mosaic kernel, which many operations share, the parts of those that it can be, where these agree, or else
their order, if one loop or one program runs them all, or a program with one loop.

A kernel in a wrong part is worse than one in none. So whatever else the profile tells has to agree: fusions of one code in
several parts, a launch too many or out of turn, launches at the same time, and a turn that could as well begin elsewhere leave
their kernels in `OTHER`.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_METADATA = re.compile(r",? metadata=\{[^}]*\}")
_PATH = re.compile(r'op_name="([^"]*)"')
_FUSION = re.compile(r" fusion\(.*\bcalls=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LOOP = re.compile(r" while\(.*\bbody=%?([\w.\-]+)")
_MOSAIC = 'custom_call_target="mosaic_gpu'
_MOSAIC_KERNEL = re.compile(r"(\w+)_mosaic_gpu_kernel")
PARTS = ("embed", "attention", "moe", "mlp", "head", "sample", "optimizer", "pack")
OTHER = "other"


def part_of(op_name: str) -> str:
    """The part of the model in an operation's path: ``jit(update)/transpose(jvp(moe))/..`` is "moe backward"."""
    part = OTHER
    for piece in op_name.split("/"):
        words = re.findall(r"[a-z_]+", piece)
        part = next((word for word in reversed(words) if word in PARTS), part)
    if part in ("optimizer", "pack", OTHER):
        return part
    return part + (" backward" if "transpose(" in op_name else "")


def short_name(name: str) -> str:
    """A kernel's name without template arguments, parameters and return type."""
    name = re.sub(r"<.*|\(.*", "", name.removeprefix("void "))
    return re.sub(r"_\d+$", "", name.split("::")[-1])


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a profile tells of a launch.

    Attributes:
      kernel: its whole name.
      start, end: nanoseconds.
      instruction: that ran it, or its CUDA graph.
      path: of its operation, or what the whole graph shares; "" where the profile has none.
      foreign: whether another program ran it, whose instructions may have the same names.
    """

    kernel: str
    start: float
    end: float
    instruction: str = ""
    path: str = ""
    foreign: bool = False

    @functools.cached_property
    def mosaic(self) -> str:
        """A Mosaic kernel's own name; "" of another."""
        found = _MOSAIC_KERNEL.match(short_name(self.kernel))
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations of a compiled program.

    Attributes:
      paths: path of each instruction by name, "" of one that has none.
      mosaic: computation (a loop's body, the whole program) of each instruction that runs a Mosaic kernel, by name, in the order
        in which they run.
      order: those instructions in the order in which the whole program runs them, a loop's body once; empty where it cannot be
        told.
      code: what each fusion computes, by name. XLA may give two of the same code one kernel.
      module: the program's name, "" where it does not matter.
    """

    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mosaic: Mapping[str, str] = dataclasses.field(default_factory=dict)
    order: Sequence[str] = ()
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module: str = ""

    @classmethod
    def of(cls, compiled_text: str) -> "Operations":
        """Reads the text of a compiled program."""
        paths, mosaic, called, bodies = {}, {}, {}, collections.defaultdict(list)
        inside: dict[str, str] = {}  # by computation, which the text has before its caller: what runs a Mosaic kernel in it
        loops: dict[str, str] = {}  # by instruction, what it repeats
        steps: dict[str, list[str]] = collections.defaultdict(list)  # of a computation: loops and Mosaic kernels
        computation = entry = ""
        for line in compiled_text.splitlines():
            if (begins := _COMPUTATION.match(line)) is not None:
                computation = begins[1]
                entry = computation if line.startswith("ENTRY") else entry
            elif (instruction := _INSTRUCTION.match(line)) is not None:
                name, path, rest = instruction[1], _PATH.search(line), _METADATA.sub("", instruction[2])
                paths[name] = path[1] if path else ""
                bodies[computation].append(f"%{name} = {rest}")
                if _MOSAIC in rest:
                    mosaic[name], inside[computation] = computation, name
                if (loop := _LOOP.search(rest)) is not None:
                    loops[name] = loop[1]
                if (fusion := _FUSION.search(rest)) is not None:
                    called[name] = fusion[1]
                    if fusion[1] in inside:
                        # A kernel that reads or writes a slice: what runs, and what a profile names, is the fusion around it.
                        mosaic[name], paths[name] = computation, paths[inside[fusion[1]]]
                if name in loops or name in mosaic:
                    steps[computation].append(name)
        mosaic = {name: where for name, where in mosaic.items() if where not in called.values()}
        code = {name: _without_names(bodies[body]) for name, body in called.items()}
        module = re.match(r"HloModule ([^\s,]+)", compiled_text)

        def run(computation: str) -> Iterator[str]:
            for name in steps[computation]:
                yield from run(loops[name]) if name in loops else [name]

        order = tuple(run(entry))
        told = sorted(order) == sorted(mosaic)  # all, and each once
        return cls(paths, mosaic, order if told else (), code, module[1] if module else "")

    def paths_of(self, launches: Sequence[Launch]) -> list[str]:
        """The path of each launch of one GPU, in the order in which they started; "" where it cannot be told."""
        graphs = _Graphs(self, launches)
        mosaic, fusion = functools.cache(graphs.by_agreement), functools.cache(graphs.by_code)

        def path(i: int, launch: Launch) -> str:
            if launch.path or launch.foreign:
                return launch.path
            if launch.instruction in self.paths:
                return self.paths[launch.instruction]
            if not launch.mosaic:
                return fusion(launch.kernel)
            return graphs.by_order.get(i) or graphs.by_program.get(i) or mosaic(launch.mosaic)

        return [path(i, launch) for i, launch in enumerate(launches)]


class _Graphs:
    """Launches of one GPU, of which some are inside of CUDA graphs, and what can be told of those."""

    def __init__(self, operations: Operations, launches: Sequence[Launch]):
        self.operations = operations
        # By name of the Mosaic kernel, with their numbers.
        self.mosaic: dict[str, list[tuple[int, Launch]]] = collections.defaultdict(list)
        for i, each in enumerate(launches):
            if each.mosaic and not each.foreign:
                self.mosaic[each.mosaic].append((i, each))
        self.seen = collections.Counter(
            each.instruction for each in launches if each.mosaic or each.instruction not in operations.mosaic
        )
        # Operations of each Mosaic kernel that were not seen: they ran in graphs, or not at all.
        self.unseen: dict[str, list[str]] = collections.defaultdict(list)
        for operation in operations.mosaic:
            if not self.seen[operation]:
                self.unseen[self._kernel(operation)].append(operation)

    def by_code(self, kernel: str) -> str:
        """The path of a fusion's kernel, where all the fusions that it can be are of one part."""
        named = re.sub(r"_(\d+)$", r".\1", kernel)
        if named not in self.operations.paths:
            return ""
        code = self.operations.code
        alike = [each for each in code if code[each] == code[named]] if named in code else [named]
        parts = {self._part(each) for each in alike if not self.seen[each]}
        return self.operations.paths[named] if parts == {self._part(named)} else ""

    def by_agreement(self, kernel: str) -> str:
        """The path of a Mosaic kernel, where its operations are of one part: all, or all that were not seen, and launches are as
        many as these can have."""
        everywhere = [each for each in self.operations.mosaic if self._kernel(each) == kernel]
        for operations in (everywhere, self.unseen[kernel]):
            if len({self._part(each) for each in operations}) == 1:
                break
        else:
            return ""
        path = self.operations.paths[operations[0]]
        return path if operations is everywhere or self._are_as_many(kernel, part_of(path)) else ""

    @functools.cached_property
    def by_order(self) -> dict[int, str]:
        """Paths by number, of Mosaic kernels whose operations in graphs are all of one computation: there they take turns."""
        found = {}
        for computation, times in self._runs.items():
            kernels = {kernel for kernel in self.unseen if self._homes(kernel) == {computation}}
            turn = [each for each in self._of_computation(computation) if self._kernel(each) in kernels]
            ran = sorted(
                (i, each)
                for kernel in kernels
                for i, each in self.mosaic[kernel]
                if each.instruction in turn or self._is_in_graph(each)
            )
            if len(times) == 1 and self._is_turn(turn, [each for _, each in ran]):
                paths = itertools.cycle(self.operations.paths[each] for each in turn)
                found |= {i: path for (i, _), path in zip(ran, paths, strict=False)}
        return found

    @functools.cached_property
    def by_program(self) -> dict[int, str]:
        """Paths by number, of Mosaic kernels of several computations: a program that ran once, with one loop of known turns."""
        found = {}
        for kernel in self.unseen:
            order = [each for each in self.operations.order if self._kernel(each) == kernel]
            expected, repeated = [], []
            for computation, turn in itertools.groupby(order, key=self.operations.mosaic.get):
                times = self._runs[computation]
                if len(times) != 1:
                    break
                expected += list(turn) * max(times)
                repeated += [computation] * (times != {1})
            else:
                ran = [(i, each) for i, each in self.mosaic[kernel] if each.instruction in order or self._is_in_graph(each)]
                # Two that are repeated, or one around another's turns, may take turns with each other.
                if len(repeated) <= 1 and len(ran) == len(expected) and self._fit(expected, [each for _, each in ran]):
                    found |= {i: self.operations.paths[each] for (i, _), each in zip(ran, expected, strict=True)}
        return found

    def _is_in_graph(self, launch: Launch) -> bool:
        return launch.instruction not in self.operations.paths

    def _kernel(self, operation: str) -> str:
        # The last two pieces are the kernel's own name and JAX's primitive.
        return "".join(self.operations.paths[operation].split("/")[-2:-1])

    def _part(self, operation: str) -> str:
        return part_of(self.operations.paths[operation])

    def _homes(self, kernel: str) -> set[str]:
        return {self.operations.mosaic[each] for each in self.unseen[kernel]}

    def _of_computation(self, computation: str) -> list[str]:
        return [each for each, where in self.operations.mosaic.items() if where == computation]

    def _in_graphs(self, kernel: str) -> list[Launch]:
        return [each for _, each in self.mosaic[kernel] if self._is_in_graph(each)]

    @functools.cached_property
    def _runs(self) -> dict[str, set[int]]:
        """How often each computation ran, by all that tells it: one number, unless launches are missing or are another's."""
        found = {computation: set() for computation in self.operations.mosaic.values()}
        for operation, computation in self.operations.mosaic.items():
            if self.seen[operation]:
                found[computation].add(self.seen[operation])
        for kernel, operations in list(self.unseen.items()):
            if len(homes := self._homes(kernel)) == 1:
                times, rest = divmod(len(self._in_graphs(kernel)), len(operations))
                found[homes.pop()] |= {times, times + bool(rest)}
        return found

    def _are_as_many(self, kernel: str, part: str) -> bool:
        """Whether the launches in graphs can be those of this kernel's operations that were not seen, and no others."""
        launches = sum(part_of(each.path) in (part, OTHER) for each in self._in_graphs(kernel))
        unknown = 0
        for computation, count in collections.Counter(self.operations.mosaic[each] for each in self.unseen[kernel]).items():
            times = self._runs[computation]
            if len(times) > 1:
                return False
            launches -= count * sum(times)
            unknown = unknown if times else math.gcd(unknown, count)
        return launches >= 0 and launches % unknown == 0 if unknown else launches == 0

    def _is_turn(self, turn: list[str], launches: Sequence[Launch]) -> bool:
        """Whether the launches can be these operations, over and over, in one way alone."""
        if not self._fit(itertools.cycle(turn), launches):
            return False
        marks = [(self._kernel(each), each if self.seen[each] else "") for each in turn]
        parts = [self._part(each) for each in turn]
        rotated = lambda of, by: of[by:] + of[:by]  # noqa: E731
        return all(rotated(marks, by) != marks or rotated(parts, by) == parts for by in range(1, len(turn)))

    def _fit(self, operations: Iterable[str], launches: Sequence[Launch]) -> bool:
        """Whether the launches can be these operations, one after the other."""
        middles: dict[str, float] = {}
        for launch, operation in zip(launches, operations, strict=False):
            part = self._part(operation)
            instruction = launch.instruction if launch.instruction in self.operations.paths else ""
            if (launch.mosaic, instruction) != (self._kernel(operation), operation if self.seen[operation] else ""):
                return False
            if part_of(launch.path) not in (part, OTHER):
                return False
            # Where one began before half of another's time, neither waited for the other, and the order is chance.
            if any(launch.start <= middle for other, middle in middles.items() if other != part):
                return False
            middles[part] = max((launch.start + launch.end) / 2, middles.get(part, -math.inf))
        return True


def _without_names(lines: Iterable[str]) -> str:
    """A computation's text with its names numbered, so that two of the same code are equal."""
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), "\n".join(lines))
