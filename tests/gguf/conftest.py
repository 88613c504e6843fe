"""Small GGUF files, written here from the description of the format and not by the package that helps to read them."""

import struct
import types

import ml_dtypes
import numpy as np
import pytest

PLAIN = {"F32": (0, np.float32), "F16": (1, np.float16), "BF16": (30, ml_dtypes.bfloat16)}


def pack_q8_0(x):
    """[..., K] -> blocks of 32: a float16 scale, 32 int8."""
    blocks = x.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / np.where(scale == 0, 1, scale).astype(np.float32)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes(), scale.astype(np.float32) * codes


def pack_q4_1(x):
    """[..., K] -> blocks of 32: float16 scale and minimum, 16 bytes, whose low halves are the first 16 numbers."""
    blocks = x.reshape(-1, 32)
    low = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    codes = np.clip(np.rint((blocks - low) / np.where(scale == 0, 1, scale).astype(np.float32)), 0, 15).astype(np.uint8)
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    packed = np.concatenate([scale.view(np.uint8), low.view(np.uint8), nibbles], axis=1)
    return packed.tobytes(), scale.astype(np.float32) * codes + low.astype(np.float32)


BLOCKS = {"Q4_1": (3, pack_q4_1), "Q8_0": (8, pack_q8_0)}


def tensor_bytes(x, kind):
    """Number of the type, the bytes, and the numbers that they stand for."""
    if kind in PLAIN:
        number, dtype = PLAIN[kind]
        return number, x.astype(dtype).tobytes(), x.astype(dtype).astype(np.float32)
    number, pack = BLOCKS[kind]
    raw, values = pack(x)
    return number, raw, values.reshape(x.shape)


def _string(text):
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value):
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case list():
            return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, "<i4").tobytes()
    raise TypeError(value)


def gguf_bytes(metadata, tensors, alignment=32):
    """A file: metadata by key, and tensors by name as (shape, number of the type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


ALPHABET = [chr(i) for i in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ '>' if add_generation_prompt else '' }}"


def tokenizer_metadata(**changes):
    """A byte-level tokenizer of 265 tokens: marks, bytes, and three merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *ALPHABET, "Ġt", "12", "Ġth", "[PAD263]", "[PAD264]"]
    own = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [3, 3, 3, 4] + [1] * 259 + [5, 5],
        "merges": ["Ġ t", "1 2", "Ġt h"], "bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 0, "add_bos_token": False,
    }  # fmt: skip
    own |= changes
    found = {f"tokenizer.ggml.{key}": value for key, value in own.items() if value is not None}
    return found | {"tokenizer.chat_template": TEMPLATE}


def turned(rows, head_dim):
    """Rows of our order in llama.cpp's: of each head first row 0, then row K/2, then row 1, ..."""
    order = [first + half * (head_dim // 2) for first in range(head_dim // 2) for half in (0, 1)]
    return np.concatenate([rows[head : head + head_dim][order] for head in range(0, len(rows), head_dim)])


def model_tensors(config, params, architecture):
    """The tensors of a model as a file of this architecture has them, float32 by name."""
    H, N, K = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    turn = turned if architecture == "llama" else lambda rows, head_dim: rows
    found = {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if "lm_head" in params:
        found["output.weight"] = params["lm_head"]
    for i, layer in enumerate(params["layers"]):
        layer = {name: np.asarray(value) for name, value in layer.items()}
        own = {"attn_norm.weight": layer["attention_norm"], "ffn_norm.weight": layer["mlp_norm"]}
        own["attn_output.weight"] = layer["o"]
        for kind, source in (("weight", "qkv"), ("bias", "qkv_bias")):
            if source in layer:
                q, k, v = np.split(layer[source], [H * K, (H + N) * K])
                own |= {f"attn_q.{kind}": turn(q, K), f"attn_k.{kind}": turn(k, K), f"attn_v.{kind}": v}
        if "o_bias" in layer:
            own["attn_output.bias"] = layer["o_bias"]
        if "q_norm" in layer:
            own |= {"attn_q_norm.weight": layer["q_norm"], "attn_k_norm.weight": layer["k_norm"]}
        gate, up = np.split(layer["gate_up"], 2, axis=-2)
        end = ""
        if "router" in layer:
            own["ffn_gate_inp.weight"], end = layer["router"], "_exps"
        own |= {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up, f"ffn_down{end}.weight": layer["down"]}
        found |= {f"blk.{i}.{name}": value for name, value in own.items()}
    return {name: np.asarray(value) for name, value in found.items()}


def model_metadata(config, architecture):
    """What a file says of the model."""
    own = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "context_length": 512,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.is_moe:
        own |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {"general.architecture": architecture, "general.name": "ü"} | {f"{architecture}.{k}": v for k, v in own.items()}


@pytest.fixture
def files(tmp_path):
    """What tests make files with; `write(metadata, tensors)` writes one."""

    def write(metadata, tensors, name="model.gguf"):
        path = tmp_path / name
        path.write_bytes(gguf_bytes(metadata, tensors))
        return path

    def packed(tensors, kind="F32"):
        """Tensors of one type (norms and biases in float32), ready for `write`."""
        return {
            name: (x.shape, *tensor_bytes(x, kind if x.ndim > 1 else "F32")[:2]) for name, x in tensors.items()
        }  # fmt: skip

    return types.SimpleNamespace(
        write=write, packed=packed, tensor_bytes=tensor_bytes, model_tensors=model_tensors, model_metadata=model_metadata,
        tokenizer_metadata=tokenizer_metadata, turned=turned, alphabet=ALPHABET,
    )  # fmt: skip
