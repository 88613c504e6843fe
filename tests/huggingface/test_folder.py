"""Folders come in and go out with every byte; spoilt ones are refused with the file and the tensor that are wrong."""

import contextlib
import filecmp
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.checkpoint import CheckpointError
from minite_jax.checkpoint.huggingface import files, filling, open_folder, placements, reader, writer
from minite_jax.model import tiny_dense, tiny_moe
from minite_jax.model.params import abstract_params, path_name

MODELS = ("qwen3_dense", "qwen3_moe", "qwen3_mixed", "llama")


def assert_same_files(one, other):
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for name in os.listdir(one):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


@pytest.mark.parametrize("name", MODELS)
def test_an_export_like_the_import_has_equal_files(data, tmp_path, name):
    config, params = mt.load_huggingface(data / name)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert_same_files(data / name, mt.save_huggingface(tmp_path / "out", params, config, like=data / name))


@pytest.mark.parametrize("name", ["qwen3_dense", "qwen3_moe", "llama"])
def test_a_new_folder_has_the_weights_that_transformers_writes(data, tmp_path, name):
    config, params = mt.load_huggingface(data / name)
    more = {"max_position_embeddings": 512, "eos_token_id": [1, 2]}
    out = mt.save_huggingface(tmp_path / "out", params, config, extra=more, beside={"tokenizer.json": '{"é": 1}'})
    assert (out / "tokenizer.json").read_text(encoding="utf-8") == '{"é": 1}'
    assert filecmp.cmp(out / "model.safetensors", data / name / "model.safetensors", shallow=False)
    written = json.loads((out / "config.json").read_text())
    assert written["eos_token_id"] == [1, 2] and written["max_position_embeddings"] == 512
    assert mt.load_huggingface(out)[0] == config


def test_the_safetensors_library_reads_what_is_written(data, tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    config, params = mt.load_huggingface(data / "llama")
    out = mt.save_huggingface(tmp_path / "out", params, config, dtype="float32")
    theirs = library.load_file(out / "model.safetensors")
    assert set(theirs) == {each.tensor for each in placements(config)}
    np.testing.assert_array_equal(theirs["model.layers.1.self_attn.k_proj.weight"], params["layers"][1]["qkv"][64:96])


def test_numbers_lie_where_the_tree_says(data):
    """Read by hand: expert 10 is not expert 2, gate comes before up, query before key before value."""
    opened = open_folder(data / "qwen3_mixed")
    _, params = mt.load_huggingface(data / "qwen3_mixed")

    def tensor(name):
        (_, piece), *more = files.read_pieces(opened.tensors[name])
        assert not more
        return piece.astype(np.float32)

    layer = params["layers"][3]
    for expert in (0, 2, 10, 11):
        theirs = {part: tensor(f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
        np.testing.assert_array_equal(layer["gate_up"][expert], np.concatenate([theirs["gate"], theirs["up"]]))
        np.testing.assert_array_equal(layer["down"][expert], theirs["down"])
    for kind, leaf in (("weight", "qkv"), ("bias", "qkv_bias")):
        parts = [tensor(f"model.layers.3.self_attn.{part}_proj.{kind}") for part in "qkv"]
        np.testing.assert_array_equal(layer[leaf], np.concatenate(parts))


@pytest.mark.parametrize("config", [tiny_moe(num_experts=12), tiny_dense(qk_norm=False, attention_bias=True)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_every_number_of_the_tree_has_one_place(config, fused):
    counts = {path_name(p): np.zeros(s.shape, int) for p, s in jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]}
    for each in placements(config, fused_experts=fused):
        counts[each.leaf][tuple(slice(at, at + size) for at, size in zip(each.start, each.block(), strict=True))] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shards_fused_experts_and_types(tmp_path, monkeypatch, dtype):
    """A model of ours through folders of many files, in small pieces, with experts apart and together."""
    monkeypatch.setattr(files, "PIECE", 1000)
    config = tiny_moe(num_hidden_layers=1, num_experts=12, mlp_only_layers=())
    kind = files.DTYPES[writer.TYPES[dtype]]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.standard_normal(spec.shape).astype(kind).astype(np.float32), abstract_params(config))
    for fused in (False, True):
        out = mt.save_huggingface(
            tmp_path / f"{fused}", params, config, dtype=dtype, fused_experts=fused, max_shard_bytes=100_000
        )
        assert len(list(out.glob("*.safetensors"))) > 3
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == kind.itemsize * mt.num_params(config) == open_folder(out).nbytes
        assert index["metadata"]["total_parameters"] == mt.num_params(config)
        assert len(index["weight_map"]) == len(placements(config, fused_experts=fused))
        again_config, again = mt.load_huggingface(out)
        assert again_config == config
        jax.tree.map(np.testing.assert_array_equal, again, params)
        assert_same_files(out, mt.save_huggingface(tmp_path / f"{fused} again", again, config, like=out))


def test_a_target_sharding_and_type(data, monkeypatch):
    """Onto two devices, along the experts or the rows, through the host's way of filling and a device's."""
    config, wanted = mt.load_huggingface(data / "qwen3_moe")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(spec):
        axis = "x" if spec.axes[0] in ("expert", "vocab", "heads") else None
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))

    specs = abstract_params(config)
    for shard in (filling._HostShard, filling._DeviceShard):
        monkeypatch.setattr(filling, "_shard_on", lambda device, shard=shard: shard)
        progress = []
        _, params = mt.load_huggingface(data / "qwen3_moe", dtype=jnp.bfloat16, sharding=sharding, progress=progress.append)
        assert sum(progress) == open_folder(data / "qwen3_moe").nbytes
        jax.tree.map(lambda spec, leaf: _assert_sharding(leaf, sharding(spec)), specs, params)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), b), params, wanted)


