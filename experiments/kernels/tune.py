"""Measures tile configurations and writes the table of `pallas_kernels.tuning`.

A case is traced once to hear which kernels ask for a configuration, at which shapes and with which defaults. Then one parameter
after the other takes its other values (coordinate descent from the default; twice around at most), and a value is kept where the
whole case got faster by more than `GAIN`. A value that does not compile is passed over. One whose result differs from the
default's in any bit is refused, however fast: tiles may change speed, never bits.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.kernels.cases import Case
from experiments.kernels.measure import calls_that_fit, make_sets, tree_bytes
from experiments.kernels.peers import reason
from experiments.timing import Timing, sets_beyond_cache
from minite_jax.files import replaced
from pallas_kernels import tuning

# By the end of a parameter's name; a parameter that is not here stays as its kernel has it.
SPACE: dict[str, tuple[Any, ...]] = {
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "BLOCK_M": (64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128, 256),
    "BLOCK_K": (64, 128, 256),
    "BLOCK_FEATURES": (64, 128),
    "BLOCK_TOKENS": (16, 32, 64),
    "UNROLL": (1, 2, 4),
    "GROUP_M": (4, 8, 16),
}
GAIN = 0.02
_ROUNDS = 2

Bits = list[np.ndarray]


def tune(
    cases: Iterable[Case],
    time: Callable[..., Timing],
    path: Path,
    report: Callable[[str], None],
    more: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Tunes the kernels of each case and writes the table after each.

    Args:
      cases: from `suites.cases`; kernels at shapes that the table has for this device are passed over, so that an interrupted
        run goes on where it stopped. To measure a shape again, delete its entry.
      time: `timing.time_jax` with its settings.
      path: the table; entries of other devices and shapes stay.
      report: told one line for each measurement.
      more: asked before each kernel whether there is time for it.

    Returns:
      The table.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    kind = jax.devices()[0].device_kind
    for case in cases:
        sets = None
        for op, shape, default in asked_for(case, jax.eval_shape(case.make, jax.random.key(0))):
            entries = table.setdefault(op, {}).setdefault(kind, {})
            if tuning.shape_key(*shape) in entries:
                continue
            if not more():
                report("no time left: the same command goes on from here")
                return table
            sets = sets or _inputs(case)
            report(f"{case.name}: {op} at {tuning.shape_key(*shape)}, default {default}")
            best = descend(op, default, lambda op, parameters, s=sets, c=case: _trial(op, parameters, c, s, time), report)
            # The default too is an entry: without it a neighbour's configuration would hold here.
            entries[tuning.shape_key(*shape)] = best
            write(table, path)
    return table


def asked_for(case: Case, arguments: tuple) -> list[tuple[str, tuple[int, int, int], dict[str, Any]]]:
    """Which kernels of a case ask for a configuration: operation, shape, default."""
    with tuning.record() as recorded:
        jax.eval_shape(lambda *inputs: case.function(*inputs), *arguments)
    return [(op, shape, default) for op, requests in recorded.items() for shape, default in requests]


def descend(
    op: str,
    default: dict[str, Any],
    trial: Callable[[str, dict[str, Any]], tuple[float, Bits]],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The fastest configuration that a walk from the default finds, one parameter at a time.

    Args:
      op: name of the kernel.
      default: where the walk starts.
      trial: (op, configuration) -> seconds and the result; raises where it does not compile or run.
      report: told one line for each trial.
    """
    best = dict(default)
    best_seconds, bits = trial(op, best)
    report(f"  default {1e6 * best_seconds:.1f} us")
    tried = {tuple(sorted(best.items()))}
    for _ in range(_ROUNDS):
        before = dict(best)
        for name in sorted(set(default) & set(SPACE)):
            for value in SPACE[name]:
                candidate = {**best, name: value}
                if tuple(sorted(candidate.items())) in tried:
                    continue
                tried.add(tuple(sorted(candidate.items())))
                try:
                    seconds, found = trial(op, candidate)
                except Exception as error:  # too much shared memory, a tile that the kernel refuses, ...
                    report(f"  {name}={value}: {reason(error)}")
                    continue
                same = len(found) == len(bits) and all(a.tobytes() == b.tobytes() for a, b in zip(found, bits, strict=True))
                report(f"  {name}={value}: {1e6 * seconds:.1f} us" + ("" if same else ", REFUSED: other bits than the default"))
                if same and seconds < best_seconds * (1 - GAIN):
                    best, best_seconds = candidate, seconds
        if best == before:
            break
    return best


def write(table: dict[str, Any], path: Path) -> None:
    """Writes the table sorted, under a temporary name that is then renamed."""
    ordered = {
        op: {
            kind: {key: entries[key] for key in sorted(entries, key=tuning.parse_key)} for kind, entries in sorted(kinds.items())
        }
        for op, kinds in sorted(table.items())
    }
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(ordered, indent=1) + "\n")


def _inputs(case: Case) -> list[tuple]:
    key = jax.random.key(0)
    nbytes = tree_bytes(jax.eval_shape(case.make, key))
    return make_sets(case.make, key, sets_beyond_cache(min(case.nbytes, nbytes), nbytes))


def _trial(op: str, parameters: dict[str, Any], case: Case, sets: list[tuple], time: Callable[..., Timing]) -> tuple[float, Bits]:
    def function(*arguments):  # a new function each time, so that JAX traces it anew and the override is heard
        return case.function(*arguments)

    jax.clear_caches()  # what was traced with other parameters must not be taken again
    with tuning.override(op, parameters):
        result = jax.jit(function)(*sets[0])
        calls = calls_that_fit(tree_bytes(result), max(8, len(sets)))
        seconds = time(function, sets, calls=calls, kernels=jax.default_backend() == "gpu").seconds
    return seconds, [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
