"""NVFP4 folders that are spoilt, or quantised otherwise, are refused by file and tensor; so is what cannot be written."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvfp4_models import assert_same_bits, scales_of

import minite_jax as mt
from minite_jax.checkpoint import CheckpointError, nvfp4_files

Q0 = "model.layers.0.self_attn.q_proj"


def _set(tensors, name, value=None, shape=None, dtype=None):
    old = tensors[name]
    tensors[name] = (dtype or old[0], old[1] if shape is None else shape, old[2] if value is None else value)


def _missing_scale(tensors):
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight_scale"]
    return r"lacks tensor model.layers.1.mlp.experts.7.up_proj.weight_scale \[32, 2\]"


def _wrong_shape(tensors):
    dtype, (rows, columns), data = tensors[f"{Q0}.weight_scale"]
    _set(tensors, f"{Q0}.weight_scale", shape=(columns, rows))
    return rf"model.safetensors: tensor {Q0}.weight_scale \(F8_E4M3 \[2, \d+\]\) where config.json asks for \[\d+, 2\]"


def _padded_scales(tensors):
    _, (rows, columns), data = tensors[f"{Q0}.weight_scale"]
    _set(tensors, f"{Q0}.weight_scale", data * 2, (rows, 2 * columns))
    return rf"tensor {Q0}.weight_scale \(F8_E4M3 \[\d+, 4\]\) where config.json asks for \[\d+, 2\]"


def _scale_per_row(tensors):
    _set(tensors, f"{Q0}.weight_scale_2", np.ones(64, np.float32).tobytes(), (64,))
    return rf"tensor {Q0}.weight_scale_2 \(F32 \[64\]\) where config.json asks for \[\]"


def _nan_scale(tensors):
    data = bytearray(tensors[f"{Q0}.weight_scale"][2])
    data[5] = 0x7F
    _set(tensors, f"{Q0}.weight_scale", bytes(data))
    return rf"model.safetensors: tensor {Q0}.weight_scale \(F8_E4M3 .*\) holds NaN"


def _negative_scale(tensors):
    data = bytearray(tensors[f"{Q0}.weight_scale"][2])
    data[5] |= 0x80
    _set(tensors, f"{Q0}.weight_scale", bytes(data))
    return rf"tensor {Q0}.weight_scale \(.*\) holds a negative scale"


def _zero_outer(tensors):
    _set(tensors, f"{Q0}.weight_scale_2", np.float32(0).tobytes())
    return rf"model.safetensors: tensor {Q0}.weight_scale_2 \(F32 \[\]\) is 0.0, which is no scale"


def _nan_outer(tensors):
    _set(tensors, "model.layers.1.mlp.experts.7.down_proj.weight_scale_2", np.float32(np.nan).tobytes())
    return r"tensor model.layers.1.mlp.experts.7.down_proj.weight_scale_2 \(F32 \[\]\) is nan, which is no scale"


def _subnormal_outer(tensors):
    _set(tensors, f"{Q0}.weight_scale_2", np.float32(1e-40).tobytes())
    return rf"tensor {Q0}.weight_scale_2 .* which is no scale"


def _unlike_outers(tensors):
    name = "model.layers.1.mlp.experts.7.up_proj.weight_scale_2"
    _set(tensors, name, (np.frombuffer(tensors[name][2], np.float32) * 2).tobytes())
    return rf"tensor {name} \(F32 \[\]\) is unlike model.layers.1.mlp.experts.7.gate_proj.weight_scale_2: .* share an outer scale"


def _plain_in_part(tensors):
    for suffix in ("weight_scale", "weight_scale_2"):
        del tensors[f"{Q0}.{suffix}"]
    _set(tensors, f"{Q0}.weight", b"\0\0" * 32 * 32, (32, 32), "BF16")
    return rf"has codes of model.layers.0.self_attn.k_proj.weight and not of {Q0}.weight, which is multiplied with it"


def _awq(tensors):
    tensors[f"{Q0}.pre_quant_scale"] = ("BF16", (32,), b"\0" * 64)
    return rf"tensor {Q0}.pre_quant_scale \(BF16 \[32\]\), which this model does not have"


def _codes_as_int32(tensors):
    _set(tensors, f"{Q0}.weight", shape=(32, 4), dtype="I32")
    return rf"has codes of model.layers.0.self_attn.k_proj.weight and not of {Q0}.weight"


@pytest.mark.parametrize(
    "spoil",
    [
        _missing_scale, _wrong_shape, _padded_scales, _scale_per_row, _nan_scale, _negative_scale, _zero_outer, _nan_outer,
        _subnormal_outer, _unlike_outers, _plain_in_part, _awq, _codes_as_int32,
    ],
)  # fmt: skip
def test_spoilt_tensors(folder, contents, rewrite, spoil):
    path = folder("modelopt") / "model.safetensors"
    tensors = contents(path)
    message = spoil(tensors)
    rewrite(path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        mt.load_nvfp4(path.parent)
    assert "\n" not in str(caught.value)


def test_a_divisor_of_zero(folder, contents, rewrite):
    path = folder("compressed-tensors") / "model.safetensors"
    tensors = contents(path)
    _set(tensors, f"{Q0}.weight_global_scale", np.float32(0).tobytes())
    rewrite(path, tensors)
    with pytest.raises(CheckpointError, match=rf"tensor {Q0}.weight_global_scale \(F32 \[1\]\) is 0.0, which is no scale"):
        mt.load_nvfp4(path.parent)


def test_a_file_that_is_cut_off(folder):
    out = folder("modelopt", max_shard_bytes=8_000)
    path = sorted(out.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=rf"{path.name}: tensor \S+ .* which is cut off"):
        mt.load_nvfp4(out)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing; .*index.json says that it holds"):
        mt.load_nvfp4(out)


def _quant(**changes):
    return lambda quant: quant | changes


def _weights(**changes):
    def change(quant):
        group = quant["config_groups"]["group_0"]
        return quant | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}

    return change


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("modelopt", _quant(quant_algo="FP8"), "config.json: quant_algo=FP8 is not read here, only NVFP4 and W4A16_NVFP4"),
        ("modelopt", _quant(quant_algo="MIXED_PRECISION"), "quant_algo=MIXED_PRECISION is not read here"),
        ("modelopt", _quant(group_size=32), "group_size=32, and a block of NVFP4 has 16 numbers"),
        ("modelopt", _quant(quant_method="awq"), "quant_method=awq is not read here"),
        ("modelopt", lambda quant: [quant], r"quantization_config=\[.* is no JSON object"),
        ("compressed-tensors", _quant(format="float-quantized"), "format float-quantized is not read here"),
        ("compressed-tensors", _quant(format=["x"]), r"format \['x'\] is not read here"),
        ("compressed-tensors", _quant(transform_config={"config_groups": {"R1": {}}}), "unknown key transform_config of"),
        ("compressed-tensors", _quant(sparsity_config={"format": "sparse-24-bitmask"}), "unknown key sparsity_config of"),
        ("compressed-tensors", _quant(config_groups={}), r"config_groups=\{\} does not say what is quantised"),
        ("compressed-tensors", _weights(symmetric=False), "group_0 has weights with symmetric=False, and NVFP4 has True"),
        ("compressed-tensors", _weights(strategy="group"), "group_0 has weights with strategy=group, and NVFP4 has tensor_group"),
        ("modelopt", _weights(num_bits=8), "group_0 has weights with num_bits=8, and NVFP4 has 4"),
        ("modelopt", _quant(pre_quant_scale=True), "unknown key pre_quant_scale of the quantisation"),
        ("modelopt", _quant(quantized_layers={"lm_head": {"quant_algo": "FP8"}}), "unknown key quantized_layers"),
        ("compressed-tensors", _quant(config_groups={"group_0": {"weights": {"num_bits": 8}}}), "num_bits=8, and NVFP4 has 4"),
        (
            "compressed-tensors",
            lambda quant: quant | {"config_groups": quant["config_groups"] | {"group_1": {"format": "int-quantized"}}},
            "format int-quantized is not read here",
        ),
    ],
)
def test_other_quantisations_are_refused(folder, edit_json, layout, change, message):
    out = folder(layout)
    quant = json.loads((out / "config.json").read_text())["quantization_config"]
    edit_json(out / "config.json", quantization_config=change(quant))
    with pytest.raises(CheckpointError, match=message) as caught:
        mt.load_nvfp4(out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("modelopt", dict(group_size=None, pre_quant_scale=False, has_zero_point=False, kv_cache_scheme={"num_bits": 8})),
        ("compressed-tensors", dict(sparsity_config={}, transform_config={}, version="0.15.0", global_compression_ratio=1.7)),
    ],
)
def test_what_is_said_to_be_absent_is_no_obstacle(policies, folder, edit_json, layout, more):
    out = folder(layout)
    quant = json.loads((out / "config.json").read_text())["quantization_config"]
    edit_json(out / "config.json", quantization_config=quant | more)
    assert_same_bits(mt.load_nvfp4(out), policies("nvfp4"))


def test_the_two_configurations_must_agree(folder, edit_json):
    out = folder("modelopt")
    edit_json(out / "hf_quant_config.json", quantization={"quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match="hf_quant_config.json: quant_algo=FP8"):
        mt.load_nvfp4(out)
    edit_json(out / "hf_quant_config.json", quantization={"quant_algo": "NVFP4"})
    edit_json(out / "config.json", quantization_config=None)  # old folders have the other file alone
    assert mt.load_nvfp4(out).recipe.name == "nvfp4"


def test_plain_folders_and_nvfp4_folders_name_each_others_reader(model, folder):
    with pytest.raises(CheckpointError, match="has no quantization_config: .* load_huggingface"):
        mt.load_nvfp4(model)
    with pytest.raises(CheckpointError, match="load_nvfp4 reads NVFP4"):
        mt.load_huggingface(folder("modelopt"))


def test_recipes_that_do_not_say_what_is_quantised(folder, edit_json, policies, model, tmp_path):
    out = folder("modelopt")
    with pytest.raises(CheckpointError, match=r"layers.0.down is NVFP4 \(one of 4\), and the given recipe has it otherwise"):
        mt.load_nvfp4(out, mt.recipe("nvfp4_46", first_plain=1))
    edit_json(out / "config.json", minite_jax={"recipe": {"name": "x"}})
    with pytest.raises(CheckpointError, match="minite_jax records no recipe of this version: .*remove the key"):
        mt.load_nvfp4(out)
    # One kind of matrices, of one layer, in part.
    whole, plain = policies("nvfp4"), mt.prepare_huggingface(model, mt.recipe("nvfp4", matmuls=("mlp",)))
    layers = (whole.weights["layers"][0] | {"qkv": plain.weights["layers"][0]["qkv"]}, whole.weights["layers"][1])
    mixed = mt.save_nvfp4(tmp_path / "mixed", whole.replace(weights=whole.weights | {"layers": layers}))
    edit_json(mixed / "config.json", minite_jax=None)
    with pytest.raises(CheckpointError, match="layers.0.qkv is plain .* a recipe quantises whole kinds of matrices"):
        mt.load_nvfp4(mixed)


def test_what_cannot_be_written(policies, model, data, tmp_path):
    policy = policies("nvfp4")
    scales = scales_of(policy)
    spoilt, down = jax.tree.map(lambda x: x, policy.weights), scales["layers.1.down"]
    spoilt["layers"][0]["qkv"] = spoilt["layers"][0]["qkv"].replace(outer_scale=jnp.float32(jnp.nan))
    for message, changed, more in (
        ("recipe bf16 has nothing in NVFP4", mt.prepare_huggingface(model, mt.recipe("bf16")), {}),
        ("layers.0.qkv holds NaN", policy.replace(weights=spoilt), {}),
        (r"'layers.1.down'\] must be \[12\] positive", policy, dict(input_scales=scales | {"layers.1.down": -down})),
        (r"'layers.0.qkv'\] must be \[1\] positive", policy, dict(input_scales=scales | {"layers.0.qkv": np.ones(2)})),
        ("layout='gguf'", policy, dict(layout="gguf")),
        ("is of another model", policy, dict(like=data / "qwen3_moe")),
        ("leave one of them out", policy, dict(like=model, extra={"a": 1})),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            mt.save_nvfp4(tmp_path / "out", changed, **more)
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="quantises nothing in this model"):
        mt.prepare_huggingface(data / "qwen3_dense", mt.recipe("nvfp4_experts"))


def test_a_matrix_with_nan_is_named(policies, model):
    config, params = mt.load_huggingface(model)
    layer = dict(params["layers"][1])
    layer["down"] = np.array(layer["down"])
    layer["down"][5, 0, 0] = np.nan
    params["layers"] = (params["layers"][0], layer)
    with pytest.raises(CheckpointError, match="parameter layers.1.down holds NaN or infinity in matrix 5"):
        nvfp4_files.pack_params(params, config, mt.recipe("nvfp4"))
