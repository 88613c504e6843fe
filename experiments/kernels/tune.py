"""Measures tile configurations and writes the table of `pallas_kernels.tuning`.

A case is traced once to hear which kernels ask for a configuration, at which shapes and with which defaults. The search begins
with the default and with `STARTS`, which change several parameters together; from the fastest of them one parameter after the
other takes its other values. A candidate that does not compile is passed over. One whose result differs from the default's in any
bit is refused, however fast: tiles may change speed, never bits.

**Noise.** Two runs of a short kernel differ by up to 15 %, and the best of many candidates is partly the luckiest. So a candidate
is never compared with a time of some minutes ago: it and the best so far are measured in turns. At the end the winner meets the
default again, in more turns, and the default stays unless it loses nearly all of them.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.kernels.cases import Case
from experiments.kernels.measure import calls_that_fit, make_sets, tree_bytes
from experiments.kernels.peers import reason
from experiments.timing import sets_beyond_cache
from minite_jax.files import replaced
from pallas_kernels import tuning

# By the end of a parameter's name; a parameter that is not here stays as its kernel has it.
SPACE: dict[str, tuple[Any, ...]] = {
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
    "BLOCK_M": (64, 128, 256),
    "BLOCK_N": (64, 128, 256),
    "BLOCK_K": (64, 128, 256),
    "BLOCK_FEATURES": (16, 32, 64, 128),
    "BLOCK_TOKENS": (16, 32, 64),
    "UNROLL": (1, 2, 4),
    "GROUP_M": (4, 8, 16),
}
# Tiles that a walk of single steps does not reach. One counts for a kernel that has all its parameters.
STARTS: tuple[dict[str, Any], ...] = (
    # Two programs on a processor: one stores while the other multiplies.
    dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, GROUP_M=8, num_warps=4, num_stages=3),
    dict(BLOCK_M=64, BLOCK_N=256, BLOCK_K=128, GROUP_M=8, num_warps=4, num_stages=2),
    dict(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, GROUP_M=8, num_warps=8, num_stages=4),
    # Fewer instructions a code, and more programs on a processor.
    dict(BLOCK_FEATURES=64, BLOCK_K=128, UNROLL=2, num_stages=3),
    dict(BLOCK_FEATURES=64, BLOCK_K=256, UNROLL=2, num_stages=2),
    dict(BLOCK_FEATURES=128, BLOCK_K=128, UNROLL=2, num_stages=2),
    # Tokens on the M side: programs of few features.
    dict(BLOCK_FEATURES=32, BLOCK_TOKENS=64, BLOCK_K=256, UNROLL=1, SWAPPED=True, num_stages=4),
    dict(BLOCK_FEATURES=16, BLOCK_TOKENS=64, BLOCK_K=256, UNROLL=1, SWAPPED=True, num_stages=4),
)
GAIN = 0.02
_TURNS, _FINAL_TURNS = 3, 9
_REPEATS = 5  # of a turn
_COMPILERS = 8  # at once


@dataclasses.dataclass(frozen=True)
class Trial:
    """A configuration that was compiled.

    Attributes:
      seconds: measures once more.
      result: arrays, for the comparison of bits.
    """

    seconds: Callable[[], float]
    result: Any


# From configurations to a trial of each, or why there is none.
Trials = Callable[[Sequence[dict[str, Any]]], list[Trial | Exception]]


def tune(
    cases: Iterable[Case],
    calls: Callable[..., Any],
    path: Path,
    report: Callable[[str], None],
    more: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Tunes the kernels of each case and writes the table after each.

    Args:
      cases: from `suites.cases`; kernels at shapes that the table has for this device are passed over, so that an interrupted
        run goes on where it stopped. To measure a shape again, delete its entry.
      calls: `timing.Calls`.
      path: the table; entries of other devices and shapes stay.
      report: told one line for each measurement.
      more: whether there is time left. Asked before each kernel, and before each step of a search, which then ends with what it
        has found.

    Returns:
      The table.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    kind = jax.devices()[0].device_kind
    failed = set()
    for case in cases:
        sets = None
        for op, shape, default in asked_for(case, jax.eval_shape(case.make, jax.random.key(0))):
            name = tuning.shape_key(*shape)
            if name in table.get(op, {}).get(kind, {}) or (op, name) in failed:
                continue
            if not more():
                report("no time left: the same command goes on from here")
                return table
            start = time.perf_counter()
            report(f"{case.name}: {op} at {name}, default {default}")
            try:
                sets = sets or _inputs(case)
                best = search(op, default, lambda configs, op=op, c=case, s=sets: try_all(op, configs, c, s, calls), report, more)
            except Exception as error:  # the default itself fails: the other kernels still count
                report(f"  passed over: {reason(error)}")
                failed.add((op, name))
                continue
            # Where the default stays, the entry is empty: without one a neighbour's configuration would hold here, and with the
            # default spelled out it would hold for neighbours, whose own defaults may be others.
            table.setdefault(op, {}).setdefault(kind, {})[name] = {} if best == default else best
            write(table, path)
            report(f"  {time.perf_counter() - start:.0f} s")
    return table


def asked_for(case: Case, arguments: tuple) -> list[tuple[str, tuple[int, int, int], dict[str, Any]]]:
    """Which kernels of a case ask for a configuration: operation, shape, default."""
    with tuning.record() as recorded:
        jax.eval_shape(lambda *inputs: case.function(*inputs), *arguments)
    return [(op, shape, default) for op, requests in recorded.items() for shape, default in requests]


def search(
    op: str, default: dict[str, Any], trials: Trials, report: Callable[[str], None], more: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """The fastest configuration that is found, or the default where that is as fast.

    Args:
      op: name of the kernel.
      default: where the search starts.
      trials: compiles configurations.
      report: told one line for each candidate.
      more: whether there is time left.

    Raises:
      Exception: the default does not compile or run.
    """
    first = trials([default])[0]
    if isinstance(first, Exception):
        raise first
    best, champion, tried = dict(default), first, [dict(default)]
    steps: list[Callable[[dict[str, Any]], list[dict[str, Any]]]] = [
        lambda at: [{**at, **start} for start in STARTS if set(start) <= set(default)]
    ]
    for name in sorted(set(default) & set(SPACE)):
        steps.append(lambda at, name=name: [{**at, name: value} for value in SPACE[name]])
    for step in steps:
        if not more():
            report("  no time left: the search ends here")
            break
        candidates = [each for each in step(best) if each not in tried]
        tried += candidates
        for candidate, trial in zip(candidates, trials(candidates), strict=True):
            words = ", ".join(f"{name}={value}" for name, value in candidate.items() if value != default[name]) or "default"
            if isinstance(trial, Exception):
                report(f"  {words}: {reason(trial)}")
            elif not same_bits(trial.result, first.result):
                report(f"  {words}: REFUSED: other bits than the default")
            else:
                old, new = medians(in_turns(champion, trial, _TURNS))
                report(f"  {words}: {1e6 * new:.1f} us, the best so far {1e6 * old:.1f} us")
                if new < old * (1 - GAIN):
                    best, champion = candidate, trial
    if best == default:
        report("  the default stays")
        return best
    pairs = in_turns(first, champion, _FINAL_TURNS)
    old, new = medians(pairs)
    # Equal kernels win all turns but one once in fifty times.
    stays = new >= old * (1 - GAIN) or sum(b < a for a, b in pairs) < _FINAL_TURNS - 1
    report(
        f"  again in turns: default {1e6 * old:.1f} us, {best} {1e6 * new:.1f} us: " + ("the default stays" if stays else "taken")
    )
    return dict(default) if stays else best


def in_turns(a: Trial, b: Trial, turns: int) -> list[tuple[float, float]]:
    """The times of two trials that are measured one after the other, again and again."""
    return [(a.seconds(), b.seconds()) for _ in range(turns)]


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median of the first and of the second of each pair."""
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays have the same shapes, types and bits."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    if [(x.shape, x.dtype) for x in a] != [(x.shape, x.dtype) for x in b]:
        return False
    return all(bool(_equal(x, y)) for x, y in zip(a, b, strict=True))


