"""Result files: checked when written and when read, "not run" where nobody ran it."""

import json
import math

import numpy as np
import pytest

from minite_jax.metrics import results
from minite_jax.metrics.results import (
    ResultsError,
    format_cell,
    plot_results,
    read_results,
    to_markdown,
    write_results,
)

COLUMNS = [
    {"key": "shape", "label": "Shape", "unit": ""},
    {"key": "time", "label": "Time", "unit": "us"},
    {"key": "b300", "label": "B300", "unit": "us"},
    {"key": "ratio", "label": "Against bf16", "unit": "x"},
]
ROWS = [
    {"shape": "8192 x 4096", "time": np.float32(1234.5), "b300": None, "ratio": 1.53},
    {"shape": "a|b", "time": math.nan, "b300": None, "ratio": None},
]
PROVENANCE = {
    "device": "NVIDIA H200",
    "device_count": 2,
    "versions": {"jax": "0.11.2"},
    "revision": "0123456789abcdef",
    "dirty": True,
    "date": "2026-11-29T20:00:00+00:00",
    "command": "python -m experiments.benchmark",
}


def write(path, **changes):
    given = {"name": "matmul", "title": "Matmul", "columns": COLUMNS, "rows": ROWS, "provenance": PROVENANCE}
    return write_results(path, **(given | changes))


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "matmul.json"
    written = write(path, notes="One run.")
    read = read_results(path)
    assert str(read) == str(written)  # as text, since nan is not equal to itself
    assert read["rows"][0] == {"shape": "8192 x 4096", "time": 1234.5, "b300": None, "ratio": 1.53}
    assert math.isnan(read["rows"][1]["time"])
    assert json.loads(path.read_text())["rows"][1]["time"] == "NaN"
    assert [each.name for each in path.parent.iterdir()] == ["matmul.json"]


def test_provenance_of_this_process_by_default(tmp_path):
    found = write(tmp_path / "x.json", provenance=None)["provenance"]
    assert {"device", "versions", "revision", "date", "command"} <= set(found)


def test_markdown_says_units_origin_and_not_run(tmp_path):
    text = to_markdown(write(tmp_path / "x.json", notes="One run."))
    lines = text.splitlines()
    assert lines[0] == "### Matmul"
    assert lines[2] == "| Shape | Time (us) | B300 (us) | Against bf16 (x) |"
    assert lines[3] == "| --- | ---: | --- | ---: |"
    assert lines[4] == "| 8192 x 4096 | 1,234 | not run | 1.530 |"
    assert lines[5] == r"| a\|b | nan | not run | not run |"
    assert "One run." in lines
    origin = "*2 x NVIDIA H200; jax 0.11.2; revision 0123456789ab with local changes; 2026-11-29T20:00:00+00:00;"
    assert lines[-1] == f"{origin} `python -m experiments.benchmark`*"


def test_sections_are_tables_without_the_columns_that_say_nothing(tmp_path):
    rows = [
        {"shape": "dense", "time": 2.0, "b300": None, "ratio": ""},
        {"shape": "decode", "time": "", "b300": None, "ratio": "failed"},
        {"shape": "dense", "time": None, "b300": None, "ratio": ""},
        {"shape": "decode", "time": "", "b300": None, "ratio": 1.5},
    ]
    lines = to_markdown(write(tmp_path / "x.json", rows=rows, sections="shape")).splitlines()
    assert lines[2:8] == [
        "#### dense",
        "",
        "| Time (us) | B300 (us) |",
        "| ---: | --- |",
        "| 2.000 | not run |",
        "| not run | not run |",
    ]
    assert lines[9:15] == [
        "#### decode",
        "",
        "| B300 (us) | Against bf16 (x) |",
        "| --- | ---: |",
        "| not run | failed |",
        "| not run | 1.500 |",
    ]
    assert read_results(tmp_path / "x.json")["sections"] == "shape"


def test_cells():
    shown = {
        None: "not run",
        True: "yes",
        33540: "33,540",
        1e-8: "1.000e-08",
        0.0: "0.0",
        0.01234: "0.01234",
        "x": "x",
    }
    assert {value: format_cell(value) for value in shown} == shown


