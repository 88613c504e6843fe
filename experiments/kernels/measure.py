"""Runs the cases and makes the rows of the result file."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from experiments.kernels import cases as cases_lib
from experiments.kernels.cases import BF16, COPY, FP8, READ, SHARE, Case, Other
from experiments.kernels.ceilings import Ceiling
from experiments.kernels.limits import IMPOSSIBLE, too_fast
from experiments.kernels.peers import Measured, Peer, Peers, reason
from experiments.timing import MEMORY_BYTES, enough_calls, sets_beyond_cache
from minite_jax.metrics.results import FAILED

# A cell of a column that says nothing about a row; None is a figure that nobody has measured.
BLANK = ""

# The native kernel is compiled by the tests for a GPU that nobody here has.
COMPILED = "compiled, not run"
# So many cases are compiled at once before the first of them is timed: a run that is cut should have rows early.
_BATCH = 8
# XLA times its candidates for a product while it compiles: two at once on one GPU would disturb each other.
_CHOOSING = threading.Lock()
# Where the host takes this share of a call's time, it is the host that was measured.
_HOST_BOUND = 0.8

COLUMNS = [
    {"key": "suite", "label": "suite", "unit": ""},
    {"key": "case", "label": "case", "unit": ""},
    {"key": "operands", "label": "operands", "unit": ""},
    {"key": "shape", "label": "M x N x K", "unit": ""},
    {"key": "time", "label": "time", "unit": "us"},
    {"key": "spread", "label": "spread", "unit": "%"},
    {"key": "tflops", "label": "speed", "unit": "TFLOP/s"},
    {"key": "gbs", "label": "memory", "unit": "GB/s"},
    {"key": "held", "label": "held", "unit": "MB"},
    {"key": cases_lib.held_by(cases_lib.VS_UNFUSED), "label": "unfused jnp holds", "unit": "MB"},
    {"key": cases_lib.held_by(cases_lib.VS_RAGGED), "label": "ragged_dot holds", "unit": "MB"},
    {"key": cases_lib.held_by(cases_lib.VS_CUDNN), "label": "cuDNN attention holds", "unit": "MB"},
    {"key": "ceiling", "label": "ceiling", "unit": ""},
    {"key": SHARE, "label": "of the ceiling", "unit": "%"},
    {"key": cases_lib.VS_BF16, "label": "cuBLAS bf16 takes", "unit": "x"},
    {"key": cases_lib.VS_FP8, "label": "cuBLAS fp8 takes", "unit": "x"},
    {"key": cases_lib.VS_GROUPED, "label": "torch grouped bf16 takes", "unit": "x"},
    {"key": cases_lib.VS_GROUPED_FP8, "label": "torch grouped fp8 takes", "unit": "x"},
    {"key": cases_lib.VS_RAGGED, "label": "ragged_dot takes", "unit": "x"},
    {"key": cases_lib.VS_UNFUSED, "label": "unfused jnp takes", "unit": "x"},
    {"key": cases_lib.VS_CUDNN, "label": "cuDNN attention takes", "unit": "x"},
    {"key": cases_lib.VS_SDPA, "label": "torch flash attention takes", "unit": "x"},
    {"key": "goal", "label": "goal", "unit": ""},
    {"key": "met", "label": "met", "unit": ""},
    {"key": "b300", "label": "B300", "unit": ""},
    {"key": "remarks", "label": "remarks", "unit": ""},
]
_LABELS = {column["key"]: column["label"].removesuffix(" takes") for column in COLUMNS}
NOTES = """\
On a Hopper GPU this is fp8 arithmetic on 4-bit values: there is no FP4 unit, so the codes and block scales of NVFP4 are
multiplied out into E4M3 numbers, exactly, and the fp8 tensor cores multiply those. The ceiling beside each speed is therefore
the fp8 one, measured in this run with cuBLAS at 8192 x 8192 x 8192 and 8192 x 4096 x 4096, the faster of the two; for bf16
kernels the bf16 one; for the rest the speed of a copy, or of reading where little is written (decoding). "memory" counts the
fewest bytes possible: inputs read once, outputs written once. "held" and "holds" are the memory for what is neither input nor
result, as XLA plans it. "of the ceiling": the least time that the ceilings allow over the time taken. "takes": the other
implementation's time over ours, so 2 means that ours is twice as fast. "faster than reading allows": so the fewest bytes would
have moved over 1.1 times as fast as in this run's fastest copy or read, what the cache may hold set aside; "faster than matmuls
allow": over 1.05 times the matmul ceiling. Neither was measured. Times are medians over repeats on random inputs that exceed
the cache; "spread" is half the distance between the quartiles. PyTorch's operations are replayed from a CUDA graph (the expert
MLP too: eager operations, without torch.compile). Kernels that were compiled for the B300 have never run on one."""


@dataclasses.dataclass
class _Job:
    """What is timed: traced, compiled in a thread, timed when nothing else runs. What fails says why in `failure`.

    Attributes:
      make: key -> one set of inputs.
      sets: how many sets.
      touched: bytes of all sets.
      repeats: at most so many measurements; None: as many as asked for.
      calls: the programs.
      chosen: whether XLA chooses by timing how to compute it.
      plan: traced by itself, where the memory that it holds is asked for.
      held: bytes.
      failure: as in `Measured`.
    """

    make: Callable
    sets: int = 0
    touched: float = 0.0
    repeats: int | None = None
    calls: Any = None
    chosen: bool = False
    plan: Any = None
    held: int | None = None
    failure: str = ""

    def compile(self) -> None:
        try:
            with _CHOOSING if self.chosen else contextlib.nullcontext():
                self.calls.compile()
                if self.plan is not None:
                    self.held = self.plan.lower().compile().memory_analysis().temp_size_in_bytes
        except Exception as error:  # a case that fails is said in its row; the GPU's time for the others is not lost
            self.failure = reason(error)

    def time(self, repeats: int) -> Measured:
        """The measurement; what was compiled is let go."""
        try:
            if self.failure:
                return Measured(failure=self.failure)
            sets = make_sets(self.make, jax.random.key(0), self.sets)
            timing = self.calls.time(min(repeats, self.repeats or repeats), sets)
            return Measured(timing, held=self.held, cycled=self.touched)
        except Exception as error:  # as above
            return Measured(failure=reason(error))
        finally:
            sets = self.calls = self.plan = None
            gc.collect()


class Bench:
    """Measures cases.

    Args:
      others: PyTorch's side.
      ceilings: by name.
      programs: `timing.Calls`.
      repeats: measurements of each time.
      calls: number of calls in a measurement; None: by `timing.enough_calls`.
    """

    def __init__(
        self, others: Peers, ceilings: dict[str, Ceiling], programs: Callable[..., Any], repeats: int, calls: int | None = None
    ):
        self._others = others
        self._ceilings = ceilings
        self._programs = programs
        self._repeats = repeats
        self._calls = calls
        self._measured: dict[str, Measured] = {}
        self._impossible: dict[str, str] = {}

    def rows(self, cases: Sequence[Case], more: Callable[[], bool] = lambda: True) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Measures cases and what they are compared with, in their order, as long as `more` says so.

        Some cases are compiled at once, each program in a thread, and then timed one after the other while nothing compiles.
        """
        with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for first in range(0, len(cases), _BATCH):
                if not more():
                    return
                batch = cases[first : first + _BATCH]
                ours, compared = self._jobs(batch)
                list(pool.map(_Job.compile, [job for job in itertools.chain(ours, compared.values()) if not job.failure]))
                for case, job in zip(batch, ours, strict=True):
                    if not more():
                        return
                    yield case, self._row(case, job, compared)

    def row(self, case: Case) -> dict[str, Any]:
        """Measures a case and what it is compared with."""
        return next(self.rows([case]))[1]

    def _row(self, case: Case, job: _Job, jobs: dict[str, _Job]) -> dict[str, Any]:
        ours, compared = job.time(self._repeats), {}
        for key, other in case.ratios.items():
            if isinstance(other, Peer):
                compared[key] = self._others.time(other, least_seconds(case, self._ceilings)[1])
            else:
                if other.name in jobs:
                    self._measured[other.name] = jobs.pop(other.name).time(self._repeats)
                compared[key] = self._measured[other.name]
            name = str(other) if isinstance(other, Peer) else other.name
            self._impossible[name] = too_fast(case, compared[key], self._ceilings, key) or self._impossible.get(name, "")
        return case_row(case, ours, compared, self._ceilings)

    def other_rows(self) -> Iterator[dict[str, Any]]:
        """A row for each comparison made so far: "every figure"."""
        found = {str(peer): measured for peer, measured in self._others.measured.items()} | self._measured
        for name, measured in found.items():
            row = _blank("compared with", name) | _time_cells(measured)
            if self._impossible.get(name):
                row["time"] = self._impossible[name]
            yield row

    def _jobs(self, batch: Sequence[Case]) -> tuple[list[_Job], dict[str, _Job]]:
        """Our jobs, and by name those of the comparisons in JAX that nobody has measured."""
        ours, compared, on_gpu = [], {}, jax.default_backend() == "gpu"
        for case in batch:
            least = least_seconds(case, self._ceilings)[1]
            ours.append(self._job(case.function, case.make, least, touched=case.nbytes, held=case.held, kernels=on_gpu))
            for other in case.ratios.values():
                if isinstance(other, Other) and other.name not in self._measured and other.name not in compared:
                    settings = dict(held=case.held, calls=other.calls, repeats=other.repeats)
                    compared[other.name] = self._job(other.function, other.make, least, **settings)
        return ours, compared

    def _job(
        self,
        function: Callable,
        make: Callable,
        least: float | None,
        *,
        held: bool,
        touched: float = math.inf,
        kernels: bool = False,
        calls: int | None = None,
        repeats: int | None = None,
    ) -> _Job:
        job = _Job(make, repeats=repeats)
        try:
            inputs = jax.eval_shape(make, jax.random.key(0))
            touched = min(touched, tree_bytes(inputs))
            count = sets_beyond_cache(touched, tree_bytes(inputs))
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*inputs)
            job.chosen = not kernels and "dot_general" in str(jaxpr)  # ours are compiled as they are
            fitting = calls_that_fit(tree_bytes(results), calls or enough_calls(least, count))
            calls = self._calls or fitting
            job.sets = min(count, 2 * calls)
            job.touched = job.sets * touched
            job.calls = self._programs(function, [inputs] * job.sets, calls=calls, kernels=kernels)
            # On a CPU XLA's plan says nothing about the kernels.
            job.plan = jax.jit(function).trace(*inputs) if held and jax.default_backend() != "cpu" else None
        except Exception as error:  # as in `_Job.compile`
            job.failure = reason(error)
        return job


