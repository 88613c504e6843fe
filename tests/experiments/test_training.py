"""The training script end to end, on a model of one layer: what it writes, resume bit for bit, Ctrl-C, wrong input."""

import json
import os
import signal

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments import training
from experiments.build import build
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


def _interrupted_run(config, workdir, monkeypatch, stop_after):
    """A run that gets Ctrl-C in its step `stop_after`."""
    finish_step = Run._finish_step

    def interrupted(self, *args, **kwargs):
        if self.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        finish_step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_finish_step", interrupted)
        with pytest.raises(UserError, match=f"interrupted after step {stop_after}, which is saved"):
            Run(config, workdir)()


@pytest.mark.parametrize("stop_after", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ctrl_c_saves_and_resume_is_bit_for_bit(kind, finished, tmp_path, monkeypatch, stop_after):
    _, state, rows = finished
    _interrupted_run(_config(kind), tmp_path, monkeypatch, stop_after)
    resumed = Run(_config(kind), tmp_path)
    assert resumed.step == stop_after
    resumed()
    assert _same_bits(resumed.state, state)
    assert _without_times(read_metrics(tmp_path)) == _without_times(rows)


def test_a_run_that_died_in_its_first_step_begins_again_bit_for_bit(kind, finished, tmp_path, monkeypatch):
    _, state, rows = finished
    check = training.Interrupt.check

    def killed(_):
        raise MemoryError

    monkeypatch.setattr(training.Interrupt, "check", killed)
    with pytest.raises(MemoryError):
        Run(_config(kind), tmp_path)()
    assert checkpoint.latest_step(tmp_path) is None and len(read_metrics(tmp_path)) == 1
    monkeypatch.setattr(training.Interrupt, "check", check)
    again = Run(_config(kind), tmp_path)
    again()
    assert _same_bits(again.state, state) and _without_times(read_metrics(tmp_path)) == _without_times(rows)


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


@pytest.mark.slow
def test_a_level_of_alignment_has_a_gap_and_resumes_bit_for_bit(kind, finished, tmp_path, monkeypatch):
    level = {"dense_bf16": "xla", "moe_nvfp4": "te_weights"}[kind]  # the second makes its own weights after each update
    config = _config(kind, init_from=str(finished[0]))
    config.sft.steps, config.sampler.engine = 0, level
    whole = Run(config, tmp_path / "whole")
    whole()
    rows = read_metrics(tmp_path / "whole")
    assert [row["phase"] for row in rows] == ["rl"] * 3
    assert all(row[names.GAP_MAX] > 0 and row[names.GAP_EXACT_FRACTION] < 1 for row in rows)
    _interrupted_run(config, tmp_path / "parts", monkeypatch, 4)
    with pytest.raises(UserError, match="sampler.engine"):
        Run(_config(kind, init_from=str(finished[0]), sft=config.sft), tmp_path / "parts")
    resumed = Run(config, tmp_path / "parts")
    assert resumed.step == 4
    resumed()
    assert _same_bits(resumed.state, whole.state)
    assert _without_times(read_metrics(tmp_path / "parts")) == _without_times(rows)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.num_experts_per_tok", 3, r"--config\.model: num_experts_per_tok=3 must lie between 1 and num_experts=2"),
        ("model.hidden_size", 40, r"--config\.model: hidden_size=40 must be a positive multiple of 16"),
        ("recipe.name", "fp4", r"--config\.recipe: no recipe 'fp4'; there are fp32, bf16"),
        ("recipe.name", "nvfp4_experts", r"--config\.recipe: recipe nvfp4_experts quantises nothing"),
        ("sampler.engine", "fast", r"--config\.sampler\.engine=fast: choose one of aligned, naive, strict, scales"),
        ("sampler.top_p", 0.0, r"--config\.sampler: top_p=0\.0 must lie in \(0, 1\]"),
        ("task.num_digits", 9, r"--config\.task: num_digits=9 must lie between 2 and 6"),
        ("rl.reward", "praise", r"--config\.rl\.reward=praise: choose one of task, random"),
        ("learner.micro_batches", 3, r"--config\.learner\.micro_batches=3: must divide sft\.batch_size=8"),
        ("model.rope_theta", 0.0, r"--config\.model: rope_theta=0\.0 must be finite and above 0"),
        ("model.rope_theta", float("inf"), r"--config\.model: rope_theta=inf must be finite"),
        ("model.rms_norm_eps", -1e-6, r"--config\.model: rms_norm_eps=-1e-06 must be finite and at least 0"),
        ("model.rms_norm_eps", float("nan"), r"--config\.model: rms_norm_eps=nan must be finite"),
        ("model.num_experts", -1, r"--config\.model: num_experts=-1 must be at least 1, or 0 for a dense model"),
        ("recipe.first_plain", -2, r"--config\.recipe\.first_plain=-2: must be at least -1 \(-1: as the recipe says\)"),
        ("recipe.last_plain", -3, r"--config\.recipe\.last_plain=-3: must be at least -1"),
        ("seed", -1, r"--config\.seed=-1: must lie between 0 and 4294967295"),
        ("seed", 2**32, r"--config\.seed=4294967296: must lie between 0 and 4294967295"),
        ("sft.steps", -1, r"--config\.sft\.steps=-1: must be at least 0"),
        ("sft.extra_steps", -1, r"--config\.sft\.extra_steps=-1: must be at least 0"),
        ("sft.batch_size", 0, r"--config\.sft\.batch_size=0: must lie between 1 and 40, the problems of split 'sft'"),
        ("sft.batch_size", 41, r"--config\.sft\.batch_size=41: must lie between 1 and 40"),
        ("sft.until_trait", "wit", r"--config\.sft\.until_trait=wit: choose one of working"),
        ("rl.steps", -1, r"--config\.rl\.steps=-1: must be at least 0"),
        ("rl.prompts", 0, r"--config\.rl\.prompts=0: must lie between 1 and 40, the problems of split 'rl'"),
        ("rl.prompts", 41, r"--config\.rl\.prompts=41: must lie between 1 and 40"),
        ("rl.clip_low", -0.1, r"--config\.rl\.clip_low=-0\.1: must be finite and at least 0"),
        ("rl.clip_high", float("inf"), r"--config\.rl\.clip_high=inf: must be finite and at least 0"),
        ("rl.clip_high", float("nan"), r"--config\.rl\.clip_high=nan: must be finite and at least 0"),
        (
            "sampler.max_tokens",
            4,
            r"--config\.sampler\.max_tokens=4: must be at least 5, the length of the task's demonstrations",
        ),
        ("eval.prompts", 0, r"--config\.eval\.prompts=0: must lie between 1 and 20, the problems of split 'heldout'"),
        ("eval.prompts", 21, r"--config\.eval\.prompts=21: must lie between 1 and 20"),
        ("eval.every_rl", -1, r"--config\.eval\.every_rl=-1: must be at least 0 \(0: only at the end of a phase\)"),
        ("checkpoint.every", 0, r"--config\.checkpoint\.every=0: must be at least 1"),
        ("checkpoint.keep", 0, r"--config\.checkpoint\.keep=0: must be at least 1"),
        ("plot_beside", "nowhere", r"--config\.plot_beside=nowhere is no run's folder"),
    ],
)
def test_a_wrong_value_is_one_line_and_nothing_is_written(tmp_path, field, value, message):
    config = _config("moe_nvfp4")
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=message) as caught:
        Run(config, tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_run_of_no_step_is_refused(tmp_path):
    config = _config("dense_bf16")
    config.sft.steps = config.rl.steps = 0
    with pytest.raises(UserError, match="there is nothing to do"):
        Run(config, tmp_path)


def test_a_larger_vocabulary_and_the_largest_seed_are_allowed():
    config = _config("dense_bf16", seed=2**32 - 1)
    config.model.vocab_size = 320
    assert build(config).model.vocab_size == 320


@pytest.mark.parametrize("phase", ["sft", "rl"])
def test_a_mistake_in_an_optimizer_names_the_phase(tmp_path, phase):
    config = _config("dense_bf16")
    with config.unlocked():
        config[phase].optimizer.lr = 1e-3
    with pytest.raises(UserError, match=rf"--config\.{phase}\.optimizer: .*unexpected keyword argument 'lr'"):
        Run(config, tmp_path)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_workdir_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir=.*file is a file: give a folder"):
        Run(_config("dense_bf16"), tmp_path / "file" / below)


@pytest.fixture
def dies(monkeypatch):
    """Makes runs die in the first step, after its line of metrics was written; compiles nothing."""
    losses = iter(range(10))

    def supervised(self):
        self.writer.write(0, {"loss": next(losses)})
        raise MemoryError

    monkeypatch.setattr(training, "_pack", lambda *_: None)
    monkeypatch.setattr(Run, "_supervised", supervised)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(dies, tmp_path, capsys):
    for attempt in range(2):
        run = Run(_config("dense_bf16"), tmp_path)
        assert run.step == 0 and not run.resumed
        with pytest.raises(MemoryError):
            run()
        assert read_metrics(tmp_path) == [{"step": 0, "loss": attempt}]
        said = "begun again: the run that was here left no checkpoint" in capsys.readouterr().out
        assert said == (attempt == 1)
        (tmp_path / "metrics.jsonl").write_text("no JSON\n")  # whatever the dead run left


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_that_died_is_not_replaced_by_another(dies, tmp_path, damaged):
    with pytest.raises(MemoryError):
        Run(_config("dense_bf16"), tmp_path)()
    if damaged:
        (tmp_path / "config.json").write_text("{")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=f"nothing was saved there, delete {tmp_path} or choose another --workdir"):
        Run(_config("dense_bf16", seed=0 if damaged else 1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_metrics_of_no_known_run_are_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has a metrics.jsonl without a config.json: .* choose another --workdir"):
        Run(_config("dense_bf16"), tmp_path)


def test_a_resumed_run_may_evaluate_more_often_but_not_otherwise(tmp_path):
    checkpoint.save(tmp_path, 1, Run(_config("dense_bf16"), tmp_path).state, _config("dense_bf16"))
    config = _config("dense_bf16")
    config.eval.every_sft = config.eval.every_rl = 1
    assert Run(config, tmp_path).resumed
    config.eval.prompts = 4  # its evaluation decides whether the warm-up goes on
    with pytest.raises(checkpoint.CheckpointError, match="eval.prompts was 8 and is 4"):
        Run(config, tmp_path)


@pytest.fixture
def warm(tmp_path):
    """A run's folder with a warm-up of no training."""
    folder = tmp_path / "warm"
    config = _config("dense_bf16")
    checkpoint.save(folder / "warmup", 3, Run(config, folder).state, config)
    return folder


def test_a_warmup_that_cannot_be_used_names_the_flag(warm, tmp_path):
    def message(folder, config):
        config.init_from = str(folder)
        with pytest.raises(UserError) as caught:
            Run(config, tmp_path / "run")
        assert str(caught.value).startswith(f"--config.init_from={folder}: ") and "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such folder" in message(tmp_path / "nowhere", _config("dense_bf16"))
    assert "has no finished warm-up" in message(tmp_path, _config("dense_bf16"))
    other = _config("dense_bf16")
    other.recipe.name = "fp32"
    wanted = (
        'has another recipe (recipe.name "bf16" there and "fp32" here): use its recipe, or drop --config.init_from to warm up'
    )
    assert wanted in message(warm, other)
    (warm / "warmup" / "checkpoints" / "3" / "manifest.json").unlink()
    assert "is damaged" in (damaged := message(warm, _config("dense_bf16"))) and damaged.endswith("to warm up anew")


def test_what_a_run_that_is_not_finite_is_advised(warm, tmp_path):
    run = Run(_config("dense_bf16"), warm)
    assert run._how_to_train_more_gently() == "a lower --config.sft.optimizer.learning_rate"
    rl = "a lower --config.rl.optimizer.learning_rate"
    run.state = run.state.replace(phase=run.state.phase + training.RL)
    assert run._how_to_train_more_gently() == f"{rl}, --config.sft.steps=0 and --config.init_from={warm}"
    run.workdir = tmp_path / "run"
    assert run._how_to_train_more_gently() == rl
    run.config.init_from = "elsewhere"
    assert run._how_to_train_more_gently() == f"{rl}, --config.sft.steps=0 and --config.init_from=elsewhere"


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
    with pytest.raises(UserError, match="step 1: loss nan.*new --workdir with a lower --config.sft.optimizer.learning_rate$"):
        Run(config, tmp_path)()
