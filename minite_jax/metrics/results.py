"""Result files: the figures of a benchmark or a table as JSON, and the Markdown and plots made from them.

One file is one table:

    {"schema_version": 1, "name": "matmul", "title": "...", "provenance": {...}, "notes": "...",
     "columns": [{"key": "time", "label": "Time", "unit": "us"}, ...],
     "rows": [{"time": 12.5, ...}, ...]}

Every row has every column. A cell that was not run is null and is shown as "not run"; a figure that came out
as NaN or infinite is the string "NaN", "Infinity" or "-Infinity", as in `metrics.jsonl`; where a column says
nothing about a row the cell is "". A measurement that was tried and failed is the string "failed".

An optional "sections" names a column: each of its values then heads a table of its own, without the columns that
say nothing there.
"""

import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minite_jax.errors import UserError
from minite_jax.files import replaced
from minite_jax.metrics.plots import COLOURS, new_figure, save_figure
from minite_jax.metrics.provenance import provenance as current_provenance
from minite_jax.metrics.writer import decode_scalar, encode_scalar

SCHEMA_VERSION = 1
NOT_RUN = "not run"
FAILED = "failed"
_FIELDS = {"schema_version", "name", "title", "provenance", "rows", "columns", "notes"}
_OPTIONAL_FIELDS = {"sections"}
_COLUMN_FIELDS = {"key", "label", "unit"}
# Without these a figure has no origin (contract: device, versions and revision with every figure).
_PROVENANCE_FIELDS = {"device", "versions", "revision", "date", "command"}
# A picture with more bars than this says less than the table does.
_MOST_BARS = 60
_LONGEST_NAME = 48  # letters beside a bar
_LONGEST_LEGEND = 72  # letters of a legend's line
_ENDS = ("low", "high")
_BAR_COLOURS = (*COLOURS, "#5b8e5a", "#e0a030", "#7a5ba8", "#5f6b73")


class ResultsError(UserError):
    """A result file that cannot be read or that does not follow the schema."""


