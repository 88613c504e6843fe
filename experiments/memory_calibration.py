"""Memory measured on a device, beside its estimate.

Each case runs in a process of its own (`measure`), whose last line of output is a JSON object. The process that starts them
(`calibrate`) makes the estimates and never opens the device.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import cli
from experiments.memory_programs import Case, concrete, estimate, program
from minite_jax.errors import UserError
from minite_jax.metrics.results import FAILED, ResultsError, read_results, write_results


def _update(model: str, layers: int, recipe: str, rows: int, **changes) -> Case:
    return Case(program="update", model=model, layers=layers, recipe=recipe, rows=rows, length=1024, **changes)


def _sample(model: str, layers: int, recipe: str, rows: int, **changes) -> Case:
    return Case(program="sample", model=model, layers=layers, recipe=recipe, rows=rows, length=1024, new_tokens=1024, **changes)


# In the order of what they say: a run that is cut has measured the first ones.
CASES = (
    _update("qwen3_30b_a3b", 2, "nvfp4", 64),
    _update("qwen3_30b_a3b", 4, "nvfp4", 64),
    _sample("qwen3_30b_a3b", 4, "nvfp4", 512, samples=8),
    _update("qwen3_30b_a3b", 2, "bf16", 64),
    _update("qwen3_8b", 4, "nvfp4", 64),
    _update("qwen3_30b_a3b", 4, "nvfp4", 64, remat=True),
    _update("qwen3_30b_a3b", 4, "bf16", 64),
    _sample("qwen3_8b", 4, "nvfp4", 512, samples=8),
    _update("qwen3_8b", 2, "nvfp4", 64),
    _update("qwen3_8b", 4, "bf16", 64, remat=True),
    _sample("qwen3_30b_a3b", 4, "bf16", 512, samples=8),
    _update("qwen3_0_6b", 4, "nvfp4", 128, remat=True),
)
TINY = (
    Case(program="update", model="tiny_moe", layers=1, recipe="nvfp4", rows=2, length=16),
    Case(program="sample", model="tiny_dense", layers=1, recipe="bf16", rows=2, length=8, new_tokens=2),
)

COLUMNS = (
    dict(key="case", label="case", unit=""),
    dict(key="tokens", label="tokens", unit=""),
    dict(key="estimate", label="estimate", unit="GB"),
    dict(key="compiled", label="XLA's plan", unit="GB"),
    dict(key="measured", label="measured peak", unit="GB"),
    dict(key="ratio", label="estimate / measured", unit=""),
    dict(key="seconds", label="took", unit="s"),
    dict(key="remarks", label="remarks", unit=""),
)
NOTES = (
    "A case is program-model-layers-recipe-rows x length[+new tokens]. XLA's plan: arguments, results that take the place of no "
    "donated argument, and temporaries of the compiled program (`memory_analysis`). Measured: the most bytes that the device's "
    "allocator had given away at once, in a process that runs this program once and nothing else."
)


def find(name: str) -> Case:
    """The case of a name.

    Raises:
      UserError: there is none.
    """
    for case in (*CASES, *TINY):
        if case.name == name:
            return case
    raise UserError(f"there is no case {name!r}; there are {', '.join(case.name for case in (*CASES, *TINY))}")


def measure(case: Case) -> None:
    """Compiles and runs a case once on the device at hand, and prints JSON: bytes, and where they come from."""
    function, arguments, static = program(case)
    device, start = jax.devices()[0], time.perf_counter()
    compiled = function.lower(*arguments, **static).compile()
    plan = compiled.memory_analysis()
    arrays = jax.block_until_ready(concrete(arguments))
    before = _peak(device)
    jax.block_until_ready(compiled(*arrays))
    after = _peak(device)
    found = dict(
        compiled=plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes,
        measured=after,
        # What was there before the program ran is no peak of the program.
        hidden=after is not None and after == before,
        seconds=time.perf_counter() - start,
        provenance=cli.origin(),
    )
    print(json.dumps(found))


def _peak(device) -> int | None:
    """The most bytes that were in use at once, None where the device does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def calibrate(
    cases: Sequence[Case], path: Path | None, folder: Path, *, minutes: float | None, where: Mapping[str, Any]
) -> list[dict]:
    """Measures cases and writes a result file, anew after each.

    Args:
      cases: what to measure.
      path: the file; None: memory_DEVICE.json in `folder`.
      minutes: start no case after so many; None: all.
      where: this process's provenance: revision and command. Device and versions are the cases' own.

    Returns:
      The rows. One that failed says "failed" and why.
    """
    start, rows, known = time.perf_counter(), {}, {}
    for case in cases:
        peak = estimate(case).peak / 1e9
        row = dict(
            case=case.name, tokens=case.tokens, estimate=peak, compiled=None, measured=None, ratio=None, seconds=None, remarks=""
        )
        rows[case.name] = row
    for case in cases:
        if path is not None and path.exists() and not known:
            known = _kept(path, where["revision"])
        if (before := known.get(case.name)) is not None:
            rows[case.name] |= before
            print(f"{case.name}: measured before", flush=True)
            continue
        if minutes is not None and time.perf_counter() - start > 60 * minutes:
            print(f"{minutes:g} minutes are over: run again for the rest", flush=True)
            break
        found = _run(case, where["revision"])
        row = rows[case.name]
        if isinstance(found, str):
            row |= dict(compiled=FAILED, measured=FAILED, ratio=FAILED, seconds=FAILED, remarks=found)
            print(f"{case.name}: {found}", flush=True)
            if path is None or not path.exists():
                continue
        else:
            row |= _figures(row["estimate"], found)
            where = {**found["provenance"], "command": where["command"]}
            print(
                f"{case.name}: {row['estimate']:.2f} GB estimated, {_said(row['measured'])} measured {row['remarks']}".rstrip(),
                flush=True,
            )
        if path is None:
            from experiments.benchmark import device_slug

            path = folder / f"memory_{device_slug(where['device'])}.json"
            known = _kept(path, where["revision"])
        _save(path, rows.values(), where)
    if all(row["seconds"] in (None, FAILED) for row in rows.values()):
        raise UserError(f"no case could be measured; the first: {next(iter(rows.values()))['remarks'] or 'no time was left'}")
    _save(path, rows.values(), where)
    print(f"written to {path}")
    return list(rows.values())


