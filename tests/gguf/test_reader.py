"""GGUF files into our parameter tree: every number where it belongs, and spoilt files in one line."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.gguf import is_gguf, open_gguf
from minite_jax.model import tiny_dense, tiny_moe
from minite_jax.model.params import abstract_params

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")

LLAMA = dict(qk_norm=False, num_hidden_layers=2, vocab_size=64, head_dim=32, rms_norm_eps=1e-5, rope_theta=1e5)
MODELS = {
    "llama": tiny_dense(**LLAMA),
    "llama with biases": tiny_dense(**LLAMA, attention_bias=True, tie_word_embeddings=False),
    "qwen3": tiny_dense(num_hidden_layers=1, vocab_size=64),
    "qwen3moe": tiny_moe(num_hidden_layers=2, vocab_size=64, intermediate_size=48),
}


def random_params(config):
    """Every number another one; those of norms and biases too."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.standard_normal(spec.shape).astype(np.float32), abstract_params(config))


@pytest.fixture
def small(files):
    """Function of changes of metadata and tensors: path of a small llama file."""
    config = MODELS["llama"]
    tensors = files.packed(files.model_tensors(config, random_params(config), "llama"))

    def write(metadata=(), changes=()):
        found = files.model_metadata(config, "llama") | dict(metadata)
        found = {key: value for key, value in found.items() if value is not None}
        return files.write(found, {k: v for k, v in (tensors | dict(changes)).items() if v is not None})

    return write


@pytest.mark.parametrize("name", MODELS)
def test_every_number(files, name):
    config, architecture = MODELS[name], name.split()[0]
    params = random_params(config)
    tensors = files.packed(files.model_tensors(config, params, architecture))
    path = files.write(files.model_metadata(config, architecture), tensors)
    read_bytes = []
    found_config, found = mt.load_gguf(path, progress=read_bytes.append)
    assert found_config == config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert sum(read_bytes) == open_gguf(path).nbytes == sum(4 * x.size for x in jax.tree.leaves(params))
    assert open_gguf(path).context_length == 512 and is_gguf(path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_types_of_tensors(files, kind):
    """Blocks as the tests pack them, from the description of the format; so a mistake of the package would show."""
    config = MODELS["llama"]
    tensors = files.model_tensors(config, random_params(config), "llama")
    path = files.write(files.model_metadata(config, "llama"), files.packed(tensors, kind))
    _, found = mt.load_gguf(path)
    back = files.model_tensors(config, jax.tree.map(np.asarray, found), "llama")
    for name, x in tensors.items():
        wanted = files.tensor_bytes(x, kind if x.ndim > 1 else "F32")[2]
        np.testing.assert_array_equal(back[name], wanted)
    _, rounded = mt.load_gguf(path, dtype=jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), rounded, found)


