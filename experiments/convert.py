"""Converts checkpoints: Hugging Face folders (safetensors) <-> orbax, folders into folders of another layout, GGUF into either.

    python -m experiments.convert --source=Qwen3-30B-A3B --target=runs/start              # folder -> orbax, float32 masters
    python -m experiments.convert --source=runs/x --target=out --like=Qwen3-30B-A3B       # a run's newest checkpoint -> folder
    python -m experiments.convert --source=model.gguf --target=out --dtype=float32        # GGUF -> folder, with its tokenizer
    python -m experiments.convert --source=Qwen3-30B-A3B --dry_run                        # what is in it, and what it becomes

The source says by itself what it is: a folder with config.json, one with checkpoints/, of a training run or of this script, or a
GGUF file.
With --like a folder has the files of that one, byte for byte where no number changed (`mt.save_huggingface`). Nothing is written
over. What is read and written goes through a piece at a time; parameters are held once, in float32 (a folder into a folder: in
the type of --dtype).
"""

import dataclasses
import functools
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from minite_jax import checkpoint
from minite_jax.checkpoint import huggingface
from minite_jax.checkpoint.config import to_plain
from minite_jax.checkpoint.gguf import is_gguf, open_gguf
from minite_jax.errors import UserError
from minite_jax.files import replaced
from minite_jax.model.params import abstract_params
from minite_jax.optional import require

_SOURCE = flags.DEFINE_string("source", None, "What to read: a Hugging Face folder, a run, or a GGUF file.")
_TARGET = flags.DEFINE_string("target", None, "Folder to write. It must not hold anything.")
_TO = flags.DEFINE_enum("to", None, ("hf", "orbax"), "What to write; by default the other kind than the source.")
_LIKE = flags.DEFINE_string("like", None, "Hugging Face folder whose layout and other files the target has.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float16", "float32"), "Type in a folder without --like.")
_FUSED = flags.DEFINE_bool("fused_experts", False, "In a folder without --like: all experts of a layer in one tensor.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of an orbax source; by default the newest.", lower_bound=0)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the table of tensors and stop.")

_KIND = "minite_jax model"  # of checkpoints that hold a model and nothing of a run


@dataclasses.dataclass
class Source:
    """A checkpoint that was looked into.

    Attributes:
      kind: "hf", "orbax" or "gguf".
      config: shape of the model.
      rows: of the table: tensor, type, shape, leaf.
      nbytes: of its tensors.
      read: reads the parameters in a type.
      extra: keys of a folder's config.json beside those of `config`.
      texts: gives files that a folder has beside the model, by name: its tokenizer.
    """

    kind: str
    config: mt.ModelConfig
    rows: list[tuple[str, str, tuple[int, ...], str]]
    nbytes: int
    read: object
    extra: dict | None = None
    texts: Callable[[], dict[str, str]] = dict


def open_source(path: Path, step: int | None) -> Source:
    """Looks into a checkpoint of any kind; reads no weights.

    Raises:
      UserError: there is none.
    """
    if is_gguf(path):
        return _open_gguf(path)
    if (path / "checkpoints").is_dir():
        return _open_orbax(path, step)
    if not (path / "config.json").is_file():
        raise UserError(f"--source={path} has neither config.json nor checkpoints/: give a model's folder or file, or a run's")
    folder = huggingface.open_folder(path)
    rows = [(each.tensor, folder.tensors[each.tensor].dtype, each.shape, each.leaf) for each in folder.placements]

    def read(dtype):
        with _bar("reading", folder.nbytes) as bar:
            return mt.load_huggingface(path, dtype=dtype, progress=bar.update)[1]

    return Source("hf", folder.config, rows, folder.nbytes, read)


def _open_gguf(path: Path) -> Source:
    from minite_jax.text.gguf import tokenizer_files

    opened = open_gguf(path)
    rows = [(each.tensor, opened.tensors[each.tensor].dtype, each.shape, each.leaf) for each in opened.placements]
    extra = {} if opened.context_length is None else {"max_position_embeddings": opened.context_length}

    def read(dtype):
        with _bar("reading", opened.nbytes) as bar:
            return mt.load_gguf(path, dtype=dtype, progress=bar.update)[1]

    return Source("gguf", opened.config, rows, opened.nbytes, read, extra, functools.partial(tokenizer_files, path))