def _said(measured: float | None) -> str:
    return "not" if measured is None else f"{measured:.2f} GB"


def _figures(estimated: float, found: Mapping[str, Any]) -> dict:
    measured, remarks = found["measured"], ""
    if measured is None:
        remarks = f"{found['provenance']['device']} does not say what it has given away"
    elif found["hidden"]:
        measured, remarks = None, "the peak was reached before the program ran"
    return dict(
        compiled=found["compiled"] / 1e9,
        measured=None if measured is None else measured / 1e9,
        ratio=None if measured is None else estimated * 1e9 / measured,
        seconds=found["seconds"],
        remarks=remarks,
    )


def _run(case: Case, revision: str) -> dict | str:
    """What the process of a case found, or why it did not."""
    command = [sys.executable, "-m", "experiments.memory", "case", f"--cases={case.name}", f"--revision={revision}"]
    # The device that this process keeps its hands off.
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        told = next(
            (line for line in reversed(lines) if "Error" in line or "RESOURCE" in line or "memory:" in line), (lines or [""])[-1]
        )
        return f"ended with status {done.returncode}: {told.strip()[:200]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def _kept(path: Path, revision: str) -> dict[str, dict]:
    """Rows that were measured before by this revision."""
    if not path.exists():
        return {}
    try:
        results = read_results(path)
    except ResultsError as error:
        raise UserError(f"--out={path} is there and no result file ({error}): give another") from None
    if results["provenance"]["revision"] != revision:
        print(f"{path} is of revision {results['provenance']['revision'][:12]}: measured anew", flush=True)
        return {}
    measured = ("compiled", "measured", "ratio", "seconds", "remarks")
    return {row["case"]: {key: row[key] for key in measured} for row in results["rows"] if row["seconds"] not in (None, FAILED)}


def _save(path: Path, rows, where: Mapping[str, Any]) -> None:
    write_results(
        path, name=path.stem, title=f"Memory of programs on one {where['device']}", columns=COLUMNS, rows=list(rows), notes=NOTES,
        provenance=where,
    )  # fmt: skip