def test_plot(tmp_path):
    path = tmp_path / "x.png"
    assert plot_results(write(tmp_path / "x.json"), path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = [{**row, "time": None, "ratio": None} for row in ROWS]
    assert plot_results(write(tmp_path / "y.json", rows=empty), tmp_path / "y.png") is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.json", "x.png", "y.json"]
    # More bars than a person reads: no picture.
    assert plot_results(write(tmp_path / "z.json", rows=ROWS * 40), tmp_path / "z.png") is None


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([("a", "x"), ("b", "x")], ["a", "b"]),
        ([("a", "x"), ("a", "y")], ["a x", "a y"]),
        ([("a", "x"), ("a", "x")], ["a x", "a x"]),
        ([("a", "x" * 60), ("a", "y")], None),  # no room beside the bars
    ],
)
def test_plot_names_rows_by_few_columns(tmp_path, monkeypatch, rows, names):
    figures = []
    monkeypatch.setattr(results, "save_figure", lambda figure, path: figures.append(figure) or path)
    columns = [dict(key=key, label=key, unit="") for key in ("one", "two", "gap", "low", "high")]
    table = write(
        tmp_path / "x.json", columns=columns, rows=[dict(one=a, two=b, gap=1.0, low=0.5, high=2.0) for a, b in rows]
    )
    assert (plot_results(table, tmp_path / "x.png") is None) == (names is None)
    for axes in [axes for figure in figures for axes in figure.axes]:
        assert [label.get_text() for label in axes.get_yticklabels()] == names
        assert len(axes.patches) == len(rows)  # the interval's ends are no bars


def test_tables_of_different_things_are_not_drawn(tmp_path):
    assert plot_results(write(tmp_path / "x.json", sections="shape"), tmp_path / "x.png") is None


def test_plot_labels_every_cell(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(results, "save_figure", lambda figure, path: figures.append(figure) or path)
    plot_results(write(tmp_path / "x.json"), tmp_path / "x.png")
    panels = figures[0].axes
    assert [axes.get_xlabel() for axes in panels] == ["Time (us)", "Against bf16 (x)"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["8192 x 4096", "a|b"]
    assert [text.get_text() for text in panels[0].texts] == ["1,234", "nan"]
    assert [text.get_text() for text in panels[1].texts] == ["1.530", "not run"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "a b"}, "name 'a b' is not letters"),
        ({"columns": []}, "columns is not a list with entries"),
        (
            {"columns": [{"key": "shape", "label": "Shape"}]},
            "column 1 is not an object of key, label and unit",
        ),
        ({"columns": [COLUMNS[0], COLUMNS[0]]}, "two columns have the same key"),
        ({"sections": "size"}, "sections is 'size', which is no column"),
        ({"rows": [{"shape": "x", "time": 1.0}]}, r"row 1 lacks b300, ratio \(null means 'not run'\)"),
        ({"rows": [ROWS[0] | {"extra": 1}]}, "row 1 has extra, which is no column"),
        ({"rows": [ROWS[0] | {"time": [1.0]}]}, "row 1: a metric is a scalar"),
        ({"provenance": {"device": "x"}}, "provenance lacks command, date, revision, versions"),
        ({"provenance": PROVENANCE | {"revision": None}}, "provenance.revision is not a string"),
    ],
)
def test_a_wrong_table_is_not_written(tmp_path, changes, problem):
    with pytest.raises(ResultsError, match=problem) as caught:
        write(tmp_path / "x.json", **changes)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: [], "it is not a JSON object"),
        (lambda content: content | {"schema_version": 2}, "schema_version is 2, this version reads 1"),
        (lambda content: content | {"colour": 1}, "unknown field colour"),
        (lambda content: {k: v for k, v in content.items() if k != "title"}, "title missing"),
        (
            lambda content: content | {"rows": [{"shape": {}, "time": 1, "b300": 1, "ratio": 1}]},
            "dict is no scalar",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, change, problem):
    path = tmp_path / "x.json"
    write(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ResultsError, match=problem):
        read_results(path)


def test_unreadable_files_are_one_line(tmp_path):
    with pytest.raises(ResultsError, match="cannot read .*no.json: No such file or directory; give the path"):
        read_results(tmp_path / "no.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ResultsError, match="x.json is not JSON .*: mend it or run its benchmark again"):
        read_results(tmp_path / "x.json")


def test_labels_of_negative_bars_keep_off_the_names_of_the_rows(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(results, "save_figure", lambda figure, path: figures.append(figure) or path)
    columns = [dict(key="name", label="name", unit=""), dict(key="more", label="more", unit="nats")]
    rows = [dict(name="bf16", more=-5.8e-5), dict(name="nvfp4", more=0.5), dict(name="better", more=-0.5)]
    plot_results(write(tmp_path / "x.json", columns=columns, rows=rows), tmp_path / "x.png")
    (axes,) = figures[0].axes
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("-5.800e-05", 0.0), ("0.5000", 0.5), ("-0.5000", 0.0)]
