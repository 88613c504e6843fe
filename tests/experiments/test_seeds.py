"""The study over seeds: finished runs are neither run nor evaluated again; its rows come from the runs."""

import json
import math

import pytest

from configs import quickstart
from experiments import seeds
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.writer import JsonlWriter


class FakeRun:
    """Stands in for a training run: counts the calls; a run's accuracy is a tenth of the number of calls so far."""

    calls: list[str] = []

    def __init__(self, config, workdir):
        self.config, self.workdir = config, workdir

    def __call__(self):
        self.calls.append(self.workdir.name)
        self.workdir.mkdir(parents=True, exist_ok=True)
        if self.config.rl.steps and len(self.calls) <= 4:
            writer = JsonlWriter(self.workdir)
            for step in range(2):
                gap = {names.GAP_MAX: 0.25 * step, names.GAP_EXACT_FRACTION: float(step == 0)}
                writer.write(step, gap | {names.TOKENS_COMPARED: 10.0})
            writer.close()
        elif len(self.calls) <= 4:
            JsonlWriter(self.workdir).close()
        accuracy = len(self.calls) / 10
        return {
            names.ACCURACY_SAMPLED: accuracy,
            names.ACCURACY_GREEDY: accuracy,
            "eval/working": accuracy,
            "eval/accuracy_working": math.nan,
        }


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(FakeRun, "calls", [])
    monkeypatch.setattr(seeds, "Run", FakeRun)
    return FakeRun.calls


def test_a_finished_study_is_not_run_again(calls, tmp_path):
    first = seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    assert calls == ["warmup_run", "grpo", "random", "sft"] and math.isnan(first["sft"]["eval/accuracy_working"])
    again = seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    assert len(calls) == 4
    assert str(again) == str(first)  # as text: NaN equals itself
    assert not list(tmp_path.rglob("*.tmp"))


def test_only_what_is_missing_or_configured_otherwise_runs(calls, tmp_path):
    seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    (tmp_path / "seed10" / "random" / "evaluation.json").unlink()
    seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    assert calls[4:] == ["random"]
    config = quickstart.get_config()
    config.rl.steps += 1
    config.eval.prompts = 32
    seeds.run_seed(config, 10, tmp_path)
    assert calls[5:] == ["warmup_run", "grpo", "random", "sft"]


def test_a_run_that_is_interrupted_leaves_no_evaluation(calls, tmp_path, monkeypatch):
    def interrupted(self):
        raise UserError("interrupted after step 3")

    monkeypatch.setattr(FakeRun, "__call__", interrupted)
    with pytest.raises(UserError, match="interrupted"):
        seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    assert not list(tmp_path.rglob("evaluation.json"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": CONFIG, "evaluation": 3}'])
def test_an_evaluation_that_cannot_be_read_is_one_line(calls, tmp_path, content):
    config = quickstart.get_config()
    seeds.run_once(config, tmp_path)
    kept = tmp_path / "evaluation.json"
    kept.write_text(content.replace("CONFIG", json.dumps(json.loads(kept.read_text())["config"])))
    with pytest.raises(UserError, match=r"evaluation\.json is not what was written: delete it") as caught:
        seeds.run_once(config, tmp_path)
    assert "\n" not in str(caught.value) and len(calls) == 1


def test_rows(calls, tmp_path):
    evaluations = seeds.run_seed(quickstart.get_config(), 10, tmp_path)
    rows = seeds.summarize(10, evaluations, tmp_path)
    assert [row["arm"] for row in rows] == list(seeds.ARMS.values())
    assert {key for row in rows for key in row} == {column["key"] for column in seeds.COLUMNS}
    assert [row["sampled_before"] for row in rows] == [0.1] * 3 and [row["sampled_after"] for row in rows] == [0.2, 0.3, 0.4]
    assert [row["gap_max"] for row in rows] == [0.25, 0.25, None] and [row["tokens_compared"] for row in rows] == [20, 20, None]
