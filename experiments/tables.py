"""Makes the Markdown and the plots of the result files.

    python -m experiments.tables --results=docs/benchmarks --out=docs/benchmarks    # every table
    python -m experiments.tables --table=matmul                                     # one of them

`--out` is the folder of the Markdown and plots, docs/benchmarks if not given.

Reads `NAME.json` (schema: `minite_jax.metrics.results`), writes `NAME.md` and, where a table has numbers,
`NAME.png`. Cells that nobody has run say "not run".
"""

from pathlib import Path

from absl import flags

from experiments import cli
from minite_jax.files import replaced
from minite_jax.metrics import results as results_lib

_TABLE = flags.DEFINE_string("table", None, "Name of the table to make; without it, every table.")
_RESULTS = flags.DEFINE_string("results", "docs/benchmarks", "Folder of the result files.")
_OUT = cli.out_flag()


def main(argv: list[str]) -> None:
    del argv
    folder = Path(_RESULTS.value)
    paths = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not paths:
        raise results_lib.ResultsError(f"there is no result file in {folder}: give --results=FOLDER with *.json in it")
    if _TABLE.value is not None:
        if _TABLE.value not in paths:
            known = ", ".join(paths)
            raise results_lib.ResultsError(f"there is no table {_TABLE.value!r} in {folder}: choose from {known}")
        paths = {_TABLE.value: paths[_TABLE.value]}
    # All are read before anything is written: a spoilt file stops the script with the old tables in place.
    tables = {name: results_lib.read_results(path) for name, path in paths.items()}
    out = Path(_OUT.value or "docs/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        text = results_lib.to_markdown(table)
        picture = results_lib.plot_results(table, out / f"{name}.png")
        if picture is not None:
            text += f"\n![{table['title']}]({picture.name})\n"
        with replaced(out / f"{name}.md") as unfinished:
            unfinished.write_text(text)
        print(text)


if __name__ == "__main__":
    cli.run(main)
