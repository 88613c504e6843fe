"""config.json of a Hugging Face folder -> `ModelConfig`, in the spellings of old and new versions, and back.

Nothing is guessed: an architecture, activation, rope type or key that is not known here may mean another function, so it is an
error that names it. Keys that the forward has no use for (token ids, dropout, initialiser) are listed as such.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.files import read_json_object
from minite_jax.model.config import ModelConfig
from minite_jax.model.rope import RopeScaling


class _Family(NamedTuple):
    architecture: str
    qk_norm: bool
    is_moe: bool


_FAMILIES = {
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, is_moe=False),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", qk_norm=True, is_moe=True),
    "llama": _Family("LlamaForCausalLM", qk_norm=False, is_moe=False),
}

# Say nothing about the function that the model is: training, generation, book-keeping.
_NOT_OURS = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "is_llama_config", "max_position_embeddings", "max_window_layers", "model_type", "output_router_logits", "pad_token_id",
    "pretraining_tp", "router_aux_loss_coef", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_version",
    "use_cache",
}  # fmt: skip
# Features that a config may name as absent. Anything else would be another function.
_ONLY = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "use_qk_norm": (True,),
}
_OURS = {
    "attention_bias", "head_dim", "hidden_size", "intermediate_size", "layer_types", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "vocab_size",
}  # fmt: skip
_OURS_MOE = {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_local_experts",
}  # fmt: skip
_FLOATS = {field.name for field in dataclasses.fields(RopeScaling) if field.type is float}


def read_config(folder: str | Path) -> ModelConfig:
    """Reads the config.json of a folder.

    Raises:
      CheckpointError: it is missing, no JSON object, or describes a model that this forward does not run; names file and key.
    """
    path = Path(folder) / "config.json"
    return from_json(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a folder holds. Raises CheckpointError where there is none."""
    return read_json_object(path, CheckpointError)


