import json
import math

import pytest
from absl.testing import flagsaver

from configs import quickstart
from experiments import run_table
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.results import read_results
from minite_jax.metrics.writer import encode_scalar


def _update(step, tokens, gap, reward):
    return {
        names.STEP: step, names.PHASE: "rl", names.TOKENS_COMPARED: float(tokens), names.GAP_MAX: gap,
        names.GAP_EXACT_FRACTION: float(gap == 0), names.REWARD_MEAN: reward, names.ENTROPY: 1.0, names.GRAD_NORM: float(step),
        names.SAMPLER_SPEED: 100.0 * step, names.LEARNER_SPEED: 10.0 * step,
    }  # fmt: skip


ROWS = [
    {names.STEP: 0, names.PHASE: "sft"},
    {names.STEP: 1, names.PHASE: "sft", names.ACCURACY_GREEDY: 0.25, names.ACCURACY_SAMPLED: 0.125},
    _update(2, 30, 0.0, 0.0),
    _update(3, 10, 0.5, 0.5) | {names.ACCURACY_GREEDY: 0.75, names.ACCURACY_SAMPLED: 0.5},
    _update(4, 40, 0.0, 1.0),
]


def test_what_a_stretch_of_updates_came_to():
    before, first, second, whole = run_table.stretches(ROWS, 2)
    assert (before["updates"], before["greedy"], before["sampled"], before["tokens"]) == ("none yet", 0.25, 0.125, "")
    assert (first["updates"], first["tokens"], first["gap_max"], first["exact"]) == ("2 to 3", 40, 0.5, 0.75)
    assert (first["reward"], first["greedy"], first["sampled"], first["sampler"]) == (0.25, 0.75, 0.5, 250.0)
    assert (second["updates"], second["gap_max"], second["exact"], second["greedy"]) == ("4", 0.0, 1.0, "")
    assert (whole["updates"], whole["tokens"], whole["gap_max"], whole["grad_norm"]) == ("all", 80, 0.5, 4.0)
    assert (whole["reward"], whole["learner"], whole["greedy"]) == (0.5, 30.0, 0.75)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "column, name",
    [("gap_max", names.GAP_MAX), ("exact", names.GAP_EXACT_FRACTION), ("sampler", names.SAMPLER_SPEED)],
)
def test_a_figure_that_is_no_number_does_not_vanish(place, column, name):
    rows = [_update(step, 10, 0.0, 0.0) for step in range(3)]
    rows[place][name] = math.nan
    assert math.isnan(run_table.stretches(rows, 20)[-1][column])


def test_no_token_compared():
    assert run_table.stretches([_update(0, 0, 0.0, 0.0)], 1)[0]["exact"] == ""


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run's metrics; its checkpoint is another test's matter."""
    config = quickstart.get_config()
    config.rl.steps = 3
    monkeypatch.setattr(run_table, "stored_config", lambda folder: config)
    with flagsaver.flagsaver(workdir=str(tmp_path), results_dir=str(tmp_path), every=2):
        yield tmp_path


def _record(folder, rows):
    lines = [json.dumps({key: encode_scalar(value) for key, value in row.items()}) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_file_can_be_read_again(run_folder):
    _record(run_folder, ROWS)
    run_table.main([])
    table = read_results(run_folder / f"{run_folder.name}.json")
    assert [row["updates"] for row in table["rows"]] == ["none yet", "2 to 3", "4", "all"]
    assert "2 layers of width 64, 8 experts, head dimension 16, 256 words" in table["notes"]
    assert "The run goes on" not in table["notes"] and "not applied" not in table["notes"]


def test_of_a_run_that_goes_on_the_updates_so_far(run_folder):
    _record(run_folder, [*ROWS[:3], _update(3, 10, math.nan, 0.5) | {"update_applied": 0.0}])
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "phase": "r')  # is being written
    run_table.main([])
    table = read_results(run_folder / f"{run_folder.name}.json")
    assert table["rows"][-1]["tokens"] == 40 and math.isnan(table["rows"][-1]["gap_max"])
    assert table["notes"].endswith(
        " The run goes on: 2 of 3 updates. Updates not applied, because a gradient or a new weight was not finite: 1."
    )


@pytest.mark.parametrize("value", [None, "absent"])
def test_metrics_of_another_version(run_folder, value):
    _record(run_folder, [*ROWS[:4], {key: item for key, item in ROWS[4].items() if key != names.SAMPLER_SPEED}])
    if value is None:
        _record(run_folder, [*ROWS[:4], ROWS[4] | {names.SAMPLER_SPEED: None}])
    with pytest.raises(UserError, match="the metrics of step 4 have no number tokens_per_second/sampler: another version"):
        run_table.main([])


def test_a_run_without_updates(run_folder):
    _record(run_folder, [{names.STEP: 0}, *ROWS[1:2]])
    with pytest.raises(UserError, match="no update of reinforcement learning yet"):
        run_table.main([])


def test_a_file_in_the_folders_place(run_folder):
    _record(run_folder, ROWS)
    taken = run_folder / "metrics.jsonl"
    with (
        flagsaver.flagsaver(results_dir=str(taken)),
        pytest.raises(UserError, match=f"cannot make the folder {taken}: File exists"),
    ):
        run_table.main([])