def test_pieces_of_whole_heads(files, monkeypatch):
    monkeypatch.setattr("minite_jax.checkpoint.huggingface.files.PIECE", 1)  # the smallest pieces that there are
    config = MODELS["llama"]
    params = random_params(config)
    path = files.write(files.model_metadata(config, "llama"), files.packed(files.model_tensors(config, params, "llama")))
    jax.tree.map(np.testing.assert_array_equal, mt.load_gguf(path)[1], params)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture='gemma3' is not known here; there are llama, qwen3, qwen3moe"),
        ({"general.architecture": None}, "general.architecture=None is not known"),
        ({"llama.attention.sliding_window": 4096}, "unknown key llama.attention.sliding_window"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn' is not supported"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count=16 is not supported; this forward has 32"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "2"}, "llama.block_count=2 should be one number above 0"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv=[2, 2] should be one number"),
        ({"llama.attention.head_count": 3}, "num_attention_heads=3 must be a multiple"),
        ({"llama.embedding_length": 32}, "tensor token_embd.weight (F32 [64, 64]) where the metadata ask for [64, 32]"),
        ({"llama.block_count": 3}, "lacks tensor blk.2.attn_q.weight [128, 64]"),
        ({"split.count": 2}, "is one of 2 parts"),
        ({"general.alignment": 0}, "general.alignment=0"),
    ],
)  # fmt: skip
def test_wrong_metadata(small, metadata, message):
    path = small(metadata)
    with pytest.raises(CheckpointError) as error:
        mt.load_gguf(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.ffn_up.weight": None}, "lacks tensor blk.0.ffn_up.weight [128, 64]"),
        ({"token_embd.weight": None}, "lacks tensor token_embd.weight"),
        ({"rope_freqs.weight": ((16,), 0, bytes(64))}, "rope_freqs.weight stretches the rotary angles"),
        ({"vision.weight": ((16,), 0, bytes(64))}, "tensor vision.weight (F32 [16]), which this model does not have"),
        ({"output_norm.weight": ((64,), 0, bytes(252) + b"\0\0\x80\x7f")}, "output_norm.weight (F32 [64]) holds NaN or inf"),
        ({"output_norm.weight": ((64,), 77, bytes(64))}, "tensor output_norm.weight [64] has type 77, which this version"),
        ({"output_norm.weight": ((64,), 24, bytes(64))}, "output_norm.weight (I8 [64]), which is none of F32, F16, Q4_0, "),
        ({"output_norm.weight": ((65,), 8, bytes(70))}, "rows of 65 are no positive multiple of its blocks of 32"),
        ({"output_norm.weight": ((0,), 0, b"")}, "rows of 0 are no positive multiple"),
        ({"zz": ((2**40,), 0, b"")}, "which is cut off; fetch it again"),
    ],
)  # fmt: skip
def test_wrong_tensors(small, changes, message):
    path = small(changes=changes)
    with pytest.raises(CheckpointError) as error:
        mt.load_gguf(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_files_that_are_cut_off(small):
    """Wherever the file ends: one line that names it, and no other exception."""
    path = small()
    whole = path.read_bytes()
    header = len(whole) - open_gguf(path).nbytes
    for length in [*range(0, header, 37), header, header + 1, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut off|ended early|no GGUF file"):
            mt.load_gguf(path)


def test_spoilt_headers(small):
    path = small()
    whole = path.read_bytes()

    def refusal(offset, form, value):
        path.write_bytes(whole[:offset] + struct.pack(form, value) + whole[offset + struct.calcsize(form) :])
        with pytest.raises(CheckpointError) as error:
            mt.load_gguf(path)
        return str(error.value)

    assert "is no GGUF file" in refusal(0, "<I", 7)
    assert "is version 1 of GGUF" in refusal(4, "<I", 1)
    assert "is a big-endian file of GGUF" in refusal(4, ">I", 3)
    assert "cut off or spoilt" in refusal(8, "<Q", 2**63)
    assert "cut off or spoilt" in refusal(16, "<Q", 2**63)
    assert "it wants 9,223,372,036,854,775,808 bytes" in refusal(24, "<Q", 2**63)
    kind = whole.index(b"general.architecture") + 20
    assert "a value of the unknown kind 99 in general.architecture" in refusal(kind, "<I", 99)
    assert "general.architecture that is no UTF-8" in refusal(kind + 12, "<B", 255)


def test_names_that_come_twice(small):
    path = small()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"general.name", b"llama.x.name").replace(b"llama.vocab_size", b"llama.block_coun"))
    with pytest.raises(CheckpointError, match="unknown key llama.block_coun"):
        mt.load_gguf(path)
    path.write_bytes(whole.replace(b"attn_k.weight", b"attn_q.weight"))
    with pytest.raises(CheckpointError, match=r"has tensor blk.0.attn_q.weight twice"):
        mt.load_gguf(path)


def test_overlapping_tensors(small):
    path = small()
    whole = path.read_bytes()
    at = whole.index(b"output_norm.weight") + 18 + 4 + 8 + 4
    path.write_bytes(whole[:at] + struct.pack("<Q", 0) + whole[at + 8 :])
    with pytest.raises(CheckpointError, match="begins inside tensor"):
        mt.load_gguf(path)


def test_no_file(tmp_path):
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot be read"):
        mt.load_gguf(tmp_path / "none")