class _Keys:
    """The keys of one config.json, whose mistakes are reported with its name."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        # null means "not set" everywhere in these files.
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.where = where

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def get(self, key: str, kind: type, *default):
        """The value of a key, which must be of this kind; without a default it must be there."""
        if key not in self.raw:
            if default:
                return default[0]
            raise self.error(f"{key} is missing")
        value = self.raw[key]
        kinds = (int, float) if kind is float else kind
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kinds):
            raise self.error(f"{key}={value!r} should be of type {kind.__name__}")
        return kind(value)

    def one_of(self, keys: tuple[str, ...], kind: type):
        """The value of a key that has several names; where several are given, they must agree."""
        values = {self.get(key, kind) for key in keys if key in self.raw}
        if len(values) > 1:
            raise self.error(f"{' and '.join(keys)} disagree")
        return values.pop() if values else self.get(keys[0], kind)


def from_json(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """What a config.json means.

    The angles are stretched by the `factor` that it gives; some versions of transformers take the quotient of the two maximal
    lengths in its place.

    Args:
      raw: its content.
      where: its name, for messages.

    Raises:
      CheckpointError: see `read_config`.
    """
    keys = _Keys(raw, where)
    model_type = keys.get("model_type", str)
    if model_type not in _FAMILIES:
        raise keys.error(f"model_type={model_type!r} is not known here; there are {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    if raw.get("architectures") not in (None, [family.architecture]):
        raise keys.error(f"architectures={raw['architectures']!r} where {[family.architecture]!r} belongs to {model_type}")
    if "quantization_config" in keys.raw:
        raise keys.error("its weights are quantised (quantization_config) and this reads plain ones; load_nvfp4 reads NVFP4")
    known = _NOT_OURS | set(_ONLY) | _OURS | (_OURS_MOE if family.is_moe else set())
    unknown = sorted(set(keys.raw) - known)
    if unknown:
        what = "keys" if len(unknown) > 1 else "key"
        raise keys.error(
            f"unknown {what} {', '.join(unknown)}: it may stand for a function that this forward lacks; remove it if it does not"
        )
    for key, allowed in _ONLY.items():
        if key in keys.raw and keys.raw[key] not in allowed:
            raise keys.error(f"{key}={keys.raw[key]!r} is not supported; this forward has {key}={allowed[0]!r}")
    if any(kind != "full_attention" for kind in keys.get("layer_types", list, [])):
        raise keys.error(f"layer_types={keys.raw['layer_types']!r}: only full_attention is supported")
    if model_type == "llama" and "sliding_window" in keys.raw:
        raise keys.error("sliding_window is not supported")
    try:
        return ModelConfig(**_shape(keys, family), **_rope(keys))
    except ValueError as error:
        raise keys.error(str(error)) from None


def _shape(keys: _Keys, family: _Family) -> dict[str, Any]:
    shape = {name: keys.get(name, int) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    heads = shape["num_attention_heads"]
    # What Llama's files may leave out has one meaning there; in Qwen3's it has another in each version.
    by_head = [] if family.qk_norm else [shape["hidden_size"] // max(heads, 1)]
    if "head_dim" not in keys.raw and by_head and shape["hidden_size"] % max(heads, 1):
        raise keys.error("head_dim is missing, and hidden_size is no multiple of num_attention_heads")
    shape |= dict(
        num_key_value_heads=keys.get("num_key_value_heads", int, *([] if family.qk_norm else [heads])),
        head_dim=keys.get("head_dim", int, *by_head),
        intermediate_size=keys.get("intermediate_size", int, *([0] if family.is_moe else [])),
        qk_norm=family.qk_norm,
        attention_bias=keys.get("attention_bias", bool, False),
        rms_norm_eps=keys.get("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
    )
    if family.is_moe:
        layers = keys.get("mlp_only_layers", list, [])
        if not all(type(each) is int for each in layers):
            raise keys.error(f"mlp_only_layers={layers!r} should be a list of layers' numbers")
        shape |= dict(
            num_experts=keys.one_of(("num_experts", "num_local_experts"), int),
            num_experts_per_tok=keys.get("num_experts_per_tok", int),
            moe_intermediate_size=keys.get("moe_intermediate_size", int),
            norm_topk_prob=keys.get("norm_topk_prob", bool, False),
            decoder_sparse_step=keys.get("decoder_sparse_step", int, 1),
            mlp_only_layers=tuple(layers),
        )
        if shape["num_experts"] < 1:
            raise keys.error(f"num_experts={shape['num_experts']} of a qwen3_moe: a dense model has model_type qwen3")
    return shape


def _rope(keys: _Keys) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from either spelling."""
    given: dict[str, Any] = {}
    for source in ("rope_scaling", "rope_parameters"):
        for key, value in keys.get(source, dict, {}).items():
            key = "rope_type" if key == "type" else key
            if value is None or (key in ("partial_rotary_factor", "truncate") and value == 1):
                continue
            if given.setdefault(key, value) != value:
                raise keys.error(f"{source} says {key}={value!r} and another place {given[key]!r}")
    theta = keys.get("rope_theta", float, None)
    if given.setdefault("rope_theta", theta) is None:
        raise keys.error('rope_theta is missing: where the model has the old default, write "rope_theta": 10000.0')
    inner = _Keys(given, keys.where)
    if theta not in (None, inner.get("rope_theta", float)):
        raise keys.error(f"rope_theta={theta} and rope_parameters' rope_theta={given['rope_theta']} disagree")
    theta = given.pop("rope_theta")
    kind = inner.get("rope_type", str, "default")
    if kind == "default":
        strays = sorted(set(given) - {"rope_type"})
        if strays:
            raise keys.error(f"{', '.join(strays)} of a rope_type default: give the rope_type that it belongs to")
        return dict(rope_theta=float(theta), rope_scaling=None)
    # Numbers as the annotations have them: files write 8 for 8.0.
    given |= {key: float(value) for key, value in given.items() if isinstance(value, int) and key in _FLOATS}
    if kind == "yarn" and "original_max_position_embeddings" not in given:
        given["original_max_position_embeddings"] = keys.get("max_position_embeddings", int)
    try:
        return dict(rope_theta=float(theta), rope_scaling=RopeScaling(**given))
    except TypeError:  # a field that there is not, or no factor
        raise keys.error(f"rope_type={kind} with {', '.join(sorted(given))} is not known here") from None


def to_json(config: ModelConfig, *, dtype: str = "bfloat16", extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model, in the spelling that old and new readers know; `from_json` gives `config` again.

    Args:
      config: shape of the model.
      dtype: of the weights.
      extra: keys that a `ModelConfig` knows nothing of, such as `max_position_embeddings` (32768 if not given) and token ids.

    Raises:
      CheckpointError: experts without norms of queries and keys, which no architecture here has, or `extra` contradicts `config`.
    """
    types = [name for name, each in _FAMILIES.items() if (each.qk_norm, each.is_moe) == (config.qk_norm, config.is_moe)]
    if not types:
        raise CheckpointError(f"no architecture here has experts and qk_norm={config.qk_norm}: it cannot be written as one")
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["intermediate_size"] if config.intermediate_size else []
    names += ["attention_bias", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    if config.is_moe:
        names += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"]
    content = {name: getattr(config, name) for name in names}
    content |= {
        "architectures": [_FAMILIES[types[0]].architecture],
        "model_type": types[0],
        "hidden_act": "silu",
        "rope_scaling": config.rope_scaling and config.rope_scaling.to_dict(),
        "max_position_embeddings": 32768,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.is_moe:
        content["mlp_only_layers"] = list(config.mlp_only_layers)
    content = dict(sorted((content | dict(extra or {})).items()))
    if from_json(content) != config:
        raise CheckpointError(f"extra={dict(extra or {})!r} makes another model of it: give only keys that ModelConfig lacks")
    return content
