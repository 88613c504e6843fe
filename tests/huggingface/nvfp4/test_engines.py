"""What engines find in an NVFP4 folder: by their patterns and in its configuration."""

import fnmatch
import json
import re

import pytest
from nvfp4_models import LAYOUTS, scales_of

import minite_jax as mt
from minite_jax.checkpoint.huggingface import placements
from minite_jax.checkpoint.nvfp4_files import layouts
from minite_jax.checkpoint.nvfp4_files.blocks import quantized_matrices
from minite_jax.model import tiny_moe


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
