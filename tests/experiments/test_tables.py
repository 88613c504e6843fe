"""The tables script makes Markdown and plots of what is there, and touches nothing if a file is wrong."""

import pytest
from absl.testing import flagsaver

from experiments import tables
from minite_jax.metrics.results import ResultsError, write_results

COLUMNS = [{"key": "run", "label": "Run", "unit": ""}, {"key": "speed", "label": "Speed", "unit": "tokens/s"}]


@pytest.fixture
def folder(tmp_path):
    for name, speed in (("fast", 100), ("later", None)):
        path = tmp_path / "results" / f"{name}.json"
        write_results(path, name=name, title=f"Table {name}", columns=COLUMNS, rows=[{"run": "a", "speed": speed}])
    return tmp_path


def make(folder, **given):
    with flagsaver.flagsaver(results=str(folder / "results"), out=str(folder / "out"), **given):
        tables.main(["tables"])
    return sorted(path.name for path in (folder / "out").iterdir())


def test_every_table(folder, capsys):
    assert make(folder) == ["fast.md", "fast.png", "later.md"]
    assert "![Table fast](fast.png)" in (folder / "out" / "fast.md").read_text()
    assert "| a | not run |" in (folder / "out" / "later.md").read_text()
    assert "### Table fast" in capsys.readouterr().out


def test_one_table(folder):
    assert make(folder, table="later") == ["later.md"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"table": "slow"}, "there is no table 'slow' in .*: choose from fast, later"),
        ({}, "spoilt.json is not JSON"),
    ],
)
def test_what_is_wrong_is_one_line_and_writes_nothing(folder, given, problem):
    (folder / "results" / "spoilt.json").write_text("") if not given else None
    with pytest.raises(ResultsError, match=problem):
        make(folder, **given)
    assert not (folder / "out").exists()


def test_an_empty_folder_is_said(tmp_path):
    with pytest.raises(ResultsError, match="there is no result file in"):
        make(tmp_path)
