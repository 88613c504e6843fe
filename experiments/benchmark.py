"""Benchmarks of the kernels, and the table of their tile configurations.

    python -m experiments.benchmark kernels                            # on a GPU, about six minutes
    python -m experiments.benchmark kernels --only=decode,quantize
    python -m experiments.benchmark kernels --only=attention,log_prob --match='router|sampling' --minutes=4
    python -m experiments.benchmark kernels --quick --out=runs/kernels_quick.json     # tiny shapes, to try the script on a CPU
    python -m experiments.benchmark tune --only=decode --minutes=8     # measures tiles, writes pallas_kernels/tuning.json
    python -m experiments.benchmark step --layers=4                    # where an update and a decoded token spend their time

`--out` is the file to write: docs/benchmarks/COMMAND_DEVICE.json if not given (with --quick runs/COMMAND_quick.json), for `tune`
the table that the kernels read. `tune` takes half a minute to a minute for each kernel and shape, and goes on where it stopped.

`kernels` measures short cases first, and none after `--minutes`; `--match` leaves out cases. The table says what is not in it; a
new run begins a new one.

`kernels` writes a result file from which `experiments.tables` makes the page, and prints it as tables. Each case has its time and
speed, the share of what this GPU was measured to do in the same run, and the times of others beside it: cuBLAS in bf16 and fp8,
PyTorch's grouped matmuls, `jax.lax.ragged_dot`, an unfused quantise-dequantise. PyTorch is optional: without it these columns say
"not run". On a Hopper GPU our NVFP4 matmuls are fp8 arithmetic on 4-bit values, and their ceiling is the fp8 one.
"""

import os

# Before JAX is imported: otherwise it takes three quarters of the GPU's memory, and PyTorch needs some too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import functools
import re
import time
from pathlib import Path

import jax
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.kernels import ceilings, limits, measure, step, suites, tune
from experiments.kernels.cases import FULL, QUICK, Case
from experiments.kernels.peers import Peers
from experiments.timing import Calls, TimingError, time_jax
from minite_jax.errors import UserError
from minite_jax.metrics.results import by_section, format_cell, heading, write_results
from minite_jax.optional import require
from pallas_kernels import tuning

_ONLY = flags.DEFINE_list("only", list(suites.SUITES), "Suites to run, separated by commas.")
_OUT = cli.out_flag()
_REPEATS = flags.DEFINE_integer("repeats", 20, "Measurements of each time; the median counts.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Tiny shapes and few repeats: to try the script where there is no GPU.")
_MATCH = flags.DEFINE_string("match", None, "kernels: only the cases in whose 'suite: name, shape' this pattern is found.")
_MINUTES = cli.minutes_flag()  # of `kernels` and `tune`
cli.revision_flag()

