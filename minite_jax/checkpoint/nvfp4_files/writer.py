"""Writes a policy as an NVFP4 folder: its own codes and scales, for engines that serve it and for `load_nvfp4`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import minite_jax
from minite_jax.checkpoint.config import to_plain
from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.config import from_json, read_json, to_json
from minite_jax.checkpoint.huggingface.folder import Content, check_new, other_files, plan_files, to_bytes, write_folder
from minite_jax.checkpoint.huggingface.reader import INDEX
from minite_jax.checkpoint.nvfp4_files import layouts
from minite_jax.checkpoint.nvfp4_files.blocks import blocks, matrices
from minite_jax.checkpoint.nvfp4_files.reader import OURS
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import num_params, path_name
from minite_jax.model.policy import Policy
from pallas_kernels.nvfp4 import Nvfp4Array

_TYPES = {"float32": np.dtype(np.float32), "bfloat16": files.DTYPES["BF16"]}


def save_nvfp4(
    folder: str | Path,
    policy: Policy,
    *,
    layout: str = "modelopt",
    input_scales: Mapping[str, np.ndarray] | None = None,
    like: str | Path | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
    beside: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Writes a folder that vLLM, SGLang and TensorRT-LLM read, with the policy's own codes and scales.

    The numbers are the policy's, bit for bit, for `load_nvfp4` and for whoever multiplies codes, block scales and outer scales
    in float32. Query, key and value have one outer scale, and so have gate and up: engines fuse them and keep one.

    config.json records the recipe, with its rules of scales, under the key ``minite_jax``, which other readers skip.

    Args:
      folder: it must not exist, or be empty.
      policy: see `minite_jax.prepare`. With matrices in NVFP4.
      layout: "modelopt" or "compressed-tensors".
      input_scales: outer scales of activations by the path of the matrix that reads them, float32 [E] or [1], as
        `minite_jax.diagnostics.calibrate` gives them. None: the folder tells engines to quantise weights only, which SGLang
        reads in the layout compressed-tensors alone.
      like: a Hugging Face folder of the same model: its config.json's other keys and the files that are no weights are taken.
      dtype: "float32": what the policy holds in float32 (norms, routers, biases) is written so. "bfloat16": rounded, as engines
        do when they load it.
      max_shard_bytes: most bytes of tensors in one file, unless one tensor has more.
      extra: without `like`, see `minite_jax.checkpoint.huggingface.to_json`.
      beside: other files of the folder, by name: a tokenizer.
      progress: called with the number of bytes of each piece that was written.

    Returns:
      The folder.

    Raises:
      CheckpointError: the folder holds something, the disk has no room, the policy has nothing in NVFP4, a number is NaN or
        infinite, `like` is of another model, a scale of activations is missing or no positive number, or compressed-tensors'
        divisors cannot say an outer scale. What was written is removed.
    """
    final = check_new(folder)
    if layout not in layouts.LAYOUTS or dtype not in _TYPES:
        known = f"layout one of {', '.join(layouts.LAYOUTS)}, dtype one of {', '.join(_TYPES)}"
        raise CheckpointError(f"layout={layout!r}, dtype={dtype!r}: {known}")
    names = layouts.LAYOUTS[layout]
    contents, leaves = _contents(policy, names, input_scales, _TYPES[dtype])
    plan, others = plan_files(contents, max_shard_bytes, num_params(policy.config))
    activations = input_scales is not None
    ignore = layouts.ignored(names, policy.config, policy.recipe)
    ours = {"version": minite_jax.__version__, "recipe": to_plain(policy.recipe)}
    config = _config(policy, like, extra)
    config |= {"quantization_config": layouts.quantization_config(names, ignore, activations), OURS: ours}
    others["config.json"] = to_bytes(config)
    if names is layouts.MODELOPT:
        others[layouts.QUANT_FILE] = to_bytes(layouts.quant_file(ignore, activations, minite_jax.__version__))
    if like is not None:
        own = {"config.json", layouts.QUANT_FILE, INDEX}
        others |= {name: path for name, path in other_files(Path(like)).items() if name not in own}
    others |= {name: text.encode() for name, text in (beside or {}).items()}
    return write_folder(final, plan, others, leaves, progress)


def nvfp4_contents(policy: Policy, layout: str, input_scales: bool) -> list[Content]:
    """The tensors that `save_nvfp4` writes for a policy, whose weights may be `jax.ShapeDtypeStruct`s."""
    names = layouts.LAYOUTS[layout]
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(policy.weights)[0]}
    return _plan_contents(policy, names, leaves, input_scales, None)


def _plan_contents(policy, names, leaves, input_scales: bool, rounded: np.dtype | None) -> list[Content]:
    contents = []
    for place, part in blocks(policy.config, names, _quantized(policy), input_scales):
        stored = np.dtype(np.float32) if part == "input_scale" else np.dtype(leaves[place.leaf].dtype)
        if rounded is not None and part == "plain" and stored == np.dtype(np.float32):
            stored = rounded
        contents.append(Content(place.tensor, files.type_name(stored), place))
    return contents


def _quantized(policy: Policy) -> set[str]:
    is_leaf = lambda x: isinstance(x, Nvfp4Array)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(policy.weights, is_leaf=is_leaf)[0]
    return {path_name(path) for path, leaf in flat if is_leaf(leaf)}


def _contents(policy, names, input_scales, rounded) -> tuple[list[Content], dict[str, Any]]:
    quantized = _quantized(policy)
    if not quantized:
        raise CheckpointError(f"recipe {policy.recipe.name} has nothing in NVFP4: write plain weights with save_huggingface")
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(policy.weights)[0]}
    specs = matrices(policy.config)
    for name in quantized:
        outer, experts = np.asarray(leaves[f"{name}.outer_scale"]), specs[name].shape[:-2] or (1,)
        if outer.size != int(np.prod(experts)):
            raise CheckpointError(f"parameter {name} has an outer scale for each row, and files have one for each matrix")
        if not np.isfinite(outer).all():
            raise CheckpointError(f"parameter {name} holds NaN or infinity: nothing was written")
        leaves[f"{name}.outer_scale"] = names.to_file(outer.reshape(-1), f"parameter {name}")
        if input_scales is None:
            continue
        scale = np.asarray(input_scales.get(name, np.nan), np.float32)
        if scale.shape != experts or not ((scale >= np.finfo(np.float32).tiny) & (scale < np.inf)).all():
            raise CheckpointError(f"input_scales[{name!r}] must be {list(experts)} positive float32 numbers: nothing was written")
        with np.errstate(over="ignore"):
            leaves[f"{name}.input_scale"] = 1 / scale if names.divides else scale
    return _plan_contents(policy, names, leaves, input_scales is not None, rounded), leaves


def _config(policy: Policy, like, extra) -> dict[str, Any]:
    if like is None:
        return to_json(policy.config, dtype=policy.recipe.dtype, extra=extra)
    if extra is not None:
        raise CheckpointError("extra keys are for a folder without `like`, whose config.json is taken: leave one of them out")
    return read_like(like, policy.config)


def read_like(like: str | Path, config: ModelConfig) -> dict[str, Any]:
    """The config.json of a folder, plain or NVFP4, that a new one is to be like, without what it says of quantisation.

    Raises:
      CheckpointError: there is none, or it is of another model.
    """
    path = Path(like) / "config.json"
    raw = {key: value for key, value in read_json(path).items() if key not in ("quantization_config", OURS)}
    if from_json(raw, str(path)) != config:
        raise CheckpointError(f"{like} is of another model: leave `like` out, or give its own folder")
    return raw
