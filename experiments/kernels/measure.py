"""Runs the cases and makes the rows of the result file."""

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.kernels import cases as cases_lib
from experiments.kernels.cases import BF16, COPY, FP8, READ, SHARE, Case, Other
from experiments.kernels.ceilings import Ceiling
from experiments.kernels.peers import Measured, Peer, Peers, reason
from experiments.timing import MEMORY_BYTES, Timing, sets_beyond_cache
from minite_jax.metrics.results import FAILED

# A cell of a column that says nothing about a row; None is a figure that nobody has measured.
BLANK = ""

# The native kernel is compiled by the tests for a GPU that nobody here has.
COMPILED = "compiled, not run"
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
multiplied out into E4M3 numbers, exactly, and the fp8 tensor cores multiply those. The ceiling beside each speed is therefore the
fp8 one, measured in this run with cuBLAS at 8192 x 8192 x 8192; for bf16 kernels the bf16 one; for the rest the speed of a copy,
or of reading where little is written (decoding). "memory" counts the fewest bytes possible: inputs read once, outputs written
once. "held" is the memory for what is neither input nor result, as XLA plans it. "of the ceiling": the least time that the
ceilings allow over the time taken. "takes": the other implementation's time over ours, so 2 means that ours is twice as fast.
Times are medians over repeats on random inputs that exceed the cache; "spread" is half the distance between the quartiles.
PyTorch's operations are replayed from a CUDA graph (the expert MLP too: eager operations, without torch.compile). Kernels that
were compiled for the B300 have never run on one."""


class Bench:
    """Measures cases one after the other.

    Args:
      others: PyTorch's side.
      ceilings: by name.
      time: `timing.time_jax` with its settings.
      calls: least number of calls in a measurement; None: 8, and more where many sets are needed.
    """

    def __init__(self, others: Peers, ceilings: dict[str, Ceiling], time: Callable[..., Timing], calls: int | None = None):
        self._others = others
        self._ceilings = ceilings
        self._time = time
        self._calls = calls
        self._measured: dict[str, Measured] = {}

    def row(self, case: Case) -> dict[str, Any]:
        """Measures a case and what it is compared with."""
        ours = self._measure(case.function, case.make, case.nbytes, held=case.held, kernels=jax.default_backend() == "gpu")
        compared = {key: self._compare(other) for key, other in case.ratios.items()}
        return case_row(case, ours, compared, self._ceilings)

    def _compare(self, other: Peer | Other) -> Measured:
        if isinstance(other, Peer):
            return self._others.time(other)
        if other.name not in self._measured:
            settings = dict(held=other.held, repeats=other.repeats, calls=other.calls)
            self._measured[other.name] = self._measure(other.function, other.make, **settings)
        return self._measured[other.name]

    def other_rows(self) -> Iterator[dict[str, Any]]:
        """A row for each comparison made so far: "every figure"."""
        found = {str(peer): measured for peer, measured in self._others.measured.items()} | self._measured
        for name, measured in found.items():
            row = _blank("compared with", name)
            yield row | _time_cells(measured)

    def _measure(
        self, function: Callable, make: Callable, touched: float | None = None, *, held: bool, **settings: Any
    ) -> Measured:
        try:
            key = jax.random.key(0)
            inputs = jax.eval_shape(make, key)
            count = sets_beyond_cache(min(touched or math.inf, tree_bytes(inputs)), tree_bytes(inputs))
            calls = calls_that_fit(tree_bytes(jax.eval_shape(function, *inputs)), settings.pop("calls", None) or max(8, count))
            if self._calls is not None:
                count, calls = 2, self._calls
            sets = make_sets(make, key, count)
            timing = self._time(function, sets, calls=calls, **settings)
            return Measured(timing, held=_held_bytes(function, inputs) if held else None)
        except Exception as error:  # a case that fails is said in its row; the GPU's time for the others is not lost
            return Measured(failure=reason(error))
        finally:
            sets = None
            gc.collect()


def _held_bytes(function: Callable, inputs: Any) -> int | None:
    """Bytes that a call holds beside inputs and results. None on a CPU, whose plan says nothing about the kernels."""
    if jax.default_backend() == "cpu":
        return None
    return jax.jit(function).lower(*inputs).compile().memory_analysis().temp_size_in_bytes


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
    seconds = None if ours.timing is None else ours.timing.seconds
    row["ceiling"], least = _least_seconds(case, ceilings)
    row["gbs"] = None if seconds is None else case.nbytes / seconds / 1e9
    row["tflops"] = BLANK if not case.flops else None if seconds is None else case.flops / seconds / 1e12
    row[SHARE] = None if seconds is None or least is None else 100 * least / seconds
    for key, measured in compared.items():
        if measured.failure:
            row[key] = FAILED
            remarks.append(f"{_LABELS[key]}: {measured.failure}")
        else:
            row[key] = None if seconds is None or measured.timing is None else measured.timing.seconds / seconds
    row["goal"], row["met"] = _goal_cells(case, row)
    row["remarks"] = "; ".join(remarks)
    return row


def ceiling_rows(ceilings: dict[str, Ceiling]) -> list[dict[str, Any]]:
    """A row for each source of each ceiling."""
    rows = []
    for ceiling in ceilings.values():
        for source, measured in ceiling.measured.items():
            row = _blank("ceilings", f"{ceiling.name}, {source}") | _time_cells(measured)
            row["ceiling"] = ceiling.words()
            rate = None if measured.timing is None else ceiling.amount / measured.timing.seconds
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


def _least_seconds(case: Case, ceilings: dict[str, Ceiling]) -> tuple[str, float | None]:
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
    return [row for row in rows if row["suite"] not in ("ceilings", "compared with") and row["time"] is None]