def make_sets(make: Callable, key: jax.Array, count: int) -> list[tuple]:
    """So many sets of inputs, each of its own random numbers."""
    return [make(each) for each in jax.random.split(key, count)]


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def calls_that_fit(result_bytes: float, wanted: int) -> int:
    """As many calls as wanted, or as twice their results fit into memory; at least one."""
    return max(1, min(wanted, int(MEMORY_BYTES // (2 * max(result_bytes, 1)))))


def case_row(case: Case, ours: Measured, compared: dict[str, Measured], ceilings: dict[str, Ceiling]) -> dict[str, Any]:
    """The row of a case from what was measured."""
    row = _blank(case.suite, case.name) | _time_cells(ours)
    row |= {"operands": case.operands, "shape": case.shape, "b300": COMPILED if case.native else None}
    remarks = [row["remarks"]] if row["remarks"] else []
    impossible = too_fast(case, ours, ceilings)
    if impossible:
        row["time"] = impossible
        remarks.append(f"{_words(ours)} is {impossible}")
    seconds = None if ours.timing is None or impossible else ours.timing.seconds
    row["ceiling"], least = least_seconds(case, ceilings)
    row["gbs"] = None if seconds is None else case.nbytes / seconds / 1e9
    row["tflops"] = BLANK if not case.flops else None if seconds is None else case.flops / seconds / 1e12
    row[SHARE] = None if seconds is None or least is None else 100 * least / seconds
    for key, measured in compared.items():
        if measured.held is not None:
            row[cases_lib.held_by(key)] = measured.held / 1e6
        impossible = too_fast(case, measured, ceilings, key)
        if measured.failure:
            row[key] = FAILED
            remarks.append(f"{_LABELS[key]}: {measured.failure}")
        elif impossible:
            row[key] = impossible
            remarks.append(f"{_LABELS[key]}: {_words(measured)} is {impossible}")
        else:
            row[key] = None if seconds is None or measured.timing is None else measured.timing.seconds / seconds
    row["goal"], row["met"] = _goal_cells(case, row)
    row["remarks"] = "; ".join(remarks)
    return row


def ceiling_rows(ceilings: dict[str, Ceiling]) -> list[dict[str, Any]]:
    """A row for each source of each ceiling."""
    rows = []
    for ceiling in ceilings.values():
        for source, (amount, measured) in ceiling.tried.items():
            row = _blank("ceilings", f"{ceiling.name}, {source}") | _time_cells(measured)
            row["ceiling"] = ceiling.words()
            rate = None if measured.timing is None else amount / measured.timing.seconds
            row["tflops" if ceiling.unit == "FLOP" else "gbs"] = (
                None if rate is None else rate / (1e12 if ceiling.unit == "FLOP" else 1e9)
            )
            rows.append(row)
    return rows


def _blank(suite: str, name: str) -> dict[str, Any]:
    return {column["key"]: BLANK for column in COLUMNS} | {"suite": suite, "case": name}


def _time_cells(measured: Measured) -> dict[str, Any]:
    if measured.timing is None:
        return {"time": None, "spread": None, "remarks": f"{FAILED}: {measured.failure}" if measured.failure else BLANK}
    timing = measured.timing
    late = f"the host took {100 * timing.host_share:.0f} % of the time" if timing.host_share > _HOST_BOUND else BLANK
    held = BLANK if measured.held is None else measured.held / 1e6
    return {"time": 1e6 * timing.seconds, "spread": 100 * timing.spread, "held": held, "remarks": late}


def _words(measured: Measured) -> str:
    return f"{1e6 * measured.timing.seconds:.4g} us (spread {100 * measured.timing.spread:.2g} %)"


def least_seconds(case: Case, ceilings: dict[str, Ceiling]) -> tuple[str, float | None]:
    """The ceiling in words, and the least time that it and the memory allow (None where it was not measured)."""
    ceiling = ceilings[case.ceiling]
    if ceiling.rate is None:
        return ceiling.words(), None
    if case.ceiling in (COPY, READ):
        return ceiling.words(), case.nbytes / ceiling.rate
    assert case.ceiling in (FP8, BF16), case.ceiling
    copy = ceilings[COPY]
    computing = case.flops / ceiling.rate
    moving = 0.0 if copy.rate is None else case.nbytes / copy.rate
    if moving > computing:
        return f"{copy.words()} ({ceiling.words()})", moving
    return ceiling.words(), computing


def _goal_cells(case: Case, row: dict[str, Any]) -> tuple[str, bool | str | None]:
    """The goal in words, and whether it is met: None where a figure for it is missing."""
    if not case.goals:
        return BLANK, BLANK
    words, verdicts = [], []
    for key, wanted in case.goals.items():
        value, wanted_cell = row[key], 100 * wanted if key == SHARE else wanted
        words.append(f">= {wanted_cell:g} % of {case.ceiling}" if key == SHARE else f">= {wanted:g} x {_LABELS[key]}")
        verdicts.append(value >= wanted_cell if isinstance(value, float) else None)
    met = False if False in verdicts else None if None in verdicts else True
    return ", ".join(words), met


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many goals were met, missed, and not decided."""
    goals = [row["met"] for row in rows if row["goal"]]
    return {"met": goals.count(True), "missed": goals.count(False), "undecided": goals.count(None)}


def failures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of our cases that could not be measured."""
    ours = [row for row in rows if row["suite"] not in ("ceilings", "compared with")]
    return [row for row in ours if row["time"] is None or row["time"] in IMPOSSIBLE]


def missing_words(asked: Sequence[Case], chosen: Sequence[Case], done: Sequence[Case], why: str, match: str | None) -> str:
    """What a table does not have, though it was asked for; "" where it has everything.

    Args:
      asked: the cases of the suites asked for.
      chosen: those of them that `match` left.
      done: those that were measured.
      why: the reason why some of `chosen` were not.
      match: the pattern, None for none.
    """

    def counted(left: Sequence[Case], right: Sequence[Case]) -> str:
        """For each suite how many of `left` are not in `right`."""
        inside = {id(case) for case in right}
        suites = {suite: [id(c) in inside for c in left if c.suite == suite] for suite in dict.fromkeys(c.suite for c in left)}
        return ", ".join(
            f"{suite} ({f'all {len(found)} cases' if not any(found) else f'{found.count(False)} of {len(found)} cases'})"
            for suite, found in suites.items()
            if not all(found)
        )

    not_chosen, not_done = counted(asked, chosen), counted(chosen, done)
    lines = [f"**Not in this table**: {not_done}: {why}."] if not_done else []
    lines += [f"**Left out** by `--match={match}`: {not_chosen}."] if not_chosen else []
    return "\n".join(lines)
