"""Writes our parameter tree as a Hugging Face folder, a piece of a tensor at a time.

The folder is written under a temporary name and renamed when it is whole.
"""

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.config import to_json
from minite_jax.checkpoint.huggingface.names import Placement, is_harmless, placements
from minite_jax.checkpoint.huggingface.reader import INDEX, SINGLE, Folder, open_folder
from minite_jax.checkpoint.leaves import shorten
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import abstract_params, path_name

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class _Content(NamedTuple):
    """One tensor that is to be written: a block of a leaf, or a copy of a tensor that no leaf holds."""

    name: str
    dtype: str
    source: Placement | files.Tensor


class _File(NamedTuple):
    name: str
    header: bytes
    contents: list[_Content]


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
      params: tree of `minite_jax.model.abstract_params`; float32 or bfloat16, on any devices.
      config: shape of the model.
      like: a folder of the same model, whose layout the new one has. `dtype`, `fused_experts`, `max_shard_bytes` and `extra` are
        for folders without it.
      dtype: "bfloat16", "float16" or "float32".
      fused_experts: see `names.placements`.
      max_shard_bytes: most bytes of tensors in one file, unless one tensor has more.
      extra: see `config.to_json`.
      progress: called with the number of bytes of each piece that was written.

    Returns:
      The folder.

    Raises:
      CheckpointError: the folder holds something, the disk has no room, a parameter is missing, of another shape, NaN or
        infinite, or too large for its type in the file, or `like` is of another model. What was written is removed.
    """
    final = Path(folder)
    if jax.process_count() > 1:
        raise CheckpointError("a folder is written by one process; this run has several")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final} is there already: nothing is written over, give another folder")
    leaves = _leaves(params, config)
    if like is None:
        if dtype not in _TYPES:
            raise CheckpointError(f"dtype={dtype!r} must be one of {', '.join(_TYPES)}")
        plan, others = _new_plan(config, _TYPES[dtype], fused_experts, max_shard_bytes)
        others["config.json"] = _json(to_json(config, dtype=dtype, extra=extra))
    else:
        plan, others = _same_plan(open_folder(like), config)
    needed = sum(len(each.header) + sum(_nbytes(content) for content in each.contents) for each in plan)
    unfinished = final.with_name(f".{final.name}.unfinished")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(final.parent).free
        if free < needed:
            raise CheckpointError(f"{final} needs {needed:,} bytes and the disk has {free:,}: make room")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        for each in plan:
            with (unfinished / each.name).open("wb") as file:
                file.write(each.header)
                for content in each.contents:
                    for piece in _pieces(content, leaves):
                        file.write(piece)
                        if progress is not None:
                            progress(piece.nbytes)
        for name, content in others.items():
            if isinstance(content, Path):
                shutil.copyfile(content, unfinished / name)
            else:
                (unfinished / name).write_bytes(content)
        os.replace(unfinished, final)
    except OSError as error:
        raise CheckpointError(f"{final} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # also after Ctrl-C
    return final


def _leaves(params: dict, config: ModelConfig) -> dict[str, Any]:
    given = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    wanted = {path_name(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]}
    problems = [f"lack {name}" for name in wanted if name not in given]
    problems += [f"have {name}, which this model does not have" for name in given if name not in wanted]
    problems += [
        f"have {name} as {leaf.dtype} {list(leaf.shape)} where float32 or bfloat16 {list(wanted[name].shape)} is wanted"
        for name, leaf in given.items()
        if name in wanted
        and (tuple(leaf.shape) != wanted[name].shape or leaf.dtype not in (np.dtype(np.float32), files.DTYPES["BF16"]))
    ]
    if problems:
        raise CheckpointError(f"the parameters do not fit the config: they {shorten(problems)}")
    return given


def _new_plan(config, dtype, fused_experts, max_shard_bytes) -> tuple[list[_File], dict[str, Any]]:
    """Files as transformers fills them: tensors in the order of its modules, a new file where the next one does not fit, and a
    file of its own, at once, for one that fits none.
    """
    shards: list[list[Placement]] = []
    filling: list[Placement] = []
    size = 0
    for each in placements(config, fused_experts=fused_experts):
        more = files.nbytes(dtype, each.shape)
        if more > max_shard_bytes:
            shards.append([each])
            continue
        if size + more > max_shard_bytes:
            shards.append(filling)
            filling, size = [], 0
        filling.append(each)
        size += more
    if filling:
        shards.append(filling)
    plan = []
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        by_name = {each.tensor: each for each in shard}
        order, header, _ = files.make_header({each.tensor: (dtype, each.shape) for each in shard})
        plan.append(_File(name, header, [_Content(tensor, dtype, by_name[tensor]) for tensor in order]))
    if len(plan) == 1:
        return plan, {}
    numbers = sum(math.prod(each.shape) for shard in shards for each in shard)
    total = sum(files.nbytes(dtype, each.shape) for shard in shards for each in shard)
    index = {
        "metadata": {"total_parameters": numbers, "total_size": total},
        "weight_map": {each.name: file.name for file in plan for each in file.contents},
    }
    return plan, {INDEX: _json(index | {"weight_map": dict(sorted(index["weight_map"].items()))})}


def _same_plan(like: Folder, config: ModelConfig) -> tuple[list[_File], dict[str, Any]]:
    if like.config != config:
        raise CheckpointError(f"{like.path} is of another model than these parameters: leave `like` out, or give its own folder")
    if like.stale:
        stale = shorten([*map(str, like.stale)])
        raise CheckpointError(f"{like.path} holds tensors that its index assigns to other files ({stale}): leave `like` out")
    sources: dict[str, Placement | files.Tensor] = {each.tensor: each for each in like.placements}
    if config.tie_word_embeddings and "lm_head.weight" in like.tensors:
        sources["lm_head.weight"] = sources["model.embed_tokens.weight"]
    plan = []
    for path, header in like.headers.items():
        held, _ = files.read_header(path)
        contents = [
            _Content(name, tensor.dtype, tensor if is_harmless(name) else sources[name]) for name, tensor in held.items()
        ]
        plan.append(_File(path.name, header, contents))
    others = {path.name: path for path in like.path.iterdir() if path.is_file() and path.suffix not in _WEIGHTS}
    return plan, others


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _nbytes(content: _Content) -> int:
    source = content.source
    return source.nbytes if isinstance(source, files.Tensor) else files.nbytes(content.dtype, source.shape)


def _pieces(content: _Content, leaves: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """A tensor's numbers in the type of the file, a run of its first axis at a time."""
    source, dtype = content.source, files.DTYPES.get(content.dtype)
    if isinstance(source, files.Tensor):
        yield np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
        return
    leaf = leaves[source.leaf]
    axis = len(source.start) - len(source.shape)
    row_bytes = files.nbytes("F32", source.shape[1:])
    for first, last in files.row_runs(source.shape[0], row_bytes):
        start = tuple(at + first * (i == axis) for i, at in enumerate(source.start))
        values = _fetch(leaf, start, (1,) * axis + (last - first, *source.shape[1:]))
        with np.errstate(over="ignore"):  # reported below
            piece = np.ascontiguousarray(values.astype(dtype, copy=False))
        if not files.is_finite(piece):
            what = f"is beyond {content.dtype}" if files.is_finite(values) else "holds NaN or infinity"
            raise CheckpointError(f"parameter {source.leaf} ({content.name}) {what}: nothing was written")
        yield piece.reshape(-1)


def _fetch(leaf: Any, start: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A block of a parameter, on the host."""
    on_host = isinstance(leaf, np.ndarray) or all(each.platform == "cpu" for each in leaf.devices()) and len(leaf.devices()) == 1
    if on_host:
        return np.asarray(leaf)[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))]  # a view
    return np.asarray(_block(leaf, tuple(map(np.int32, start)), sizes))


@functools.partial(jax.jit, static_argnums=2)
def _block(leaf, start, sizes):
    return jax.lax.dynamic_slice(leaf, start, sizes)


