"""Writes our parameter tree as a Hugging Face folder, a piece of a tensor at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.config import to_json
from minite_jax.checkpoint.huggingface.folder import Content, File, check_new, other_files, plan_files, to_bytes, write_folder
from minite_jax.checkpoint.huggingface.names import Placement, is_harmless, placements
from minite_jax.checkpoint.huggingface.reader import Folder, open_folder
from minite_jax.checkpoint.leaves import shorten
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import abstract_specs, num_params, path_name
from pallas_kernels.nvfp4 import Nvfp4Array

TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def save_huggingface(
    folder: str | Path,
    params: dict,
    config: ModelConfig,
    *,
    like: str | Path | None = None,
    dtype: str = "bfloat16",
    fused_experts: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
    beside: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Writes a folder with config.json and safetensors files that transformers, vLLM and SGLang read.

    What is promised, byte for byte:

    * With `like`, the folder has the files of that one: its config.json, index, tokenizer and whatever else is no weight are
      copied; every file of weights has the same header and the same tensors, in the same types, at the same places. Numbers are
      rounded to those types, to nearest even. Where `params` are what `load_huggingface(like)` gave in float32, all files are
      therefore equal. (A `like` with tensors that its index assigns elsewhere is refused: those bytes would be lost.)
    * Without it, the weights are those that transformers' `save_pretrained` writes for the same numbers in the same `dtype` with
      the same `max_shard_bytes`: the same files, headers and index. (Experts in several shards are in the order of version 4,
      expert by expert; version 5 fills shards matrix by matrix.) config.json has the spelling that old and new readers know, the
      keys that a `ModelConfig` knows, and `extra`.

    Args:
      folder: it must not exist, or be empty.
      params: tree of `minite_jax.model.abstract_params`; float32 or bfloat16, on any devices. Or the weights of a
        `Policy`: NVFP4 matrices are written as the numbers that they stand for, which bfloat16 holds exactly where outer scales
        are powers of two.
      config: shape of the model.
      like: a folder of the same model, whose layout the new one has. `dtype`, `fused_experts`, `max_shard_bytes` and `extra` are
        for folders without it.
      dtype: "bfloat16", "float16" or "float32".
      fused_experts: see `names.placements`.
      max_shard_bytes: most bytes of tensors in one file, unless one tensor has more.
      extra: see `config.to_json`.
      beside: other files of the folder, by name: a tokenizer.
      progress: called with the number of bytes of each piece that was written.

    Returns:
      The folder.

    Raises:
      CheckpointError: the folder holds something, the disk has no room, a parameter is missing, of another shape, NaN or
        infinite, or too large for its type in the file, or `like` is of another model. What was written is removed.
    """
    final = check_new(folder)
    leaves = _leaves(params, config)
    if like is None:
        if dtype not in TYPES:
            raise CheckpointError(f"dtype={dtype!r} must be one of {', '.join(TYPES)}")
        contents = [Content(each.tensor, TYPES[dtype], each) for each in placements(config, fused_experts=fused_experts)]
        plan, others = plan_files(contents, max_shard_bytes, num_params(config))
        others["config.json"] = to_bytes(to_json(config, dtype=dtype, extra=extra))
    else:
        plan, others = _same_plan(open_like(like, config))
    others |= {name: text.encode() for name, text in (beside or {}).items()}
    return write_folder(final, plan, others, leaves, progress)


def _leaves(params: dict, config: ModelConfig) -> dict[str, Any]:
    is_leaf = lambda x: isinstance(x, Nvfp4Array)  # noqa: E731
    given = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)[0]}
    wanted = abstract_specs(config)
    problems = [f"lack {name}" for name in wanted if name not in given]
    problems += [f"have {name}, which this model does not have" for name in given if name not in wanted]
    problems += [
        f"have {name} as {_type(leaf)} {list(leaf.shape)} where float32 or bfloat16 {list(wanted[name].shape)} is wanted"
        for name, leaf in given.items()
        if name in wanted and (tuple(leaf.shape) != wanted[name].shape or _type(leaf) not in ("float32", "bfloat16", "NVFP4"))
    ]
    if problems:
        raise CheckpointError(f"the parameters do not fit the config: they {shorten(problems)}")
    return given


def _type(leaf: Any) -> str:
    return "NVFP4" if isinstance(leaf, Nvfp4Array) else str(leaf.dtype)


def open_like(folder: str | Path, config: ModelConfig) -> Folder:
    """Looks into a folder that a new one is to be like; reads no weights.

    Raises:
      CheckpointError: see `open_folder`; or it is of another model, or has tensors that its index assigns elsewhere.
    """
    like = open_folder(folder)
    if like.config != config:
        raise CheckpointError(f"{like.path} is of another model than these parameters: leave `like` out, or give its own folder")
    if like.stale:
        stale = shorten([*map(str, like.stale)])
        raise CheckpointError(f"{like.path} holds tensors that its index assigns to other files ({stale}): leave `like` out")
    return like


def _same_plan(like: Folder) -> tuple[list[File], dict[str, Any]]:
    sources: dict[str, Placement | files.Tensor] = {each.tensor: each for each in like.placements}
    if like.config.tie_word_embeddings and "lm_head.weight" in like.tensors:
        sources["lm_head.weight"] = sources["model.embed_tokens.weight"]
    plan = []
    for path, header in like.headers.items():
        held, _ = files.read_header(path)
        contents = [
            Content(name, tensor.dtype, tensor if is_harmless(name) else sources[name]) for name, tensor in held.items()
        ]
        plan.append(File(path.name, header, contents))
    return plan, other_files(like.path)
