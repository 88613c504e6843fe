"""A new folder of safetensors files: which tensor goes into which file, and the writing, a piece of a tensor at a time.

The folder is written under a temporary name and renamed when it is whole.
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.names import Placement
from minite_jax.checkpoint.huggingface.reader import INDEX, SINGLE
from minite_jax.files import hindrance, nearest
from pallas_kernels import nvfp4

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class Content(NamedTuple):
    """One tensor that is to be written: a block of a leaf, or a copy of a tensor that no leaf holds.

    Attributes:
      name: of the tensor.
      dtype: in the file, as a header calls it.
      source: where its numbers are.
    """

    name: str
    dtype: str
    source: Placement | files.Tensor

    @property
    def nbytes(self) -> int:
        source = self.source
        return source.nbytes if isinstance(source, files.Tensor) else files.nbytes(self.dtype, source.shape)


class File(NamedTuple):
    """A file that is to be written: its name, everything before its first tensor, and its tensors in order."""

    name: str
    header: bytes
    contents: list[Content]


def check_new(folder: str | Path) -> Path:
    """Where a folder is to be written: itself, or what it is a link to.

    Raises:
      CheckpointError: it cannot be written: something is there or in its way, or this process is one of several.
    """
    folder = Path(folder).resolve()
    if jax.process_count() > 1:
        raise CheckpointError("a folder is written by one process; this run has several")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already: nothing is written over, give another folder")
    if (why := hindrance(folder.parent)) is not None:
        raise CheckpointError(f"{folder} cannot be made: {why}; give another folder")
    return folder


def check_room(folder: Path, nbytes: int) -> None:
    """Raises CheckpointError where the disk of a folder, which need not be there, has no room for so many bytes."""
    # What a killed process left there is removed before anything is written.
    leftover = sum(each.stat().st_size for each in _unfinished(folder).rglob("*"))
    free = shutil.disk_usage(nearest(folder)).free + leftover
    if free < nbytes:
        raise CheckpointError(f"{folder} needs {nbytes:,} bytes and the disk has {free:,}: make room")


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


def plan_files(contents: Iterable[Content], max_shard_bytes: int, parameters: int) -> tuple[list[File], dict[str, Any]]:
    """Files as transformers fills them: tensors in the order given, a new file where the next one does not fit, and a file of
    its own, at once, for one that fits none.

    Args:
      contents: the tensors.
      max_shard_bytes: most bytes of tensors in a file.
      parameters: the number that the index gives as the model's.

    Returns:
      The files, and the index by its name where there are several.
    """
    shards: list[list[Content]] = []
    filling: list[Content] = []
    size = 0
    for each in contents:
        if each.nbytes > max_shard_bytes:
            shards.append([each])
            continue
        if size + each.nbytes > max_shard_bytes:
            shards.append(filling)
            filling, size = [], 0
        filling.append(each)
        size += each.nbytes
    if filling:
        shards.append(filling)
    plan = []
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        by_name = {each.name: each for each in shard}
        order, header, _ = files.make_header({each.name: (each.dtype, each.source.shape) for each in shard})
        plan.append(File(name, header, [by_name[tensor] for tensor in order]))
    if len(plan) == 1:
        return plan, {}
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(each.nbytes for shard in shards for each in shard)},
        "weight_map": {each.name: file.name for file in plan for each in file.contents},
    }
    return plan, {INDEX: to_bytes(index | {"weight_map": dict(sorted(index["weight_map"].items()))})}


def other_files(folder: Path) -> dict[str, Any]:
    """Whatever is no weight in a folder (config, index, tokenizer), by name."""
    return {path.name: path for path in folder.iterdir() if path.is_file() and path.suffix not in _WEIGHTS}


def to_bytes(content: dict) -> bytes:
    """A JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_folder(
    final: Path,
    plan: list[File],
    others: Mapping[str, Path | bytes],
    leaves: Mapping[str, Any],
    progress: Callable[[int], None] | None,
) -> Path:
    """Writes a folder, which `check_new` has let pass.

    Args:
      final: the folder, as `check_new` gives it.
      plan: its files with weights.
      others: its other files, to copy or as bytes.
      leaves: arrays of which the plan's tensors are blocks, on any devices; an `Nvfp4Array` stands for its numbers.
      progress: called with the number of bytes of each piece that was written.

    Raises:
      CheckpointError: the disk has no room, or a number is not finite in its type in the file. What was written is removed.
    """
    needed = sum(len(each.header) + sum(content.nbytes for content in each.contents) for each in plan)
    unfinished = _unfinished(final)
    try:
        check_room(final, needed)
        final.parent.mkdir(parents=True, exist_ok=True)
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


def _pieces(content: Content, leaves: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """A tensor's numbers in the type of the file, a run of its first axis at a time."""
    source, dtype = content.source, files.NUMPY.get(content.dtype)
    if isinstance(source, files.Tensor):
        yield np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
        return
    leaf = leaves[source.leaf]
    axis = len(source.start) - len(source.shape)
    row_bytes = files.nbytes("F32", source.shape[1:])
    for first, last in files.row_runs(source.shape[0], row_bytes) if source.shape else [(0, 1)]:
        sizes = (1,) * axis + ((last - first, *source.shape[1:]) if source.shape else ())
        values = _fetch(leaf, source.corner(first), sizes)
        with np.errstate(over="ignore"):  # reported below
            piece = np.ascontiguousarray(values.astype(dtype, copy=False))
        if not files.is_finite(piece):
            what = f"is beyond {content.dtype}" if files.is_finite(values) else "holds NaN or infinity"
            raise CheckpointError(f"parameter {source.leaf} ({content.name}) {what}: nothing was written")
        yield piece.reshape(-1).view(np.uint8)


def _fetch(leaf: Any, start: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A block of a parameter, on the host."""
    if isinstance(leaf, nvfp4.Nvfp4Array):
        return np.asarray(_dequantized_block(leaf, tuple(map(np.int32, start)), sizes))
    on_host = isinstance(leaf, np.ndarray) or all(each.platform == "cpu" for each in leaf.devices()) and len(leaf.devices()) == 1
    if on_host:
        return np.asarray(leaf)[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))]  # a view
    return np.asarray(_block(leaf, tuple(map(np.int32, start)), sizes))


@functools.partial(jax.jit, static_argnums=2)
def _block(leaf, start, sizes):
    return lax.dynamic_slice(leaf, start, sizes)


@functools.partial(jax.jit, static_argnums=2)
def _dequantized_block(leaf: nvfp4.Nvfp4Array, start, sizes):
    """Whole rows: a block of 16 is never cut."""
    parts = nvfp4.Nvfp4Array(
        codes=lax.dynamic_slice(leaf.codes, start, (*sizes[:-1], sizes[-1] // 2)),
        block_scale=lax.dynamic_slice(leaf.block_scale, start, (*sizes[:-1], sizes[-1] // 16)),
        outer_scale=lax.dynamic_slice(leaf.outer_scale, start[: leaf.outer_scale.ndim], sizes[: leaf.outer_scale.ndim]),
    )
    return nvfp4.dequantize(parts)