def write_results(
    path: str | os.PathLike,
    *,
    name: str,
    title: str,
    columns: Sequence[Mapping[str, str]],
    rows: Sequence[Mapping[str, Any]],
    notes: str = "",
    provenance: Mapping[str, Any] | None = None,
    sections: str | None = None,
) -> dict[str, Any]:
    """Checks a table and writes it, under a temporary name that is then renamed.

    Args:
        path: the JSON file; its folder is made if missing.
        name: short name, letters, digits, `_`, `-` and `.`.
        title: what the table shows, for people.
        columns: for each column its `key` in the rows, its `label`, and its `unit` ("" if it has none).
        rows: for each row a scalar (or None: not run) for every column's key.
        notes: what a reader has to know; Markdown.
        provenance: where the figures come from; None means this process, now.
        sections: key of a column of strings; the rows of each of its values become a table of their own.

    Returns:
        The content of the file, as `read_results` gives it.

    Raises:
        ResultsError: something is missing, unknown, or of the wrong type; says where. Or there can be no such folder.
    """
    path = Path(path)
    results = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "title": title,
        "provenance": dict(current_provenance() if provenance is None else provenance),
        "columns": [dict(column) for column in columns],
        "rows": [_encode_row(str(path), number, row) for number, row in enumerate(rows, start=1)],
        "notes": notes,
    } | ({} if sections is None else {"sections": sections})
    _check(str(path), results)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(
            f"cannot make the folder {path.parent}: {error.strerror}; name another folder for {path.name}"
        ) from error
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    return _decoded(results)


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """Reads and checks a result file.

    Raises:
        ResultsError: there is no such file, or it does not follow the schema; says where.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}; give the path of a result file") from error
    try:
        results = json.loads(text)
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON ({error}): mend it or run its benchmark again") from None
    _check(str(path), results)
    return _decoded(results)


def to_markdown(results: Mapping[str, Any]) -> str:
    """Returns a table as Markdown: title, table with units (one for each section), notes, and where the figures come from."""
    columns, rows, key = results["columns"], results["rows"], results.get("sections")
    if key is None:
        lines = [f"### {results['title']}", "", *_table(columns, rows)]
    else:
        lines = [f"### {results['title']}"]
        for section, told, inside in by_section(columns, rows, key):
            lines += ["", f"#### {section}", "", *_table(told, inside)]
    if results["notes"]:
        lines += ["", results["notes"]]
    return "\n".join([*lines, "", _origin(results["provenance"]), ""])


def by_section(
    columns: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, Any]], key: str
) -> Iterator[tuple[str, list[Mapping[str, str]], list[Mapping[str, Any]]]]:
    """The tables that a column of section names makes of a table: name, the columns that say something there, rows."""
    for section in dict.fromkeys(row[key] for row in rows):
        inside = [row for row in rows if row[key] == section]
        yield section, [c for c in columns if c["key"] != key and any(row[c["key"]] != "" for row in inside)], inside


def plot_results(results: Mapping[str, Any], path: str | os.PathLike) -> Path | None:
    """Draws a table as bars: one panel for each unit, one group for each row, named by as few of its first text columns as tell
    the rows apart. Columns `low` and `high`, the ends of an interval, are no bars.

    Args:
        results: a table from `read_results` or `write_results`.
        path: the PNG to write, under a temporary name first.

    Returns:
        `path`, or None where the table has no number to draw, more than anybody could read, names too long to stand beside bars,
        or sections, which are tables of different things.

    Raises:
        ImportError: matplotlib is not installed; says which extra has it.
    """
    rows = results["rows"]
    columns = [column for column in results["columns"] if column["key"] not in _ENDS and _is_numeric(rows, column["key"])]
    drawable = sum(_drawable(row[column["key"]]) for row in rows for column in columns)
    if not 0 < drawable <= _MOST_BARS:
        return None
    groups = _row_names(results)
    if "sections" in results or max(map(len, groups)) > _LONGEST_NAME:
        return None
    units = list(dict.fromkeys(column["unit"] for column in columns))
    height = sum(0.8 + len(rows) * (0.2 + 0.22 * sum(c["unit"] == unit for c in columns)) for unit in units)
    with new_figure(figure_figsize=(8.0, max(2.6, height + 0.8)), axes_grid_axis="x") as figure:
        figure.suptitle(textwrap.fill(results["title"], 70), fontweight="bold", x=0.01, ha="left")
        panels = figure.subplots(len(units), 1, squeeze=False)[:, 0]
        for axes, unit in zip(panels, units, strict=True):
            _bars(axes, groups, rows, [column for column in columns if column["unit"] == unit])
        provenance = results["provenance"]
        figure.supxlabel(f"{provenance['device']}, {provenance['date'][:10]}", fontsize=8, color="#666666")
        return save_figure(figure, Path(path))


def _row_names(results: Mapping[str, Any]) -> list[str]:
    """What the rows are called: the first text columns that tell them apart, or else all, or numbers."""
    rows = results["rows"]
    texts = [column["key"] for column in results["columns"] if any(isinstance(row[column["key"]], str) for row in rows)]
    for count in range(1, len(texts) + 1):
        names = [" ".join(format_cell(row[key]) for key in texts[:count]) for row in rows]
        if len(set(names)) == len(names):
            return names
    return names if texts else [str(number) for number in range(1, len(rows) + 1)]


def format_cell(value: Any) -> str:
    """Returns a cell as people read it: "not run" for None, thousands apart, floats with four digits."""
    if value is None:
        return NOT_RUN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value) or value == 0:
            return str(value)
        if not 1e-4 <= abs(value) < 1e9:
            return f"{value:.3e}"
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}"
    return str(value)


def _table(columns: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    numeric = [_is_numeric(rows, column["key"]) for column in columns]
    lines = [
        "| " + " | ".join(_escape(heading(column)) for column in columns) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(_escape(format_cell(row[column["key"]])) for column in columns) + " |")
    return lines


def _bars(axes: Any, groups: list[str], rows: Sequence[Mapping[str, Any]], columns: list[Mapping[str, str]]) -> None:
    width = 0.8 / len(columns)
    for index, column in enumerate(columns):
        values = [row[column["key"]] for row in rows]
        places = [number + (index - (len(columns) - 1) / 2) * width for number in range(len(rows))]
        lengths = [value if _drawable(value) else 0.0 for value in values]
        colour = _BAR_COLOURS[index % len(_BAR_COLOURS)]
        axes.barh(places, lengths, height=width * 0.9, color=colour, label=column["label"])
        for place, length, value in zip(places, lengths, values, strict=True):
            # On the right of 0 for a negative value too: on its left the text would run into the names of the rows.
            where = dict(xytext=(3, 0), textcoords="offset points", va="center", fontsize=8.5)
            axes.annotate(format_cell(value), (max(length, 0.0), place), **where)
    axes.set_yticks(range(len(rows)), groups)
    axes.invert_yaxis()  # first row on top, as in the table
    axes.margins(x=0.12)
    if len(columns) == 1:
        axes.set_xlabel(heading(columns[0]))
    else:
        axes.set_xlabel(columns[0]["unit"])
        in_a_line = sum(len(column["label"]) for column in columns) <= _LONGEST_LEGEND
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4 if in_a_line else 1, fontsize="small")


def _drawable(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_numeric(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether a column holds numbers: at least one, and else only cells that are empty, failed or not run."""
    values = [row[key] for row in rows if row[key] not in (None, "", FAILED)]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def heading(column: Mapping[str, str]) -> str:
    """A column's label with its unit."""
    return f"{column['label']} ({column['unit']})" if column["unit"] else column["label"]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _origin(provenance: Mapping[str, Any]) -> str:
    count = provenance.get("device_count", 1)
    device = f"{count} x {provenance['device']}" if count != 1 else provenance["device"]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    revision = provenance["revision"][:12] + (" with local changes" if provenance.get("dirty") else "")
    return f"*{device}; {versions}; revision {revision}; {provenance['date']}; `{provenance['command']}`*"