def _open_orbax(path: Path, step: int | None) -> Source:
    stored = checkpoint.read_config(path, step)
    if stored.get("kind") == _KIND:
        config = mt.ModelConfig(**stored["model"])
        template = {
            "params": jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(config))
        }
        read = lambda dtype: checkpoint.restore(path, template, stored, step)["params"]  # noqa: E731
    else:
        config, read = _open_run(path, stored, step)
    rows = [(each.tensor, "F32", each.shape, each.leaf) for each in huggingface.placements(config)]
    return Source("orbax", config, rows, 4 * mt.num_params(config), read)


def _open_run(path: Path, stored: dict, step: int | None):
    from experiments.training import stored_run

    if step not in (None, checkpoint.latest_step(path)):
        raise UserError(f"--step={step}: of a training run the newest checkpoint is read, {checkpoint.latest_step(path)}")
    if "model" not in stored:
        raise UserError(f"--source={path} holds checkpoints of something else than a model")
    return mt.ModelConfig(**stored["model"]), lambda dtype: stored_run(path).state.train.params


def table(source: Source) -> list[str]:
    """Lines of the table of tensors; those of a layer's experts that differ in their number alone are one line."""
    groups: dict[tuple, int] = {}
    for tensor, dtype, shape, leaf in source.rows:
        key = (re.sub(r"experts\.\d+", "experts.*", tensor), dtype, str(list(shape)), leaf)
        groups[key] = groups.get(key, 0) + 1
    widths = [max(len(key[column]) for key in groups) for column in range(4)]
    lines = [
        "  ".join([f"{count:5d} x", *(text.ljust(width) for text, width in zip(key, widths, strict=True))]).rstrip()
        for key, count in groups.items()
    ]
    total = f"{len(source.rows):,} tensors, {mt.num_params(source.config):,} parameters, {source.nbytes:,} bytes"
    return ["count    tensor, type, shape, parameter", *lines, total]


def convert(source: Source, target: Path, to: str) -> None:
    """Reads the source and writes the target."""
    like = None if _LIKE.value is None else Path(_LIKE.value)
    texts = source.texts() if to == "hf" and like is None else {}
    start = time.perf_counter()
    through = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}.get(_DTYPE.value, jnp.float32)
    # A folder's layout may hold any type; without one, what is written need not be held wider than it is.
    params = source.read(through if source.kind != "orbax" and to == "hf" and like is None else jnp.float32)
    params = jax.block_until_ready(params)
    read_seconds = time.perf_counter() - start
    size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(params))
    print(f"read     {source.nbytes:,} bytes in {read_seconds:.1f} s, {source.nbytes / read_seconds / 1e9:.2f} GB/s")
    _print_memory(size)
    start = time.perf_counter()
    if to == "orbax":
        config = {"kind": _KIND, "model": to_plain(source.config)}
        checkpoint.save(target, 0, {"params": params}, config)
    else:
        total = huggingface.open_folder(like).nbytes if like else sum(np.prod(row[2]) for row in source.rows) * (
            4 if _DTYPE.value == "float32" else 2
        )  # fmt: skip
        with _bar("writing", int(total)) as bar:
            mt.save_huggingface(
                target, params, source.config, like=like, dtype=_DTYPE.value, fused_experts=_FUSED.value, extra=source.extra,
                progress=bar.update,
            )  # fmt: skip
        for name, text in texts.items():
            with replaced(target / name) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - start
    written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"wrote    {written:,} bytes in {seconds:.1f} s, {written / seconds / 1e9:.2f} GB/s, to {target}")
    _print_memory(size)


def _print_memory(size: int) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory   parameters {size:,} bytes, peak of the process {peak:,}, above the parameters {peak - size:,}")


def _bar(what: str, total: int):
    return require("tqdm", "experiments").tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True, leave=False)


def main(argv: list[str]) -> None:
    del argv
    source = open_source(Path(_SOURCE.value), _STEP.value)
    to = _TO.value or ("orbax" if source.kind == "hf" else "hf")
    if source.kind == to == "orbax":
        raise UserError("--to=orbax: the source is an orbax checkpoint already; copy its folder")
    if _LIKE.value and to == "orbax":
        raise UserError("--like says what a Hugging Face folder looks like, and orbax is written: leave it out, or say --to=hf")
    if _DRY_RUN.value:
        print("\n".join(table(source)))
        print(f"would be written as {to}" + (f" to {_TARGET.value}" if _TARGET.value else ""))
        return
    if not _TARGET.value:
        raise UserError("--target is missing: give the folder to write, or --dry_run to look only")
    target = Path(_TARGET.value)
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise UserError(f"--target={target} is there already: nothing is written over, give another folder")
    convert(source, target, to)


if __name__ == "__main__":
    cli.run(main, required=("source",))