@jax.jit
def _equal(a, b):
    unsigned = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    if a.dtype == bool:
        return jnp.array_equal(a, b)
    return jnp.array_equal(*(lax.bitcast_convert_type(each, unsigned) for each in (a, b)))  # NaN too, and -0 is not 0


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


def try_all(
    op: str, configs: Sequence[dict[str, Any]], case: Case, sets: list[tuple], calls: Callable[..., Any]
) -> list[Trial | Exception]:
    """Traces each configuration, one after the other, since the override is everybody's; then compiles all of them at once."""
    traced: list[Any] = []
    for parameters in configs:

        def function(*arguments):  # a new function each time, so that JAX traces it anew and the override is heard
            return case.function(*arguments)

        jax.clear_caches()  # what was traced with other parameters must not be taken again
        try:
            with tuning.override(op, parameters):
                one = jax.jit(function).trace(*sets[0])
                number = calls_that_fit(tree_bytes(one.out_info), max(8, len(sets)))
                traced.append((one, calls(function, sets, calls=number, kernels=jax.default_backend() == "gpu")))
        except Exception as error:  # a tile that the kernel refuses
            traced.append(error)

    def compiled(each: Any) -> Any:
        if isinstance(each, Exception):
            return each
        try:
            return each[0].lower().compile(), each[1].compile()
        except Exception as error:  # too much shared memory, ...
            return error

    with ThreadPoolExecutor(_COMPILERS) as pool:
        ready = list(pool.map(compiled, traced))
    return [each if isinstance(each, Exception) else _run(*each, sets[0]) for each in ready]


def _run(program: Callable, timed: Any, arguments: tuple) -> Trial | Exception:
    try:
        result = jax.block_until_ready(program(*arguments))
        return Trial(lambda: timed.time(_REPEATS).seconds, result)
    except Exception as error:  # more memory than there is
        return error
