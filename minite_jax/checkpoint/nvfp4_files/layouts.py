"""The two layouts in which NVFP4 models are passed around: names of tensors, and the configuration that says so.

| part of a matrix [N, K] | ModelOpt | compressed-tensors |
|---|---|---|
| codes, uint8 [N, K / 2] | `weight` | `weight_packed` |
| block scales, E4M3 [N, K / 16] | `weight_scale` | `weight_scale` |
| outer scale, float32 | `weight_scale_2` [], multiplies | `weight_global_scale` [1], divides |
| outer scale of its activations, float32 | `input_scale` [], multiplies | `input_global_scale` [1], divides |

Sources: NVIDIA ModelOpt's unified Hugging Face export (docs/source/deployment/3_unified_hf.rst) and compressed-tensors
(entrypoints/convert/converters/modelopt_nvfp4.py); what vLLM reads of both (quantization/modelopt.py, compressed_tensors/).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface.config import read_json
from minite_jax.model.config import ModelConfig
from minite_jax.precision.recipe import ATTENTION, EXPERTS, MLP, Recipe

QUANT_FILE = "hf_quant_config.json"
_W4A4, _W4A16 = "NVFP4", "W4A16_NVFP4"
_PACKED = "nvfp4-pack-quantized"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names in a layout.

    Attributes:
      name: "modelopt" or "compressed-tensors".
      suffixes: what a matrix's module name is followed by, for its codes, block_scale, outer_scale and input_scale.
      scalar: shape of the two outer scales.
      divides: whether the outer scales are divisors.
    """

    name: str
    suffixes: Mapping[str, str]
    scalar: tuple[int, ...]
    divides: bool

    def to_file(self, factors: np.ndarray, where: str) -> np.ndarray:
        """Outer scales, which multiply, as this layout has them.

        Raises:
          CheckpointError: a divisor would be wanted that no float32 is. Powers of two always have one.
        """
        if not self.divides:
            return factors
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            nearest = np.float32(1.0) / factors
            tries = [nearest, np.nextafter(nearest, np.float32(np.inf)), np.nextafter(nearest, np.float32(0.0))]
            exact = [np.float32(1.0) / each == factors for each in tries]
        if not np.any(exact, axis=0).all():
            raise CheckpointError(
                f"{where} has an outer scale that is no float32 divisor's reciprocal, and {self.name} stores divisors: write the "
                "modelopt layout, or take a recipe whose outer scales are powers of two (nvfp4)"
            )
        return np.select(exact, tries).astype(np.float32)

    def from_file(self, scales: np.ndarray) -> np.ndarray:
        """What `to_file` was given."""
        return (np.float32(1.0) / scales).astype(np.float32) if self.divides else scales


def _suffixes(codes: str, outer_scale: str, input_scale: str) -> dict[str, str]:
    return {"codes": codes, "block_scale": "weight_scale", "outer_scale": outer_scale, "input_scale": input_scale}


MODELOPT = Layout("modelopt", _suffixes("weight", "weight_scale_2", "input_scale"), (), divides=False)
COMPRESSED = Layout(
    "compressed-tensors", _suffixes("weight_packed", "weight_global_scale", "input_global_scale"), (1,), divides=True
)
LAYOUTS = {each.name: each for each in (MODELOPT, COMPRESSED)}


# --- written -------------------------------------------------------------------------------------------------------------------


def _plain_parts(config: ModelConfig, recipe: Recipe) -> list[tuple[int, str]]:
    """What a recipe leaves plain inside the layers: (layer, "self_attn" or "mlp")."""
    plain = []
    for layer in range(config.num_hidden_layers):
        mlp = EXPERTS if config.is_moe_layer(layer) else MLP
        for kind, module in ((ATTENTION, "self_attn"), (mlp, "mlp")):
            if not recipe.format_of(kind, layer, config.num_hidden_layers).quantized:
                plain.append((layer, module))
    return plain


def ignored(layout: Layout, config: ModelConfig, recipe: Recipe) -> list[str]:
    """Patterns of the modules that an engine must not take for quantised: output embedding, routers, and plain layers.

    ModelOpt's are wildcards over a module's whole name, which some engines also look for inside a name: ``model.layers.1.mlp*``
    and never ``model.layers.1*``, which layer 11 would match. compressed-tensors' are regular expressions from a name's start.
    A router is ``mlp.gate`` to its end: ``mlp.gate_proj`` is a matrix.
    """
    plain = _plain_parts(config, recipe)
    if layout is COMPRESSED:
        found = ["lm_head"] + (["re:.*mlp\\.gate$"] if config.is_moe else [])
        return found + [f"re:model\\.layers\\.{layer}\\.{module}\\..*" for layer, module in plain]
    routers = [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer) and (layer, "mlp") not in plain]
    found = ["lm_head"] + [f"model.layers.{layer}.mlp.gate" for layer in routers]
    return found + [f"model.layers.{layer}.{module}*" for layer, module in plain]


