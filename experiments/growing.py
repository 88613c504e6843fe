"""A result file that is written after every row, for studies that a time limit may cut: run again, it goes on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import cli
from minite_jax.metrics.results import FAILED, format_cell, read_results, write_results

_SUFFIX = flags.DEFINE_string("suffix", "", "Of the table's name, NAME_SUFFIX: for another model or device.")
_MINUTES = cli.minutes_flag()
_RESULTS = cli.results_dir_flag()
cli.revision_flag()

# What a device or a compiler refuses. Anything else is a mistake of ours and ends the study.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError)


class GrowingTable:
    """Rows by name, each written as soon as it is there.

    Rows that the file has are kept where they are whole and of the same device, revision, columns and notes.

    Flags: `--suffix`, `--results_dir`, `--minutes`, `--revision`.

    Args:
      name: of the table, without the suffix.
      columns, notes, table: see `write_results`. The first column has the rows' names.
      start: `time.perf_counter()` when the script began.
    """

    def __init__(self, name: str, *, columns: Sequence[Mapping[str, str]], notes: str, start: float, **table: Any):
        name = f"{name}_{_SUFFIX.value}" if _SUFFIX.value else name
        self._path = Path(_RESULTS.value or "docs/benchmarks") / f"{name}.json"
        self._columns, self._notes, self._table = list(columns), notes, dict(table, name=name)
        self._start, self._origin = start, cli.origin()
        self.rows: dict[str, dict] = self._kept()

    def _kept(self) -> dict[str, dict]:
        if not self._path.is_file():
            return {}
        before, key = read_results(self._path), self._columns[0]["key"]
        # Not "dirty": the file itself may make a checkout so.
        same = all(before["provenance"].get(name) == self._origin[name] for name in ("device", "revision"))
        if not same or before["notes"] != self._notes or before["columns"] != self._columns:
            return {}
        return {row[key]: row for row in before["rows"] if FAILED not in row.values()}

    def fill(self, names: Sequence[str], findings: Callable[[str], Iterator[dict]]) -> int:
        """Measures rows and writes the file.

        Args:
          names: of all rows, in the table's order.
          findings: gives the cells of a row piece by piece. What comes after a refusal of the device is "failed".

        Returns:
          The status of the process: 1 if anything failed.
        """
        for name in names:
            minutes = (time.perf_counter() - self._start) / 60
            if name in self.rows:
                print(f"{name}: kept from {self._path}", flush=True)
            elif _MINUTES.value is not None and minutes > _MINUTES.value:
                print(f"{name}: not begun after {minutes:.1f} minutes; run again to go on", flush=True)
            else:
                self.rows[name] = self._row(name, findings(name))
                rows = [self.rows[each] for each in names if each in self.rows]
                write_results(
                    self._path, columns=self._columns, rows=rows, provenance=self._origin, notes=self._notes, **self._table
                )
        failed = [name for name, row in self.rows.items() if FAILED in row.values()]
        print(f"written: {self._path}" + (f"; failed in part: {', '.join(failed)}" if failed else ""))
        return 1 if failed else 0

    def _row(self, name: str, pieces: Iterator[dict]) -> dict:
        keys = [column["key"] for column in self._columns]
        row = dict.fromkeys(keys, FAILED) | {keys[0]: name}
        try:
            for piece in pieces:
                row |= piece
        except _REFUSALS as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
        cells = ", ".join(f"{key} {format_cell(row[key])}" for key in keys[1:] if row[key] != "")
        print(f"{name}: {cells} [{(time.perf_counter() - self._start) / 60:.1f} minutes]", flush=True)
        return row
