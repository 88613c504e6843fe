"""NVFP4 folders of both layouts: the policy's own numbers go out and come in; what is spoilt is refused by file and tensor."""

import dataclasses
import filecmp
import fnmatch
import json
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.checkpoint import CheckpointError, nvfp4_files
from minite_jax.checkpoint.huggingface import files, filling, placements
from minite_jax.checkpoint.nvfp4_files import layouts
from minite_jax.checkpoint.nvfp4_files.blocks import blocks, quantized_matrices
from minite_jax.checkpoint.nvfp4_files.filling import is_fp8_exact
from minite_jax.model import tiny_dense, tiny_moe
from minite_jax.model.params import abstract_params, abstract_specs
from pallas_kernels import nvfp4, operands
from pallas_kernels.nvfp4.expanded import ExpandedArray

LAYOUTS = tuple(nvfp4_files.LAYOUTS)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_same_files(one, other):
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for name in os.listdir(one):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


# A dense layer and a MoE one, biases, more than ten experts; and matrices of two shapes only, for the compiler's sake.
CONFIG = tiny_moe(
    hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32, moe_intermediate_size=32, num_experts=12,
    mlp_only_layers=(0,), attention_bias=True, vocab_size=48,
)  # fmt: skip


def random_params(config):
    """Numbers of bfloat16, of which a few are far out."""
    rng = np.random.default_rng(3)

    def values(spec):
        x = rng.standard_t(3, spec.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        return jnp.asarray(x)

    return jax.tree.map(values, abstract_params(config))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A plain folder, with a file beside its weights."""
    out = mt.save_huggingface(tmp_path_factory.mktemp("plain") / "model", random_params(CONFIG), CONFIG)
    (out / "tokenizer.json").write_text("{}")
    return out


@pytest.fixture(scope="session")
def policies(model):
    """Function of a recipe's name: the model's policy. Made once."""
    policy = mt.prepare_huggingface(model, mt.recipe("nvfp4"))
    return {"nvfp4": policy, "nvfp4_te": as_others_have_it(policy)}.__getitem__


def as_others_have_it(policy):
    """Block scales from all of E4M3 that are no NaN, outer scales that are no powers of two."""
    rng = np.random.default_rng(5)

    def other(leaf):
        scales = rng.integers(0, 0x7F, leaf.block_scale.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        outer = rng.uniform(1e-4, 1e-3, leaf.outer_scale.shape).astype(np.float32)
        return leaf.replace(block_scale=jnp.asarray(scales), outer_scale=jnp.asarray(outer), fp8_exact=False)

    is_leaf = lambda x: isinstance(x, nvfp4.Nvfp4Array)  # noqa: E731
    weights = jax.tree.map(lambda x: other(x) if is_leaf(x) else x, policy.weights, is_leaf=is_leaf)
    return policy.replace(weights=weights, recipe=mt.recipe("nvfp4_te"))


def scales_of(policy):
    """Some outer scales of activations."""
    names = quantized_matrices(policy.config, policy.recipe)
    specs = abstract_specs(policy.config)
    sizes = {name: specs[name].shape[:-2] or (1,) for name in sorted(names)}
    return {name: np.exp2(-np.arange(np.prod(size)) % 7, dtype=np.float32) / 64 for name, size in sizes.items()}


@pytest.fixture
def folder(policies, model, tmp_path):
    """Function of a layout and a recipe: a new folder, to spoil."""

    def write(layout="modelopt", recipe="nvfp4", **more):
        return mt.save_nvfp4(
            tmp_path / f"{layout} {recipe}", policies(recipe), layout=layout, like=model, **more
        )

    return write


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


def _modules(config):
    """Every matrix by its module's name, and the names of those that engines fuse."""
    names = {each.tensor.removesuffix(".weight"): each.leaf for each in placements(config) if len(each.shape) == 2}
    fused = {re.sub(r"[qkv]_proj$", "qkv_proj", name): leaf for name, leaf in names.items() if leaf.endswith("qkv")}
    fused |= {re.sub(r"experts\..*", "experts", name): leaf for name, leaf in names.items() if ".experts." in name}
    fused |= {re.sub(r"mlp\.(gate|up)_proj$", "mlp.gate_up_proj", name): leaf for name, leaf in names.items()}
    return names, names | fused


@pytest.mark.parametrize("changes", [{}, dict(first_plain=2, last_plain=1), dict(matmuls=("experts",), first_plain=2)], ids=str)
def test_engines_find_what_is_quantised_by_the_patterns(changes):
    """Matched as vLLM and SGLang do: whole names by wildcards, and also substrings; regular expressions from the start."""
    config = tiny_moe(num_hidden_layers=13, mlp_only_layers=(4,), intermediate_size=64)
    recipe = mt.recipe("nvfp4", **changes)
    quantized = quantized_matrices(config, recipe)
    names, with_fused = _modules(config)
    del names["model.embed_tokens"], with_fused["model.embed_tokens"]  # no engine takes an embedding for a linear layer
    patterns = layouts.ignored(layouts.MODELOPT, config, recipe)
    for name, leaf in with_fused.items():
        as_wildcard = any(fnmatch.fnmatchcase(name, each) for each in patterns)
        as_substring = any(each in name for each in patterns)
        assert (as_wildcard or as_substring) is (leaf not in quantized), name
        assert as_wildcard is (leaf not in quantized), name
    patterns = layouts.ignored(layouts.COMPRESSED, config, recipe)
    for name, leaf in names.items():
        ignored = any(re.match(each[3:], name) if each.startswith("re:") else each == name for each in patterns)
        assert ignored is (leaf not in quantized), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configuration(folder, tmp_path, layout):
    config = json.loads((folder(layout) / "config.json").read_text())
    quant = config["quantization_config"]
    group = quant["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == 4 and group["weights"]["group_size"] == 16
    recorded = config["minite_jax"]["recipe"]
    assert recorded["name"] == "nvfp4" and recorded["quantized"]["weight"]["family"] == "fp8_exact"
    if layout == "modelopt":
        assert quant["quant_algo"] == "W4A16_NVFP4" and "input_activations" not in group
        other = json.loads((tmp_path / "modelopt nvfp4" / "hf_quant_config.json").read_text())["quantization"]
        assert other["exclude_modules"] == quant["ignore"] and other["kv_cache_quant_algo"] is None
    else:
        assert quant["format"] == "nvfp4-pack-quantized" and group["input_activations"] is None


def test_configuration_with_scales_of_activations(policies, folder, tmp_path):
    scales = scales_of(policies("nvfp4"))
    quant = json.loads((folder("modelopt", input_scales=scales) / "config.json").read_text())["quantization_config"]
    assert quant["quant_algo"] == "NVFP4" and quant["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    out = folder("compressed-tensors", input_scales=scales)
    quant = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quant["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


# --- folders of others --------------------------------------------------------------------------------------------------------


def test_scales_of_all_of_e4m3_are_kept_and_multiplied_as_bfloat16(policies, folder, edit_json):
    policy = policies("nvfp4_te")
    out = folder("modelopt", "nvfp4_te")
    assert mt.load_nvfp4(out).recipe.name == "nvfp4_te"
    edit_json(out / "config.json", minite_jax=None)  # as another tool would have written it
    read = mt.load_nvfp4(out)
    assert read.recipe == mt.recipe("nvfp4_46", matmuls=read.recipe.matmuls)
    assert set(read.recipe.matmuls) == set(policy.recipe.matmuls)
    assert_same_bits(read.weights, policy.weights)
    weight = read.weights["layers"][0]["qkv"]
    assert not weight.fp8_exact
    rows = ExpandedArray(jnp.zeros((1, 32), jnp.float8_e4m3fn), jnp.ones(1))
    assert operands.product_dtype(rows, weight) == jnp.bfloat16
    chosen = mt.load_nvfp4(out, mt.recipe("nvfp4"))  # rows by our rule beside weights by theirs
    assert chosen.recipe == mt.recipe("nvfp4") and not chosen.weights["layers"][0]["qkv"].fp8_exact
    assert_same_bits(chosen.weights, policy.weights)


def test_scales_of_the_fp8_exact_set_are_found(policies, folder, edit_json):
    out = folder("modelopt")
    edit_json(out / "config.json", minite_jax=None)
    read = mt.load_nvfp4(out)
    assert read.recipe.name == "nvfp4"
    assert_same_bits(read.weights, policies("nvfp4").weights)
    x = ExpandedArray(jnp.zeros((1, 32), jnp.float8_e4m3fn), jnp.ones(1))
    assert operands.product_dtype(x, read.weights["layers"][0]["qkv"]) == jnp.float8_e4m3fn


def test_membership_of_the_set_is_that_of_the_kernels():
    """Every scale, with codes up to 4 and up to 6."""
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    for byte, scale in enumerate(scales):
        for code in (0x06, 0x07, 0x60, 0x70, 0xE0, 0xF0):
            codes = np.zeros((1, 8), np.uint8)
            codes[0, 3] = code
            block_scale = np.full((1, 1), scale)
            exact = is_fp8_exact(codes, block_scale)
            top = 4 if code in (0x06, 0x60, 0xE0) else 6
            in_set = float(scale) in nvfp4.FP8_EXACT_SCALES
            assert exact is (in_set or top == 4 and float(scale) in nvfp4.FP8_EXACT_SCALES_UP_TO_4), (byte, code)


def test_divisors_that_are_no_reciprocals(policies, folder, tmp_path):
    with pytest.raises(CheckpointError, match="parameter layers.* no float32 divisor's reciprocal.* write the modelopt layout"):
        folder("compressed-tensors", "nvfp4_te")
    assert os.listdir(tmp_path) == []
    exact = np.exp2(np.arange(-100, 100), dtype=np.float32)
    np.testing.assert_array_equal(layouts.COMPRESSED.to_file(exact, ""), 1 / exact)
    divisors = np.float32(2688) / np.linspace(0.01, 3, 1000, dtype=np.float32)
    factors = layouts.COMPRESSED.from_file(divisors)  # what a reader multiplies by comes back, whatever divisor says it
    np.testing.assert_array_equal(layouts.COMPRESSED.from_file(layouts.COMPRESSED.to_file(factors, "")), factors)


def test_scales_of_a_quantised_cache_are_left_alone(policies, folder, contents, rewrite):
    path = folder("modelopt") / "model.safetensors"
    one = ("F32", (), np.float32(1).tobytes())
    rewrite(path, contents(path) | {f"model.layers.0.self_attn.{part}_proj.{part}_scale": one for part in "kv"})
    assert_same_bits(mt.load_nvfp4(path.parent), policies("nvfp4"))


# --- spoilt folders -----------------------------------------------------------------------------------------------------------

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
