import json
import types

import pytest
from absl.testing import flagsaver

from configs import quickstart
from experiments import run_table
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.results import read_results
from minite_jax.model import tiny_moe


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


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run's metrics; its checkpoint is another test's matter."""
    setup = types.SimpleNamespace(model=tiny_moe(), recipe=types.SimpleNamespace(name="nvfp4"))
    run = types.SimpleNamespace(setup=setup, config=quickstart.get_config())
    monkeypatch.setattr(run_table, "stored_run", lambda folder: run)
    with flagsaver.flagsaver(workdir=str(tmp_path), results_dir=str(tmp_path), name="a_run", every=2):
        yield tmp_path


def test_the_file_can_be_read_again(run_folder):
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run_table.main([])
    table = read_results(run_folder / "a_run.json")
    assert [row["updates"] for row in table["rows"]] == ["none yet", "2 to 3", "4", "all"]
    assert "2 layers of width 64, 8 experts, head dimension 16, 256 words" in table["notes"]


def test_a_run_without_updates(run_folder):
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    with pytest.raises(UserError, match="no update of reinforcement learning yet"):
        run_table.main([])
