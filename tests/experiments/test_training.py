"""The training script end to end, on a model of one layer: what it writes, resume bit for bit, Ctrl-C, wrong input."""

import json
import os
import signal

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments import training
from experiments.training import Run
from minite_jax import checkpoint
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.writer import read_metrics

# One process compiles the updates, once.
pytestmark = [pytest.mark.xdist_group("training"), pytest.mark.timeout(1200)]

_DENSE = dict(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, intermediate_size=16)
_MODELS = {"dense_bf16": _DENSE, "moe_nvfp4": dict(num_experts=2, moe_intermediate_size=16)}


def _config(kind, **changes):
    config = quickstart.get_config()
    config.model.update(dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    config.model.update(_MODELS[kind])
    config.recipe.name = kind.split("_")[1]
    config.task.num_digits = 2
    config.sft.update(dict(steps=3, batch_size=8, extra_steps=0))
    # A coin for a reward: so few steps earn no other, and without one the weights would stand still.
    config.rl.update(dict(steps=3, prompts=4, reward="random"))
    config.sampler.update(dict(samples=2, max_tokens=5))
    config.eval.update(dict(every_sft=0, every_rl=0, prompts=8))
    config.checkpoint.every = 2
    with config.unlocked():
        config.update(changes)
    return config


@pytest.fixture(scope="module", params=["dense_bf16", pytest.param("moe_nvfp4", marks=pytest.mark.slow)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def finished(kind, tmp_path_factory):
    """A whole run: (folder, final state, metrics)."""
    folder = tmp_path_factory.mktemp("run")
    run = Run(_config(kind), folder)
    run()
    return folder, run.state, read_metrics(folder)


def _same_bits(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _without_times(rows):
    return [{key: value for key, value in row.items() if not key.startswith("tokens_per_second")} for row in rows]


def test_what_a_run_writes(kind, finished):
    folder, _, rows = finished
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["phase"] for row in rows] == ["sft"] * 3 + ["rl"] * 3
    for row in rows[3:]:
        assert row[names.GAP_MAX] == 0.0 and row[names.GAP_EXACT_FRACTION] == 1.0 and row[names.GEN_KL_ERROR] == 0.0
        assert row[names.TOKENS_COMPARED] > 0
        wanted = {names.REWARD_MEAN, names.ENTROPY, names.GRAD_NORM, names.LOSS, names.SAMPLER_SPEED, names.LEARNER_SPEED}
        assert wanted <= set(row)
    assert any(row[names.GRAD_NORM] > 0 for row in rows[3:])
    assert {names.ACCURACY_GREEDY, names.ACCURACY_SAMPLED} <= set(rows[2]) & set(rows[5])
    assert json.loads((folder / "config.json").read_text())["recipe"]["name"] == _config(kind).recipe.name
    assert checkpoint.latest_step(folder) == 6 and checkpoint.latest_step(folder / "warmup") == 3
    assert {path.name for path in (folder / "plots").iterdir()} >= {"gap.png", "reward.png", "loss.png"}


@pytest.mark.parametrize("stop_after", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ctrl_c_saves_and_resume_is_bit_for_bit(kind, finished, tmp_path, monkeypatch, stop_after):
    _, state, rows = finished
    finish_step = Run._finish_step

    def interrupted(self, *args, **kwargs):
        if self.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        finish_step(self, *args, **kwargs)

    monkeypatch.setattr(Run, "_finish_step", interrupted)
    with pytest.raises(UserError, match=f"interrupted after step {stop_after}, which is saved"):
        Run(_config(kind), tmp_path)()
    monkeypatch.setattr(Run, "_finish_step", finish_step)
    resumed = Run(_config(kind), tmp_path)
    assert resumed.step == stop_after
    resumed()
    assert _same_bits(resumed.state, state)
    assert _without_times(read_metrics(tmp_path)) == _without_times(rows)


def test_a_finished_run_does_nothing_more(kind, finished):
    folder, state, rows = finished
    again = Run(_config(kind), folder)
    again()
    assert _same_bits(again.state, state) and read_metrics(folder) == rows


@pytest.mark.slow
def test_naive_engine_from_the_same_warmup_has_a_gap(kind, finished, tmp_path):
    folder, _, _ = finished
    config = _config(kind, init_from=str(folder), plot_beside=str(folder))
    config.sft.steps, config.sampler.engine = 0, "naive"
    run = Run(config, tmp_path)
    warm = checkpoint.restore(folder / "warmup", run._first_state(), config, may_differ=training._MAY_DIFFER_FROM_WARMUP)
    assert _same_bits(run.state.train.params, warm.train.params) and run.step == 3
    run()
    rows = read_metrics(tmp_path)
    assert [row["phase"] for row in rows] == ["rl"] * 3
    assert all(row[names.GAP_MAX] > 0 and row[names.GAP_EXACT_FRACTION] < 1 for row in rows)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("model", "num_experts_per_tok", 3, r"--config\.model: num_experts_per_tok=3 must lie between 1 and num_experts=2"),
        ("model", "hidden_size", 40, r"--config\.model: hidden_size=40 must be a positive multiple of 16"),
        ("recipe", "name", "fp4", r"--config\.recipe: no recipe 'fp4'; there are fp32, bf16"),
        ("recipe", "name", "nvfp4_experts", r"--config\.recipe: recipe nvfp4_experts quantises nothing"),
        ("sampler", "engine", "fast", r"--config\.sampler\.engine=fast: choose one of aligned, naive"),
        ("sampler", "top_p", 0.0, r"--config\.sampler: top_p=0\.0 must lie in \(0, 1\]"),
        ("task", "num_digits", 9, r"--config\.task: num_digits=9 must lie between 2 and 6"),
        ("rl", "reward", "praise", r"--config\.rl\.reward=praise: choose one of task, random"),
        ("learner", "micro_batches", 3, r"--config\.learner\.micro_batches=3: must divide sft\.batch_size=8"),
    ],
)
def test_a_wrong_value_is_one_line_and_nothing_is_written(tmp_path, section, field, value, message):
    config = _config("moe_nvfp4")
    config[section][field] = value
    with pytest.raises(UserError, match=message) as caught:
        Run(config, tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_config_is_refused(kind, finished):
    config = _config(kind)
    config.model.rope_theta = 1e5
    with pytest.raises(checkpoint.CheckpointError, match="rope_theta"):
        Run(config, finished[0])


def test_a_gradient_that_is_not_finite_stops_the_run(kind, tmp_path, monkeypatch):
    config = _config(kind)
    first_state = Run._first_state

    def poisoned(self):
        state = first_state(self)
        params = state.train.params | {"final_norm": state.train.params["final_norm"] * float("nan")}
        return state.replace(train=state.train.replace(params=params))

    monkeypatch.setattr(Run, "_first_state", poisoned)
    with pytest.raises(UserError, match="step 1: loss nan.*Lower the learning rate"):
        Run(config, tmp_path)()