def _assert_sharding(leaf, wanted):
    assert leaf.sharding == wanted and leaf.dtype == jnp.bfloat16


def test_sharded_parameters_are_written(data, tmp_path):
    config, params = mt.load_huggingface(data / "qwen3_moe")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params["layers"] = tuple(layer | {"gate_up": jax.device_put(layer["gate_up"], everywhere)} for layer in params["layers"])
    assert_same_files(data / "qwen3_moe", mt.save_huggingface(tmp_path / "out", params, config, like=data / "qwen3_moe"))


def test_trained_numbers_are_rounded_to_the_types_of_the_folder(data, tmp_path):
    config, params = mt.load_huggingface(data / "qwen3_dense")
    moved = jax.tree.map(lambda x: x * jnp.float32(1.0 + 2**-10), params)
    out = mt.save_huggingface(tmp_path / "out", moved, config, like=data / "qwen3_dense")
    for each in open_folder(out).placements:
        assert open_folder(out).tensors[each.tensor].dtype == "BF16"
    _, again = mt.load_huggingface(out)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), moved)
    jax.tree.map(np.testing.assert_array_equal, again, rounded)


def _shorten_file(folder, contents, rewrite):
    path = folder / "model-00004-of-00008.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return r"model-00004-of-00008.safetensors: tensor \S+ .*ends at byte \d+ of a file of \d+, which is cut off"


def _remove_shard(folder, contents, rewrite):
    (folder / "model-00002-of-00008.safetensors").unlink()
    return r"model-00002-of-00008.safetensors is missing; .*index.json says that it holds model\."


def _shard_lacks_a_tensor(folder, contents, rewrite):
    path = folder / "model-00003-of-00008.safetensors"
    tensors = contents(path)
    name = next(iter(tensors))
    rewrite(path, {key: value for key, value in tensors.items() if key != name})
    return f"model-00003-of-00008.safetensors lacks tensor {name}, which"


