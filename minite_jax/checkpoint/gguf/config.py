"""Metadata of a GGUF file -> `ModelConfig`.

As with config.json nothing is guessed: an architecture, or a key of it, that is not known here may mean another function, so it
is an error that names it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface.files import Tensor
from minite_jax.model.config import ModelConfig


class _Family(NamedTuple):
    qk_norm: bool
    is_moe: bool


_FAMILIES = {"llama": _Family(False, False), "qwen3": _Family(True, False), "qwen3moe": _Family(True, True)}

# Keys behind the architecture's name. Some say nothing about the function that the model is.
_NOT_OURS = {"context_length", "vocab_size", "rope.scaling.finetuned"}
_OURS = {
    "block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
}  # fmt: skip
_OURS_MOE = {"expert_count", "expert_used_count", "expert_feed_forward_length"}
# Features that may be named as absent.
_ONLY = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (1,),  # softmax
}


def architecture(metadata: Mapping[str, Any], where: str) -> str:
    """The architecture's name.

    Raises:
      CheckpointError: it is missing, or one that this forward does not run.
    """
    name = metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise CheckpointError(f"{where}: general.architecture={name!r} is not known here; there are {', '.join(_FAMILIES)}")
    return name


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> ModelConfig:
    """What the metadata mean. Vocabulary, tied embeddings and biases show in the tensors.

    Args:
      metadata: as `file.read_header` gives them.
      tensors: the same.
      where: name of the file, for messages.

    Raises:
      CheckpointError: see above; or a key is missing, of another type, or contradicts another.
    """
    name = architecture(metadata, where)
    family = _FAMILIES[name]
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}

    def get(key: str, kind: type, *default):
        value = own.get(key, *default)
        if value is None and not default:
            raise CheckpointError(f"{where}: {name}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise CheckpointError(f"{where}: {name}.{key}={str(value)[:80]} should be one number above 0, {kind.__name__}")
        return _shortest(value) if kind is float else value

    if "split.count" in metadata and metadata["split.count"] not in (0, 1):
        raise CheckpointError(f"{where} is one of {metadata['split.count']} parts: merge them with llama-gguf-split first")
    heads, width = get("attention.head_count", int), get("embedding_length", int)
    head_dim = get("attention.key_length", int, max(1, width // heads))
    only = _ONLY | {"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)}
    if not family.is_moe:
        only |= {"expert_count": (0,), "expert_used_count": (0,)}
    unknown = sorted(set(own) - _NOT_OURS - _OURS - set(only) - (_OURS_MOE if family.is_moe else set()))
    if unknown:
        raise CheckpointError(
            f"{where}: unknown key {name}.{unknown[0]}: it may stand for a function that this forward lacks; take another model"
        )
    for key, allowed in only.items():
        if key in own and own[key] not in allowed:
            raise CheckpointError(f"{where}: {name}.{key}={own[key]!r} is not supported; this forward has {allowed[-1]!r}")
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(
            f"{where}: rope_freqs.weight stretches the rotary angles by a table, as Llama 3.1's does; load the model's Hugging "
            "Face folder, which says how"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{where} lacks tensor token_embd.weight: it holds no language model; fetch the file again")
    experts = {}
    if family.is_moe:
        experts = dict(
            num_experts=get("expert_count", int),
            num_experts_per_tok=get("expert_used_count", int),
            moe_intermediate_size=get("expert_feed_forward_length", int),
            norm_topk_prob=True,  # llama.cpp divides qwen3moe's weights by their sum
        )
    try:
        return ModelConfig(
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=width,
            num_hidden_layers=get("block_count", int),
            num_attention_heads=heads,
            num_key_value_heads=get("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            intermediate_size=0 if family.is_moe and "feed_forward_length" not in own else get("feed_forward_length", int),
            qk_norm=family.qk_norm,
            attention_bias="blk.0.attn_q.bias" in tensors,
            rope_theta=get("rope.freq_base", float, 10000.0),
            rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in tensors,
            **experts,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: files hold 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
