"""How much memory a model takes: estimated for any GPU's shape without a GPU, and measured on one.

    python -m experiments.memory estimate                          # tables and docs/models.md, on any machine; some minutes
    python -m experiments.memory estimate --of_model=qwen3_8b      # one model, printed only
    python -m experiments.memory calibrate --minutes=9             # on a GPU: measures the cases of the page beside the estimates
    python -m experiments.memory calibrate --cases='update-*-2-*'  # some of them
    python -m experiments.memory page                              # docs/models.md again, from the files of the other two

`--out` is the file to write, by default docs/benchmarks/memory_estimate.json or memory_DEVICE.json. `calibrate` runs each case in
a process of its own, because the peak that a device reports never falls, saves after each, and keeps what the file has from the
same revision: run it again to go on. (`case` is what it starts.) `estimate` needs no GPU, but Triton's Python package (Linux).
"""

import os

# Before JAX is imported: what a case has is to be what it asked for.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import fnmatch
from pathlib import Path

import jax
from absl import flags

from experiments import cli, memory_calibration, memory_tables
from minite_jax.errors import UserError
from minite_jax.metrics.results import to_markdown, write_results

_MODEL = flags.DEFINE_enum("of_model", None, memory_tables.MODELS, "estimate: this model alone, printed and not written.")
_CASES = flags.DEFINE_list("cases", ["*"], "calibrate: patterns of the names of cases; `case`: one name.")
_PAGE = flags.DEFINE_string("page", "docs/models.md", "The page to write.")
_TINY = flags.DEFINE_bool("tiny", False, "calibrate: a tiny model, to try the script where there is no GPU.")
_OUT = cli.out_flag()
_MINUTES = cli.minutes_flag()
cli.revision_flag()

FOLDER = Path("docs/benchmarks")
COMMANDS = ("estimate", "calibrate", "case", "page")


def estimate() -> None:
    """Estimates the tables; writes them and the page, or prints those of one model."""
    models = memory_tables.MODELS if _MODEL.value is None else (_MODEL.value,)
    rows = []
    for row in memory_tables.rows(models):
        rows.append(row)
        print(" ".join(str(row[key]) for key in ("table", "model", "devices", "recipe", "remat")).rstrip(), flush=True)
    table = dict(
        name="memory_estimate", title="Memory of a device, estimated", columns=memory_tables.COLUMNS, rows=rows,
        notes=memory_tables.NOTES, sections="table", provenance=cli.origin(),
    )  # fmt: skip
    if _MODEL.value is not None:
        print(to_markdown(table))
        return
    path = Path(_OUT.value or FOLDER / "memory_estimate.json")
    write_results(path, **table)
    print(f"written to {path}")
    page()


def calibrate() -> None:
    """Measures the cases on the device at hand, each in a process of its own, and writes them beside their estimates."""
    cases = memory_calibration.TINY if _TINY.value else memory_calibration.CASES
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in _CASES.value)]
    if not chosen:
        known = ", ".join(case.name for case in cases)
        raise UserError(f"--cases={','.join(_CASES.value)} names no case; there are {known}")
    memory_calibration.calibrate(
        chosen, None if _OUT.value is None else Path(_OUT.value), FOLDER, minutes=_MINUTES.value, where=cli.origin()
    )


def case() -> None:
    """Measures one case in this process and prints what it found: for `calibrate`."""
    memory_calibration.measure(memory_calibration.find(_CASES.value[0]))


def page() -> None:
    """Writes the page from the files."""
    path = memory_tables.write_page(Path(_PAGE.value), FOLDER)
    print(f"written to {path}")


def main(argv: list[str]) -> None:
    if argv[1] in ("estimate", "calibrate"):
        # Estimates are made of shapes: a GPU must not be opened here, its memory is the cases'.
        jax.config.update("jax_platforms", "cpu")
    {"estimate": estimate, "calibrate": calibrate, "case": case, "page": page}[argv[1]]()


if __name__ == "__main__":
    cli.run(main, commands=COMMANDS)
