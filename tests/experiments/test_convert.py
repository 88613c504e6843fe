"""The convert script: folders, orbax checkpoints and runs into each other, a table, and mistakes in one line."""

import filecmp
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

import minite_jax as mt
from configs import quickstart
from experiments import convert, synthetic_checkpoint
from experiments.build import build
from experiments.training import RunState
from minite_jax import checkpoint
from minite_jax.checkpoint.nvfp4_files import read_input_scales, unpack_params
from minite_jax.diagnostics import calibrate
from minite_jax.errors import UserError
from minite_jax.learner import init_state
from minite_jax.model import qwen3_30b_a3b, tiny_moe

DATA = Path(__file__).parents[1] / "data" / "huggingface"


def run(**values):
    with flagsaver.flagsaver(**{name: str(value) if isinstance(value, Path) else value for name, value in values.items()}):
        convert.main(["convert"])


def assert_same_files(one, other):
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    assert all(filecmp.cmp(one / name, other / name, shallow=False) for name in os.listdir(one))


@pytest.mark.parametrize("name", ["qwen3_mixed", "llama"])
def test_folder_to_orbax_and_back(tmp_path, capsys, name):
    run(source=DATA / name, target=tmp_path / "orbax")
    run(source=tmp_path / "orbax", target=tmp_path / "out", like=DATA / name)
    assert_same_files(DATA / name, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "read " in printed and "GB/s" in printed and "above the parameters" in printed


def test_folder_to_another_layout(tmp_path):
    run(source=DATA / "qwen3_moe", target=tmp_path / "fused", to="hf", fused_experts=True)
    run(source=tmp_path / "fused", target=tmp_path / "apart", to="hf")
    one, other = (folder / "model.safetensors" for folder in (DATA / "qwen3_moe", tmp_path / "apart"))
    assert filecmp.cmp(one, other, shallow=False)


def test_a_run_to_a_folder(tmp_path):
    """The checkpoint of a training run, as it is before its first step."""
    config = quickstart.get_config()
    setup = build(config)
    params = mt.init_params(setup.model, jax.random.key(3))
    state = RunState(train=init_state(params, setup.sft_optimizer), phase=jax.numpy.int32(0), phase_step=jax.numpy.int32(0))
    checkpoint.save(tmp_path / "run", 0, state, config)
    run(source=tmp_path / "run", target=tmp_path / "out", dtype="float32")
    read_config, read = mt.load_huggingface(tmp_path / "out")
    assert read_config == setup.model
    jax.tree.map(np.testing.assert_array_equal, read, params)
    checkpoint.save(tmp_path / "run", 1, state, config)
    with pytest.raises(UserError, match="--step=0: of a training run the newest checkpoint is read, 1"):
        run(source=tmp_path / "run", step=0, dry_run=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A MoE model whose matrices have few shapes, for the compiler's sake."""
    sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=32)
    config = tiny_moe(vocab_size=48, **sizes)
    folder = mt.save_huggingface(tmp_path_factory.mktemp("plain") / "model", mt.init_params(config, jax.random.key(1)), config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_folder_to_nvfp4_and_back(model, tmp_path, capsys):
    run(source=model, target=tmp_path / "q", to="nvfp4")
    wanted = mt.prepare_huggingface(model, mt.recipe("nvfp4"))
    assert_same_leaves(mt.load_nvfp4(tmp_path / "q"), wanted)
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    # From one layout to the other and back, nothing is quantised again.
    run(source=tmp_path / "q", target=tmp_path / "c", to="nvfp4", layout="compressed-tensors")
    run(source=tmp_path / "c", target=tmp_path / "q2", to="nvfp4")
    assert_same_files(tmp_path / "q", tmp_path / "q2")
    run(source=tmp_path / "c", target=tmp_path / "out")  # plain numbers by default
    jax.tree.map(np.testing.assert_array_equal, mt.load_huggingface(tmp_path / "out")[1], unpack_params(wanted))
    printed = capsys.readouterr().out
    assert printed.count("GB/s") == 8 and "above the parameters" in printed


def assert_same_leaves(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_orbax_to_nvfp4_and_back(model, tmp_path):
    run(source=model, target=tmp_path / "orbax")
    run(source=tmp_path / "orbax", target=tmp_path / "q", to="nvfp4", like=model, recipe="nvfp4", first_plain=0)
    wanted = mt.prepare_huggingface(model, mt.recipe("nvfp4"))
    assert_same_leaves(mt.load_nvfp4(tmp_path / "q"), wanted)
    run(source=tmp_path / "q", target=tmp_path / "masters", to="orbax")
    run(source=tmp_path / "masters", target=tmp_path / "out", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, mt.load_huggingface(tmp_path / "out")[1], unpack_params(wanted))


def test_a_run_has_its_own_recipe(tmp_path):
    config = quickstart.get_config()
    config.recipe.last_plain = 1
    setup = build(config)
    params = mt.init_params(setup.model, jax.random.key(3))
    state = RunState(train=init_state(params, setup.sft_optimizer), phase=jax.numpy.int32(0), phase_step=jax.numpy.int32(0))
    checkpoint.save(tmp_path / "run", 0, state, config)
    source = convert.open_source(tmp_path / "run", None)
    assert convert.choose_recipe(source) == setup.recipe and setup.recipe.last_plain == 1
    with flagsaver.flagsaver(first_plain=1):
        assert convert.choose_recipe(source) == mt.recipe(setup.recipe.name, first_plain=1, last_plain=1)


@pytest.mark.slow
def test_calibration_ids(model, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2, 3], [4, 5, 6]]")
    run(source=model, target=tmp_path / "q", to="nvfp4", calibration=ids)
    policy = mt.load_nvfp4(tmp_path / "q")
    wanted = calibrate(policy, [[1, 2, 3], [4, 5, 6]])
    jax.tree.map(np.testing.assert_array_equal, read_input_scales(tmp_path / "q"), wanted)
    run(source=tmp_path / "q", target=tmp_path / "c", to="nvfp4", layout="compressed-tensors")
    jax.tree.map(np.testing.assert_array_equal, read_input_scales(tmp_path / "c"), wanted)


def test_dry_run_of_nvfp4(tmp_path, capsys):
    run(source=DATA / "qwen3_mixed", to="nvfp4", layout="compressed-tensors", dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("as nvfp4, layout compressed-tensors:")
    scales = [line.split() for line in lines[place:] if "layers.3.mlp.experts.*.gate_proj.weight_global_scale" in line]
    assert scales == [
        ["12", "x", "model.layers.3.mlp.experts.*.gate_proj.weight_global_scale", "F32", "[1]", "layers.3.gate_up.outer_scale"]
    ]
    assert lines[-1] == "would be written as nvfp4"


def test_dry_run_prints_the_table_and_writes_nothing(tmp_path, capsys):
    run(source=DATA / "qwen3_mixed", target=tmp_path / "out", dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    experts = [line.split() for line in lines if "layers.3.mlp.experts" in line]
    assert experts[0] == ["12", "x", "model.layers.3.mlp.experts.*.gate_proj.weight", "BF16", "[16,", "32]", "layers.3.gate_up"]
    config = mt.checkpoint.huggingface.read_config(DATA / "qwen3_mixed")
    count = len(mt.checkpoint.huggingface.placements(config))
    assert lines[-2].startswith(f"{count} tensors, {mt.num_params(config):,} parameters, ")
    assert lines[-1] == f"would be written as orbax to {tmp_path / 'out'}" and not (tmp_path / "out").exists()


def test_mistakes_are_one_line(tmp_path, tmp_path_factory, monkeypatch):
    """And found before any weights are read."""
    monkeypatch.setattr(mt, "load_huggingface", lambda *_, **__: pytest.fail("read"))
    (tmp_path / "other" / "x").mkdir(parents=True)
    ids = tmp_path_factory.mktemp("ids") / "ids.json"
    ids.write_text("[[1, 2], [96]]")
    llama = DATA / "llama"
    for flags, message in (
        (dict(source=tmp_path / "nowhere"), "neither config.json nor checkpoints/"),
        (dict(source=llama), "--target is missing"),
        (dict(source=llama, target=tmp_path / "other"), "other is there already: nothing is written over"),
        (dict(source=llama, target=tmp_path / "a", like=llama), "--like says what a Hugging Face folder looks like"),
        (dict(source=llama, target=tmp_path / "a", recipe="nvfp4"), "--recipe is for NVFP4, and orbax is written"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", recipe="nvfp5"), "--recipe=nvfp5: no recipe 'nvfp5'"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", recipe="bf16"), "recipe bf16 quantises nothing"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", recipe="nvfp4_experts"), "quantises nothing in this model"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", calibration=tmp_path / "no"), "=.*no cannot be read"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", calibration=llama / "config.json"), "else than lists of"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", calibration=ids), "token 96 is none of the vocabulary's 96"),
        (dict(source=llama, target=llama / "config.json" / "a", to="hf"), "cannot be made: .*config.json is no folder"),
        (dict(source=llama, target=tmp_path / "a", to="hf", like=tmp_path), "config.json is missing"),
        (dict(source=llama, target=tmp_path / "a", to="hf", like=DATA / "qwen3_dense"), "qwen3_dense is of another model"),
        (dict(source=llama, target=tmp_path / "a", to="nvfp4", like=DATA / "qwen3_dense"), "qwen3_dense is of another model"),
    ):
        with pytest.raises((UserError, ValueError), match=message) as caught:
            run(**flags)
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.parametrize("to", ["hf", "nvfp4"])
def test_a_full_disk_is_found_before_anything_is_read(tmp_path, monkeypatch, to):
    monkeypatch.setattr(mt, "load_huggingface", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(mt, "prepare_huggingface", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(UserError, match="a needs [1-9][0-9],[0-9]{3} bytes and the disk has 1,000: make room"):
        run(source=DATA / "llama", target=tmp_path / "a", to=to)
    assert os.listdir(tmp_path) == []


def test_after_a_killed_conversion_the_same_command_runs(tmp_path, monkeypatch):
    """What it left is removed, and counts as room."""
    for leftover in (tmp_path / ".out.unfinished", tmp_path / "orbax" / "checkpoints" / ".unfinished-0"):
        leftover.mkdir(parents=True)
        (leftover / "part").write_bytes(bytes(100_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    run(source=DATA / "llama", target=tmp_path / "out", to="hf")
    run(source=DATA / "llama", target=tmp_path / "orbax")
    assert sorted(os.listdir(tmp_path)) == ["orbax", "out"] and os.listdir(tmp_path / "orbax" / "checkpoints") == ["0"]
    with pytest.raises(UserError, match="orbax is there already"):
        run(source=DATA / "llama", target=tmp_path / "orbax")


def test_a_target_that_is_a_link_is_written_where_it_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "new")
    run(source=DATA / "llama", target=tmp_path / "out", to="hf")
    run(source=DATA / "llama", target=tmp_path / "later", to="hf")
    assert_same_files(tmp_path / "disk", tmp_path / "new")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "later" / "model.safetensors").is_file()


def test_synthetic_checkpoint(tmp_path, monkeypatch):
    """The script itself, at another width."""

    def small(num_hidden_layers):
        sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        return qwen3_30b_a3b(num_hidden_layers=num_hidden_layers, num_experts=12, moe_intermediate_size=16, **sizes)

    monkeypatch.setattr(synthetic_checkpoint, "qwen3_30b_a3b", small)
    with flagsaver.flagsaver(out=str(tmp_path / "out"), num_layers=2, max_shard_bytes=20_000):
        synthetic_checkpoint.main(["synthetic_checkpoint"])
    assert len(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]) == 93
    config, params = mt.load_huggingface(tmp_path / "out")
    assert config == small(2)
    assert 0.5 < float(params["layers"][0]["gate_up"].std() * 32**0.5) < 1.5
