"""NVFP4 folders of both layouts: the policy's own numbers go out and come in."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from nvfp4_models import CONFIG, LAYOUTS, assert_same_bits, assert_same_files, random_params, scales_of

import minite_jax as mt
from minite_jax.checkpoint import nvfp4_files
from minite_jax.checkpoint.huggingface import files, filling, placements
from minite_jax.checkpoint.nvfp4_files import layouts, packing
from minite_jax.checkpoint.nvfp4_files.blocks import blocks, quantized_matrices
from minite_jax.model import tiny_dense
from pallas_kernels import nvfp4


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(mt.recipe("nvfp4", matmuls=("experts",)), marks=pytest.mark.slow),
        pytest.param(mt.recipe("nvfp4"), marks=pytest.mark.slow),
        pytest.param(mt.recipe("nvfp4_te"), marks=pytest.mark.slow),
    ],
    ids=["experts", "nvfp4", "nvfp4_te"],
)
def test_matrix_by_matrix_gives_the_bits_of_prepare(tmp_path, recipe):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, mlp_only_layers=())
    params = random_params(config)
    wanted = mt.prepare(params, config, recipe)
    assert_same_bits(nvfp4_files.pack_params(params, config, recipe), wanted)
    for fused in (False, True):
        out = mt.save_huggingface(tmp_path / f"{fused}", params, config, fused_experts=fused)
        assert_same_bits(mt.prepare_huggingface(out, recipe), wanted)


def test_pieces_and_shards(policies, model, tmp_path, monkeypatch):
    """In pieces of a few rows, onto two devices along experts and rows, by the host's way of filling and a device's."""
    wanted = policies("nvfp4")
    out = mt.save_nvfp4(tmp_path / "out", wanted, max_shard_bytes=8_000)
    assert len(list(out.glob("*.safetensors"))) > 3
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(spec):
        axis = "x" if spec.axes[0] in ("expert", "vocab", "heads") else None
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))

    for shard, piece in ((filling._HostShard, 200), (filling._DeviceShard, files.PIECE)):
        monkeypatch.setattr(filling, "_shard_on", lambda device, shard=shard: shard)
        monkeypatch.setattr(files, "PIECE", piece)
        progress = []
        assert_same_bits(mt.load_nvfp4(out, sharding=sharding, progress=progress.append), wanted)
        assert sum(progress) == nvfp4_files.open_nvfp4(out).nbytes
        if shard is filling._HostShard:
            assert_same_bits(mt.prepare_huggingface(model, wanted.recipe, sharding=sharding), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_part", [False, True])
def test_what_comes_in_is_what_went_out(policies, model, tmp_path, layout, in_part):
    part = mt.recipe("nvfp4", first_plain=1, matmuls=("mlp", "experts"))
    policy = mt.prepare_huggingface(model, part) if in_part else policies("nvfp4")
    scales = scales_of(policy)
    out = mt.save_nvfp4(tmp_path / "out", policy, layout=layout, input_scales=scales, like=model)
    again = mt.load_nvfp4(out)
    assert again.recipe == policy.recipe and again.config == policy.config
    assert_same_bits(again, policy)
    read = nvfp4_files.read_input_scales(out)
    assert read.keys() == scales.keys()
    assert all(np.array_equal(read[name], scales[name]) for name in read)
    assert_same_files(out, mt.save_nvfp4(tmp_path / "again", again, layout=layout, input_scales=read, like=out))
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def _by_hand(contents, module, layout):
    """A matrix as the layout's definition says it, in float64."""
    names = layouts.LAYOUTS[layout].suffixes
    dtype, shape, raw = contents[f"{module}.{names['codes']}"]
    assert dtype == "U8"
    stored = np.frombuffer(raw, np.uint8).reshape(shape)
    codes = np.stack([stored & 15, stored >> 4], axis=-1).reshape(shape[0], -1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    dtype, shape, raw = contents[f"{module}.weight_scale"]
    assert dtype == "F8_E4M3"
    scales = np.frombuffer(raw, ml_dtypes.float8_e4m3fn).reshape(shape).astype(np.float64)
    dtype, shape, raw = contents[f"{module}.{names['outer_scale']}"]
    assert dtype == "F32" and shape == ((1,) if layout == "compressed-tensors" else ())
    outer = float(np.frombuffer(raw, np.float32)[0])
    numbers = values * np.repeat(scales, 16, axis=1)
    return (numbers / outer if layout == "compressed-tensors" else numbers * outer), outer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_policys_numbers_by_the_layouts_definition(policies, folder, contents, layout):
    policy = policies("nvfp4")
    stored = contents(folder(layout) / "model.safetensors")
    layer = {name: np.asarray(nvfp4.dequantize(policy.weights["layers"][1][name])) for name in ("qkv", "o", "gate_up", "down")}
    config = policy.config
    heads = np.cumsum([config.num_attention_heads, config.num_key_value_heads]) * config.head_dim
    parts = dict(zip("qkv", np.split(layer["qkv"], heads), strict=True)) | {"o": layer["o"]}
    outers = {}
    for part, wanted in parts.items():
        numbers, outers[part] = _by_hand(stored, f"model.layers.1.self_attn.{part}_proj", layout)
        np.testing.assert_array_equal(numbers, wanted)
    assert outers["q"] == outers["k"] == outers["v"]
    for expert in (2, 10):
        gate_up = np.split(layer["gate_up"][expert], 2)
        for part, wanted in (("gate", gate_up[0]), ("up", gate_up[1]), ("down", layer["down"][expert])):
            numbers, outers[part] = _by_hand(stored, f"model.layers.1.mlp.experts.{expert}.{part}_proj", layout)
            np.testing.assert_array_equal(numbers, wanted)
        assert outers["gate"] == outers["up"]
    router = stored["model.layers.1.mlp.gate.weight"]
    assert router[0] == "F32" and router[2] == np.asarray(policy.weights["layers"][1]["router"]).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_and_up_of_unlike_size_share_an_outer_scale(policies, tmp_path, contents, layout):
    """H09: gate all 1, up all 10, read apart and by the one scale that an engine keeps for both."""
    policy = policies("nvfp4")
    first, *others = policy.weights["layers"]
    matrix_NK = np.concatenate([np.full((32, 32), value, np.float32) for value in (1, 10)])
    gate_up = packing._quantize(matrix_NK, policy.recipe.quantized.weight).replace(fp8_exact=first["gate_up"].fp8_exact)
    changed = policy.replace(weights=policy.weights | {"layers": (first | {"gate_up": gate_up}, *others)})
    stored = contents(mt.save_nvfp4(tmp_path / "out", changed, layout=layout) / "model.safetensors")
    (gate, one), (up, other) = (_by_hand(stored, f"model.layers.0.mlp.{part}_proj", layout) for part in ("gate", "up"))
    assert (gate == 1).all() and (up == 10).all() and one == other


def test_back_to_plain_numbers_and_again(policies, model, tmp_path):
    """hf -> nvfp4 -> hf: the numbers that the policy stands for, in bfloat16, bit for bit. What is made of them is the same
    numbers, though it may spell them otherwise, and then nothing changes any more.
    """
    policy = policies("nvfp4")
    wanted = nvfp4_files.unpack_params(policy)
    one = mt.save_huggingface(tmp_path / "one", policy.weights, policy.config)
    config, read = mt.load_huggingface(one)
    assert_same_bits(read, wanted)
    second = mt.prepare_huggingface(one, policy.recipe)
    assert_same_bits(nvfp4_files.unpack_params(second), wanted)
    assert_same_files(one, mt.save_huggingface(tmp_path / "two", second.weights, config))
    assert_same_bits(mt.prepare_huggingface(tmp_path / "two", policy.recipe), second)


def test_rounded_norms_are_asked_for(policies, tmp_path):
    moved = policies("nvfp4")
    moved = moved.replace(weights=moved.weights | {"final_norm": moved.weights["final_norm"] * jnp.float32(1 + 2**-12)})
    for dtype in ("float32", "bfloat16"):
        again = mt.load_nvfp4(mt.save_nvfp4(tmp_path / dtype, moved, dtype=dtype))
        is_same = np.array_equal(again.weights["final_norm"], moved.weights["final_norm"])
        assert is_same is (dtype == "float32") and again.weights["final_norm"].dtype == jnp.float32


def test_blocks_cover_the_tree():
    config = tiny_dense(attention_bias=True)
    recipe = mt.recipe("nvfp4")
    quantized = quantized_matrices(config, recipe)
    found = blocks(config, layouts.MODELOPT, quantized, input_scales=True)
    parts = [each.part for each in found]
    assert parts.count("codes") == parts.count("block_scale") == parts.count("outer_scale") == parts.count("input_scale") == 14
    assert len(found) == len({each.placement.tensor for each in found}) == len(placements(config)) + 3 * 14


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_te"])
def test_an_imported_policy_runs(folder, policies, recipe):
    read = mt.load_nvfp4(folder("modelopt", recipe))
    tokens = jnp.arange(8)[None] % 5
    logits = mt.forward(read, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, mt.forward(policies(recipe), tokens))
    assert dataclasses.asdict(read.recipe) == dataclasses.asdict(policies(recipe).recipe)