@contextlib.contextmanager
def _changed_index(folder):
    """The map from tensors to files, written back as it is left."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    yield index["weight_map"]
    path.write_text(json.dumps(index))


def _index_lists_what_no_shard_has(folder, contents, rewrite):
    with _changed_index(folder) as files:
        files["model.layers.9.mlp.gate.weight"] = "model-00009-of-00008.safetensors"
    return "model-00009-of-00008.safetensors is missing; .* holds model.layers.9.mlp.gate.weight"


def _index_points_out_of_the_folder(folder, contents, rewrite):
    with _changed_index(folder) as files:
        files["lm_head.weight"] = "../model.safetensors"
    return "names '../model.safetensors', which is no file of this folder"


def _index_with_an_empty_name(folder, contents, rewrite):
    with _changed_index(folder) as files:
        files["lm_head.weight"] = ""
    return "names '', which is no file of this folder"


def _index_without_a_tensor(folder, contents, rewrite):
    with _changed_index(folder) as files:
        del files["model.norm.weight"]
    return r"index.json does not list .*tensor model.norm.weight \(BF16 \[32\]\)"


def _index_of_something_else(folder, contents, rewrite):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    return "index.json has no weight_map"


def _both_names(folder, contents, rewrite):
    (folder / "model.safetensors").write_bytes(b"")
    return "has model.safetensors and model.safetensors.index.json: which of the two"


@pytest.mark.parametrize(
    "spoil",
    [
        _shorten_file, _remove_shard, _shard_lacks_a_tensor, _index_lists_what_no_shard_has, _index_points_out_of_the_folder,
        _index_with_an_empty_name, _index_without_a_tensor, _index_of_something_else, _both_names,
    ],
)  # fmt: skip
def test_spoilt_shards(copy_of, contents, rewrite, spoil):
    folder = copy_of("qwen3_mixed")
    with pytest.raises(CheckpointError, match=spoil(folder, contents, rewrite)) as caught:
        mt.load_huggingface(folder)
    assert "\n" not in str(caught.value)


def _tensor_missing(tensors):
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    return r"lacks tensor model.layers.1.self_attn.k_proj.bias \[32\]"


def _wrong_shape(tensors):
    dtype, _, data = tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = (dtype, (32, 48), data)
    return r"model.safetensors: tensor model.layers.0.mlp.up_proj.weight \(BF16 \[32, 48\]\) where config.json asks for \[48, 3"


def _wrong_dtype(tensors):
    tensors["model.norm.weight"] = ("I64", (32,), b"\0" * 256)
    return r"tensor model.norm.weight \(I64 \[32\]\), which is none of BF16, F16, F32"


def _nobody_reads(tensors):
    tensors["model.layers.0.self_attn.sinks"] = ("BF16", (4,), b"\0" * 8)
    tensors["model.layers.2.mlp.up_proj.weight"] = ("BF16", (4,), b"\0" * 8)
    return "sinks .*which this model does not have; .*model.layers.2.mlp.up_proj.weight .*does not have"


def _not_a_number(tensors):
    dtype, shape, data = tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = (dtype, shape, data[:-2] + b"\xc0\x7f")
    return r"model.safetensors: tensor model.layers.1.mlp.down_proj.weight \(BF16 \[32, 48\]\) holds NaN or infinity"


def _another_head(tensors):
    dtype, shape, data = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (dtype, shape, data[::-1])
    return "tensor lm_head.weight .* is unlike model.embed_tokens.weight, though config.json says tie_word_embeddings"


@pytest.mark.parametrize("spoil", [_tensor_missing, _wrong_shape, _wrong_dtype, _nobody_reads, _not_a_number, _another_head])
def test_spoilt_tensors(copy_of, contents, rewrite, spoil):
    folder = copy_of("llama")
    tensors = contents(folder / "model.safetensors")
    message = spoil(tensors)
    rewrite(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        mt.load_huggingface(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_hidden_layers=9_999), "says that it has 9999 layers of 8 experts, and holds 69 tensors"),
        (dict(num_experts=9_999, num_local_experts=9_999), "says that it has 2 layers of 9999 experts, and holds 69 tensors"),
    ],
)
def test_more_layers_or_experts_than_tensors(copy_of, edit_json, monkeypatch, changes, message):
    """Found before the names of a hundred million tensors are laid out."""
    folder = copy_of("qwen3_moe")
    edit_json(folder / "config.json", **changes)
    monkeypatch.setattr(reader, "placements", lambda *_, **__: pytest.fail("laid out"))
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_an_output_embedding_is_not_made_up(copy_of, edit_json):
    folder = copy_of("llama")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks tensor lm_head.weight \[96, 32\]"):
        mt.load_huggingface(folder)


def test_harmless_tensors_travel_with_the_folder(copy_of, contents, rewrite, tmp_path):
    """Rotary frequencies and a copy of the tied embedding lie in old files."""
    folder = copy_of("llama")
    tensors = contents(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), np.arange(8, dtype=np.float32).tobytes())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    rewrite(folder / "model.safetensors", tensors)
    config, params = mt.load_huggingface(folder)
    assert "lm_head" not in params
    assert_same_files(folder, mt.save_huggingface(tmp_path / "out", params, config, like=folder))


def test_of_two_copies_the_one_that_the_index_names_is_read(copy_of, contents, rewrite, tmp_path):
    folder = copy_of("qwen3_mixed")
    _, wanted = mt.load_huggingface(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in sorted(set(index.values())) if name != index["model.norm.weight"])
    tensors = contents(folder / other)
    tensors["model.norm.weight"] = ("BF16", (32,), b"\0" * 64)
    rewrite(folder / other, tensors)
    config, params = mt.load_huggingface(folder)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    with pytest.raises(CheckpointError, match=f"{other}: tensor model.norm.weight .*leave `like` out"):
        mt.save_huggingface(tmp_path / "out", params, config, like=folder)


def _header(folder, text, data=b""):
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


_ONE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        (b"{]", b"", "wrong header"),
        (b"[]", b"", "no JSON object"),
        (b"[" * 100_000, b"", "wrong header .*recursion"),
        (_ONE + b"," + _ONE[1:] + b"}", b"\0" * 8, "a is there twice"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', b"\0" * 8, r"F32 \[3\] of tensor a are not 8 bytes"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', b"\0" * 8, "tensor a is described as"),
        (b'{"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, "tensor a is described as"),
        (b'{"a":{"dtype":"F32","shape":[2]}}', b"\0" * 8, "tensor a is described as"),
        (_ONE + b',"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', b"\0" * 12, "tensor b .*starts at byte"),
        (_ONE + b',"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}', b"\0" * 20, "tensor b .*starts at byte"),
        (_ONE + b"}", b"\0" * 9, "1 bytes behind its last tensor"),
        (_ONE + b"}", b"\0" * 7, "tensor a .*cut off"),
    ],
)
def test_wrong_headers(copy_of, text, data, message):
    folder = copy_of("llama")
    _header(folder, text, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        mt.load_huggingface(folder)
    assert "model.safetensors" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"<html>not found</html>", (2**62).to_bytes(8, "little")])
def test_files_that_are_something_else(copy_of, content):
    folder = copy_of("llama")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors is cut off or no safetensors file"):
        mt.load_huggingface(folder)


def test_folders_without_what_they_need(copy_of, tmp_path):
    with pytest.raises(CheckpointError, match="config.json is missing"):
        mt.load_huggingface(tmp_path / "nowhere")
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        mt.load_huggingface(folder)
    with pytest.raises(ValueError, match="float16 must be float32 or bfloat16"):
        mt.load_huggingface(folder, dtype=jnp.float16)


def test_what_cannot_be_written_leaves_nothing(data, tmp_path):
    config, params = mt.load_huggingface(data / "llama")
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "keep").write_text("x")
    large = params | {"embed": params["embed"] * 1e6}
    for arguments, message in (
        ((existing, params, config), "existing is there already: nothing is written over"),
        ((tmp_path / "a", params | {"embed": params["embed"] * jnp.nan}, config), r"embed \(model.embed_tokens.weight\) holds N"),
        ((tmp_path / "a", {k: v for k, v in params.items() if k != "final_norm"}, config), "lack final_norm"),
        ((tmp_path / "a", params | {"lm_head": params["embed"]}, config), "have lm_head, which this model does not have"),
        ((tmp_path / "a", params | {"embed": params["embed"].T}, config), r"have embed as float32 \[32, 96\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            mt.save_huggingface(*arguments)
    with pytest.raises(CheckpointError, match="embed .*is beyond F16"):
        mt.save_huggingface(tmp_path / "a", large, config, dtype="float16")
    with pytest.raises(CheckpointError, match="another model"):
        mt.save_huggingface(tmp_path / "a", params, config, like=data / "qwen3_dense")
    with pytest.raises(CheckpointError, match="another model of it"):
        mt.save_huggingface(tmp_path / "a", params, config, extra={"rope_theta": 5.0})
    assert os.listdir(tmp_path) == ["existing"] and os.listdir(existing) == ["keep"]