_MODEL = flags.DEFINE_enum("model", "qwen3_30b_a3b", ("qwen3_30b_a3b", "qwen3_8b"), "step: whose width and vocabulary.")
_LAYERS = flags.DEFINE_integer("layers", 4, "step: how many layers.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 16, "step: sequences of 1,024 tokens of an update.", lower_bound=1)
_RECIPES = flags.DEFINE_list("recipes", ["nvfp4", "bf16"], "step: precision recipes, separated by commas.")

COMMANDS = ("kernels", "tune", "step")


def device_slug(device_kind: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower().removeprefix("nvidia ")).strip("_")


def chosen_suites(names: list[str]) -> tuple[str, ...]:
    """The suites asked for, in their usual order.

    Raises:
      UserError: there is no such suite.
    """
    unknown = [name for name in names if name not in suites.SUITES]
    if unknown:
        raise UserError(f"--only={','.join(names)}: no suite {unknown[0]!r}; choose from {', '.join(suites.SUITES)}")
    return tuple(name for name in suites.SUITES if name in names)


def matching(asked: list[Case], pattern: str | None) -> list[Case]:
    """The cases in whose words the pattern is found.

    Raises:
      UserError: it is no pattern, or found nowhere.
    """
    if pattern is None:
        return asked
    try:
        chosen = [case for case in asked if re.search(pattern, f"{case.suite}: {case.name}, {case.shape}")]
    except re.error as error:
        raise UserError(f"--match={pattern}: {error}; give a regular expression such as 'router|sampling'") from None
    if not chosen:
        example = f"{asked[0].suite}: {asked[0].name}, {asked[0].shape}"
        raise UserError(f"--match={pattern} is found in no case of the suites asked for; a case reads {example!r}")
    return chosen


def origin(peers: Peers) -> dict:
    """Where the figures come from, with PyTorch's version and the revision that was given."""
    found = cli.origin()
    found["versions"] = {**found["versions"], "torch": peers.version}
    return found


def out_path(command: str, quick: bool) -> Path:
    """The result file of a command."""
    device = device_slug(jax.devices()[0].device_kind)
    return Path(_OUT.value or (f"runs/{command}_quick.json" if quick else f"docs/benchmarks/{command}_{device}.json"))


def kernels() -> list[dict]:
    """Runs the suites, prints and writes their table.

    Returns:
      The rows.

    Raises:
      UserError: a case of ours failed (said at the end, when everything else is written).
    """
    only, quick = chosen_suites(_ONLY.value), _QUICK.value
    if jax.default_backend() != "gpu" and not quick:
        raise UserError("there is no GPU here: --quick tries the script with tiny shapes on a CPU")
    path = out_path("kernels", quick)
    repeats = min(_REPEATS.value, 5) if quick else _REPEATS.value
    others, start = Peers(repeats), time.perf_counter()

    scale = QUICK if quick else FULL
    asked = list(suites.cases(scale, only))
    chosen = matching(asked, _MATCH.value)

    def timer(function, sets, **settings):
        return time_jax(function, sets, **{**settings, "repeats": min(repeats, settings.get("repeats", repeats))})

    found = ceilings.measure(others, timer, quick=quick)
    bench = measure.Bench(others, found, Calls, repeats, calls=1 if quick else None)
    where, done = origin(others), {}

    def save(why: str) -> list[dict]:
        """Every row so far, in the usual order; what is missing is said in the notes."""
        measured = [case for case in asked if id(case) in done]
        rows = [*measure.ceiling_rows(found), *(done[id(case)] for case in measured), *bench.other_rows()]
        missing = measure.missing_words(asked, chosen, measured, why, _MATCH.value)
        write_results(
            path,
            name=path.stem,
            title=f"Kernels on one {jax.devices()[0].device_kind}" + (" (tiny shapes: these times say nothing)" if quick else ""),
            columns=measure.COLUMNS,
            rows=rows,
            notes=f"{missing}\n\n{measure.NOTES}" if missing else measure.NOTES,
            provenance=where,
            sections="suite",
        )
        return rows

    def more() -> bool:
        return _MINUTES.value is None or time.perf_counter() - start < 60 * _MINUTES.value

    # The shortest first: what a run that is cut has not measured is then little.
    in_turn = sorted(chosen, key=lambda case: measure.least_seconds(case, found)[1] or 0.0)
    for case, row in bench.rows(in_turn, more):
        done[id(case)] = row
        save("the run was stopped before them")  # after each case: a run that is cut keeps what it measured
        print(progress_line(row, time.perf_counter() - start), flush=True)
    rows = save(f"--minutes={_MINUTES.value:g} were over before them" if len(done) < len(chosen) else "")
    show(rows)
    print(f"goals {measure.summary(rows)}; {time.perf_counter() - start:.0f} s; written to {path}")
    # Tiny shapes may be too short for the clock, and the ceilings of tiny shapes are none; that says nothing about the kernels.
    said_nothing = (TimingError.__name__, *limits.IMPOSSIBLE) if quick else ()
    failed = [row["case"] for row in measure.failures(rows) if not any(words in row["remarks"] for words in said_nothing)]
    if failed:
        raise UserError(f"{len(failed)} cases could not be measured, the first is {failed[0]!r}: see the remarks in {path}")
    return rows


def progress_line(row: dict, seconds: float) -> str:
    """One line for a case that has just been measured."""
    figures = [f"{format_cell(row['time'])} us"]
    figures += [f"{format_cell(row[key])} {unit}" for key, unit in (("tflops", "TFLOP/s"), ("gbs", "GB/s")) if row[key]]
    figures += [f"{format_cell(row[key])} x {key.removeprefix('vs_')}" for key in row if key.startswith("vs_") and row[key] != ""]
    return f"{seconds:5.0f} s  {row['suite']:10} {row['case']}: {', '.join(figures)} {row['remarks']}".rstrip()


def show(rows: list[dict]) -> None:
    """Prints the rows, a table for each suite, without the columns that say nothing there."""
    console = require("rich.console", "experiments").Console(width=None if os.isatty(1) else 240)
    table_type = require("rich.table", "experiments").Table
    for suite, told, inside in by_section(measure.COLUMNS, rows, "suite"):
        columns = [column for column in told if column["key"] != "remarks"]  # they are in the file, and were printed
        table = table_type(title=suite, title_justify="left")
        for column in columns:
            table.add_column(heading(column), justify="right" if column["unit"] else "left", overflow="fold")
        for row in inside:
            table.add_row(*(format_cell(row[column["key"]]) for column in columns))
        console.print(table)


def tune_table() -> None:
    """Measures tile configurations for the suites and writes the table that kernels read."""
    only, start = chosen_suites(_ONLY.value), time.perf_counter()
    if jax.default_backend() != "gpu":
        raise UserError("there is no GPU here: tiles are measured on one")
    path = Path(_OUT.value) if _OUT.value else tuning.TABLE

    def more() -> bool:
        return _MINUTES.value is None or time.perf_counter() - start < 60 * _MINUTES.value

    tune.tune(suites.cases(FULL, only), Calls, path, functools.partial(print, flush=True), more)


def steps() -> list[dict]:
    """Measures the steps of the learner and of the sampler, prints and writes their tables and a picture.

    Returns:
      The rows.
    """
    quick = _QUICK.value
    if jax.default_backend() != "gpu" and not quick:
        raise UserError("there is no GPU here: --quick tries the script with a tiny model on a CPU")
    path = out_path("step", quick)
    config = mt.model.tiny_moe() if quick else getattr(mt.model, _MODEL.value)(num_hidden_layers=_LAYERS.value)
    settings = step.TINY if quick else step.Settings(rows=_ROWS.value)
    width = "a tiny model: these times say nothing"
    if not quick:
        width = f"{_MODEL.value}, {_LAYERS.value} layers; {step.in_words(settings)}"
    where, measured = origin(Peers(1)), []

    def save() -> list[dict]:
        """After each program: a run that is cut has what it measured."""
        rows = [row for each in measured for row in step.rows(each)]
        table = write_results(
            path,
            name=path.stem,
            title=f"Where a step's time goes on one {jax.devices()[0].device_kind} ({width})",
            columns=step.COLUMNS,
            rows=rows,
            notes=step.NOTES,
            provenance=where,
            sections="program",
        )
        step.draw(table, path.with_name(f"{path.stem}_parts.png"))
        return rows

    for recipe in _RECIPES.value:
        for each in step.measure(config, mt.recipe(recipe), settings):
            measured.append(each)
            rows = save()
            print(f"{each.program}: {1e3 * each.seconds:.2f} ms, {each.tokens / each.seconds:,.0f} tokens/s", flush=True)
    print(f"written to {path}, with a picture beside it")
    return rows


def main(argv: list[str]) -> None:
    {"kernels": kernels, "tune": tune_table, "step": steps}[argv[1]]()


if __name__ == "__main__":
    cli.run(main, commands=COMMANDS)