def quantization_config(layout: Layout, ignore: list[str], activations: bool) -> dict[str, Any]:
    """The `quantization_config` of a config.json.

    Args:
      layout: the layout.
      ignore: see `ignored`.
      activations: whether outer scales of activations are there; without them engines quantise weights only.
    """
    numbers = {"num_bits": 4, "type": "float", "group_size": 16}
    if layout is MODELOPT:
        group = {"weights": {"dynamic": False, **numbers}, "targets": ["Linear"]}
        if activations:
            group["input_activations"] = {"dynamic": False, **numbers}
        return {
            "quant_method": "modelopt",
            "quant_algo": _W4A4 if activations else _W4A16,
            "group_size": 16,
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }
    numbers |= {"strategy": "tensor_group", "symmetric": True}
    group = {
        "format": _PACKED,
        "weights": {"dynamic": False, **numbers},
        # "local": block scales are made as the engine runs, the outer scale is the stored one.
        "input_activations": {"dynamic": "local", **numbers} if activations else None,
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def quant_file(ignore: list[str], activations: bool, version: str) -> dict[str, Any]:
    """ModelOpt's hf_quant_config.json. Engines take a producer of another name for another layout, so the name is the layout's
    and the version says who wrote it.
    """
    return {
        "producer": {"name": "modelopt", "version": f"minite_jax {version}"},
        "quantization": {
            "quant_algo": _W4A4 if activations else _W4A16,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ignore,
        },
    }


# --- read ----------------------------------------------------------------------------------------------------------------------


def is_nvfp4(folder: Path) -> bool:
    """Whether a folder says of its weights that they are quantised; `read_layout` says whether as NVFP4."""
    config = folder / "config.json"
    return (folder / QUANT_FILE).is_file() or config.is_file() and "quantization_config" in read_json(config)


def read_layout(folder: Path, raw: Mapping[str, Any]) -> Layout:
    """What layout a folder says it has.

    Args:
      folder: with hf_quant_config.json, perhaps.
      raw: its config.json.

    Raises:
      CheckpointError: none, or other numbers than NVFP4 with blocks of 16.
    """
    where, quant = str(folder / "config.json"), raw.get("quantization_config")
    if quant is None and (folder / QUANT_FILE).is_file():
        where, quant = str(folder / QUANT_FILE), read_json(folder / QUANT_FILE)
    if quant is None:
        raise CheckpointError(f"{where} has no quantization_config: its weights are plain, read it with load_huggingface")
    if not isinstance(quant, dict):
        raise CheckpointError(f"{where}: quantization_config={quant!r} is no JSON object: fetch the file again")
    method = str(quant.get("quant_method", "modelopt" if "quantization" in quant else None))
    if method == "compressed-tensors":
        _check_compressed(where, quant)
        return COMPRESSED
    if method not in ("modelopt", "modelopt_fp4"):
        raise CheckpointError(f"{where}: quant_method={method} is not read here; there are modelopt and compressed-tensors")
    _check_modelopt(where, quant)
    if (folder / QUANT_FILE).is_file():
        _check_modelopt(str(folder / QUANT_FILE), read_json(folder / QUANT_FILE))
    return MODELOPT


# What each layout's configuration may say. Anything else may stand for a function that this forward lacks, as in config.json:
# compressed-tensors' transform_config, for one, puts rotations before and behind matrices and needs no tensors for it.
_KNOWN_MODELOPT = {
    "config_groups", "exclude_modules", "group_size", "ignore", "kv_cache_quant_algo", "kv_cache_scheme",
    "packed_modules_mapping", "producer", "quant_algo", "quant_method", "quantization",
}  # fmt: skip
_KNOWN_COMPRESSED = {
    "config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "packed_modules_mapping", "quant_method",
    "quantization_status", "run_compressed", "version",
}  # fmt: skip
_WEIGHTS = {"num_bits": (4,), "type": ("float",), "group_size": (16,)}
# Where they are said at all.
_WEIGHTS_IF_SAID = {"strategy": ("tensor_group",), "symmetric": (True,), "dynamic": (False,)}


def _check_known(where: str, said: Mapping[str, Any], known: set[str]) -> None:
    # What is said to be absent (no zero points, no factors of AWQ, no sparsity, no rotations) is no function.
    unknown = sorted(key for key, value in said.items() if key not in known and value not in (None, False, {}, []))
    if unknown:
        raise CheckpointError(
            f"{where}: unknown key {unknown[0]} of the quantisation: it may stand for a function that this forward lacks; remove "
            "it if it does not"
        )


def _check_groups(where: str, groups: Any) -> None:
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups={groups!r} does not say what is quantised: fetch the file again")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        for key, allowed in (_WEIGHTS | _WEIGHTS_IF_SAID).items():
            got = weights.get(key)
            if got not in allowed and (key in _WEIGHTS or got is not None):
                what = f"{key}={got}, and NVFP4 has {allowed[0]}"
                raise CheckpointError(f"{where}: {name} has weights with {what}: take another folder")


def _check_modelopt(where: str, quant: Mapping[str, Any]) -> None:
    inner = quant.get("quantization", quant)
    inner = inner if isinstance(inner, dict) else {}
    algo = inner.get("quant_algo")
    if str(algo).upper() not in (_W4A4, _W4A16):
        raise CheckpointError(f"{where}: quant_algo={algo} is not read here, only {_W4A4} and {_W4A16} are: take another folder")
    if inner.get("group_size", 16) not in (16, None):
        raise CheckpointError(f"{where}: group_size={inner['group_size']}, and a block of NVFP4 has 16 numbers")
    for each in (quant, inner):
        _check_known(where, each, _KNOWN_MODELOPT)
    if "config_groups" in quant:
        _check_groups(where, quant["config_groups"])


def _check_compressed(where: str, quant: Mapping[str, Any]) -> None:
    groups = quant.get("config_groups")
    formats = [quant.get("format")]
    if isinstance(groups, dict):
        formats += [group["format"] for group in groups.values() if isinstance(group, dict) and group.get("format")]
    others = sorted({str(each) for each in formats if each != _PACKED})
    if others:
        raise CheckpointError(f"{where}: format {', '.join(others)} is not read here, only {_PACKED} is: take another folder")
    _check_known(where, quant, _KNOWN_COMPRESSED)
    _check_groups(where, groups)


def is_cache_scale(tensor: str) -> bool:
    """Whether a tensor is a scale of keys or values for an engine with a quantised cache; ours is bfloat16."""
    return re.search(r"self_attn\.(?:[kv]_proj\.)?[kv]_scale$", tensor) is not None