def _encode_row(where: str, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {key: encode_scalar(value) for key, value in row.items()}
    except TypeError as error:
        raise ResultsError(f"{where}, row {number}: {error}") from error


def _decoded(results: dict[str, Any]) -> dict[str, Any]:
    rows = [{key: decode_scalar(value) for key, value in row.items()} for row in results["rows"]]
    return {**results, "rows": rows}


def _check(where: str, results: Any) -> None:
    def demand(condition: bool, problem: str) -> None:
        if not condition:
            raise ResultsError(f"{where} does not follow the schema: {problem}")

    demand(isinstance(results, dict), "it is not a JSON object")
    missing, unknown = _FIELDS - set(results), set(results) - _FIELDS - _OPTIONAL_FIELDS
    demand(not missing, f"{', '.join(sorted(missing))} missing")
    demand(not unknown, f"unknown field {', '.join(sorted(unknown))}")
    version = results["schema_version"]
    demand(version == SCHEMA_VERSION, f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}")
    for field in ("name", "title", "notes"):
        demand(isinstance(results[field], str), f"{field} is not a string")
    demand(
        bool(re.fullmatch(r"[\w.-]+", results["name"])),
        f"name {results['name']!r} is not letters, digits, _ - .",
    )
    demand(isinstance(results["provenance"], dict), "provenance is not an object")
    missing = _PROVENANCE_FIELDS - set(results["provenance"])
    demand(not missing, f"provenance lacks {', '.join(sorted(missing))}")
    demand(isinstance(results["provenance"]["versions"], dict), "provenance.versions is not an object")
    for field in sorted(_PROVENANCE_FIELDS - {"versions"}):
        demand(isinstance(results["provenance"][field], str), f"provenance.{field} is not a string")
    demand(
        isinstance(results["columns"], list) and bool(results["columns"]),
        "columns is not a list with entries",
    )
    for number, column in enumerate(results["columns"], start=1):
        fits = isinstance(column, dict) and set(column) == _COLUMN_FIELDS
        demand(fits, f"column {number} is not an object of key, label and unit")
        demand(
            all(isinstance(text, str) for text in column.values()),
            f"column {number} holds something not a string",
        )
    keys = [column["key"] for column in results["columns"]]
    demand(len(set(keys)) == len(keys), "two columns have the same key")
    demand(results.get("sections", keys[0]) in keys, f"sections is {results.get('sections')!r}, which is no column")
    demand(isinstance(results["rows"], list), "rows is not a list")
    for number, row in enumerate(results["rows"], start=1):
        demand(isinstance(row, dict), f"row {number} is not an object")
        missing, unknown = set(keys) - set(row), set(row) - set(keys)
        demand(not missing, f"row {number} lacks {', '.join(sorted(missing))} (null means {NOT_RUN!r})")
        demand(not unknown, f"row {number} has {', '.join(sorted(unknown))}, which is no column")
        for key, value in row.items():
            scalar = value is None or isinstance(value, bool | int | float | str)
            demand(scalar, f"row {number}, {key}: {type(value).__name__} is no scalar")
