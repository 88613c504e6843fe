"""Converts checkpoints: Hugging Face folders (safetensors), NVFP4 folders and orbax into each other and into other layouts, and
GGUF into each of them.

    python -m experiments.convert --source=Qwen3-30B-A3B --target=runs/start              # folder -> orbax, float32 masters
    python -m experiments.convert --source=runs/x --target=out --like=Qwen3-30B-A3B       # a run's newest checkpoint -> folder
    python -m experiments.convert --source=Qwen3-30B-A3B --target=q --to=nvfp4            # folder -> NVFP4, ModelOpt's layout
    python -m experiments.convert --source=runs/x --target=q --to=nvfp4 --like=Qwen3-30B-A3B --calibration=ids.json
    python -m experiments.convert --source=q --target=out --to=hf                         # NVFP4 -> bfloat16
    python -m experiments.convert --source=model.gguf --target=out --to=hf --dtype=float32   # GGUF -> folder, with its tokenizer
    python -m experiments.convert --source=Qwen3-30B-A3B --dry_run                        # what is in it, and what it becomes

The source says by itself what it is: a folder with config.json, one with checkpoints/, of a training run or of this script, or a
GGUF file.
With --like a folder has the files of that one, byte for byte where no number changed (`mt.save_huggingface`); an NVFP4 folder
has its files that are no weights. Nothing is written over. What is read and written goes through a piece at a time; parameters
are held once: in NVFP4 where that is read or written from a folder, else in float32 (a folder into a folder: in the type of
--dtype).
"""

import dataclasses
import functools
import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from minite_jax import checkpoint
from minite_jax.checkpoint import huggingface, nvfp4_files
from minite_jax.checkpoint.config import to_plain
from minite_jax.checkpoint.gguf import is_gguf, open_gguf
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.folder import check_new, check_room
from minite_jax.checkpoint.huggingface.writer import TYPES
from minite_jax.diagnostics import calibrate
from minite_jax.errors import UserError
from minite_jax.model.params import abstract_params
from minite_jax.model.policy import pack
from minite_jax.optional import require

_SOURCE = flags.DEFINE_string("source", None, "What to read: a Hugging Face or NVFP4 folder, a run, or a GGUF file.")
_TARGET = flags.DEFINE_string("target", None, "Folder to write. It must not hold anything.")
_TO = flags.DEFINE_enum(
    "to", None, ("hf", "nvfp4", "orbax"), "What to write; by default orbax of a Hugging Face folder, else such a folder."
)
_LIKE = flags.DEFINE_string("like", None, "Hugging Face folder whose layout and other files the target has.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float16", "float32"), "Type in a folder without --like.")
_FUSED = flags.DEFINE_bool("fused_experts", False, "In a folder without --like: all experts of a layer in one tensor.")
_LAYOUT = flags.DEFINE_enum("layout", "modelopt", tuple(nvfp4_files.LAYOUTS), "Names of an NVFP4 target's tensors.")
_RECIPE = cli.recipe_flag()
_PLAIN = {
    name: flags.DEFINE_integer(name, None, f"The recipe's {where} layers that stay plain; by default as it says.", lower_bound=0)
    for name, where in (("first_plain", "leading"), ("last_plain", "trailing"))
}
_CALIBRATION = flags.DEFINE_string(
    "calibration", None, "JSON file, a list of lists of token ids, to find an NVFP4 target's scales of activations with."
)
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of an orbax source; by default the newest.", lower_bound=0)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the table of tensors and stop.")

_KIND = "minite_jax model"  # of checkpoints that hold a model and nothing of a run


@dataclasses.dataclass
class Source:
    """A checkpoint that was looked into.

    Attributes:
      kind: "hf", "nvfp4", "orbax" or "gguf".
      config: shape of the model.
      rows: of the table: tensor, type, shape, leaf.
      nbytes: of its tensors.
      read: reads the parameters in a type.
      pack: reads a policy, by a recipe; of an NVFP4 folder, as it is.
      recipe: that it was made by or trained with, if it says so.
      extra: keys of a folder's config.json beside those of `config`.
      texts: gives files that a folder has beside the model, by name: its tokenizer.
    """

    kind: str
    config: mt.ModelConfig
    rows: list[tuple[str, str, tuple[int, ...], str]]
    nbytes: int
    read: Callable[[Any], dict]
    pack: Callable[[Any], mt.Policy]
    recipe: Any = None
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
    if nvfp4_files.is_nvfp4(path):
        return _open_nvfp4(path)
    folder = huggingface.open_folder(path)
    rows = [(each.tensor, folder.tensors[each.tensor].dtype, each.shape, each.leaf) for each in folder.placements]

    def read(dtype):
        with _bar("reading", folder.nbytes) as bar:
            return mt.load_huggingface(path, dtype=dtype, progress=bar.update)[1]

    def pack(recipe):
        with _bar("reading", folder.nbytes) as bar:
            return mt.prepare_huggingface(path, recipe, progress=bar.update)

    return Source("hf", folder.config, rows, folder.nbytes, read, pack)


def _open_gguf(path: Path) -> Source:
    from minite_jax.text.gguf import tokenizer_files

    opened = open_gguf(path)
    rows = [(each.tensor, opened.tensors[each.tensor].dtype, each.shape, each.leaf) for each in opened.placements]
    extra = {} if opened.context_length is None else {"max_position_embeddings": opened.context_length}

    def read(dtype):
        with _bar("reading", opened.nbytes) as bar:
            return mt.load_gguf(path, dtype=dtype, progress=bar.update)[1]

    pack = lambda recipe: nvfp4_files.pack_params(read(jnp.float32), opened.config, recipe)  # noqa: E731
    texts = functools.partial(tokenizer_files, path)
    return Source("gguf", opened.config, rows, opened.nbytes, read, pack, extra=extra, texts=texts)


def _open_nvfp4(path: Path) -> Source:
    folder = nvfp4_files.open_nvfp4(path)
    places = [each.placement for each in folder.blocks]
    rows = [(each.tensor, folder.tensors[each.tensor].dtype, each.shape, each.leaf) for each in places]

    def load(recipe=None):
        with _bar("reading", folder.nbytes) as bar:
            return mt.load_nvfp4(path, progress=bar.update)

    return Source(
        "nvfp4", folder.config, rows, folder.nbytes, lambda dtype: nvfp4_files.unpack_params(load()), load, folder.recorded
    )


def _open_orbax(path: Path, step: int | None) -> Source:
    stored = checkpoint.read_config(path, step)
    recipe = None
    if stored.get("kind") == _KIND:
        config = mt.ModelConfig(**stored["model"])
        template = {
            "params": jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(config))
        }
        read = lambda dtype: checkpoint.restore(path, template, stored, step)["params"]  # noqa: E731
    else:
        config, recipe, read = _open_run(path, stored, step)
    rows = [(each.tensor, "F32", each.shape, each.leaf) for each in huggingface.placements(config)]
    pack = lambda recipe: nvfp4_files.pack_params(read(jnp.float32), config, recipe)  # noqa: E731
    return Source("orbax", config, rows, 4 * mt.num_params(config), read, pack, recipe)


def _open_run(path: Path, stored: dict, step: int | None):
    from experiments.training import stored_run

    if step not in (None, checkpoint.latest_step(path)):
        raise UserError(f"--step={step}: of a training run the newest checkpoint is read, {checkpoint.latest_step(path)}")
    if "model" not in stored:
        raise UserError(f"--source={path} holds checkpoints of something else than a model")
    own = {name: value for name, value in stored["recipe"].items() if value != -1}  # -1: as the recipe says
    return mt.ModelConfig(**stored["model"]), mt.recipe(**own), lambda dtype: stored_run(path).state.train.params


def choose_recipe(source: Source):
    """The recipe of an NVFP4 target.

    Raises:
      UserError: no such recipe, it quantises nothing, or the source is in NVFP4 already.
    """
    changes = {name: flag.value for name, flag in _PLAIN.items() if flag.value is not None}
    if source.kind == "nvfp4":
        if _RECIPE.value or changes:
            raise UserError("--recipe: the source is in NVFP4 already, and nothing is quantised again; leave it out")
        return None
    if _RECIPE.value is None and source.recipe is not None:
        recipe = dataclasses.replace(source.recipe, **changes)
    else:
        try:
            recipe = mt.recipe(_RECIPE.value or "nvfp4", **changes)
        except ValueError as error:
            raise UserError(f"--recipe={_RECIPE.value}: {error}") from None
    if not recipe.matmuls:
        raise UserError(f"recipe {recipe.name} quantises nothing: give another one as --recipe, such as nvfp4")
    return recipe


def read_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Sequences of token ids for calibration.

    Raises:
      UserError: the file holds something else.
    """
    try:
        sequences = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--calibration={path} cannot be read as JSON ({error})") from None
    if not isinstance(sequences, list) or not sequences or not all(
        isinstance(each, list) and each and all(type(token) is int for token in each) for each in sequences
    ):
        raise UserError(f"--calibration={path} holds something else than lists of token ids, such as [[1, 2], [3, 4, 5]]")
    strays = [token for each in sequences for token in each if not 0 <= token < vocab_size]
    if strays:
        raise UserError(f"--calibration={path}: token {strays[0]} is none of the vocabulary's {vocab_size}")
    return sequences


def table(rows: list[tuple[str, str, tuple[int, ...], str]], num_params: int, nbytes: int) -> list[str]:
    """Lines of the table of tensors; those of a layer's experts that differ in their number alone are one line."""
    groups: dict[tuple, int] = {}
    for tensor, dtype, shape, leaf in rows:
        key = (re.sub(r"experts\.\d+", "experts.*", tensor), dtype, str(list(shape)), leaf)
        groups[key] = groups.get(key, 0) + 1
    widths = [max(len(key[column]) for key in groups) for column in range(4)]
    lines = [
        "  ".join([f"{count:5d} x", *(text.ljust(width) for text, width in zip(key, widths, strict=True))]).rstrip()
        for key, count in groups.items()
    ]
    total = f"{len(rows):,} tensors, {num_params:,} parameters, {nbytes:,} bytes"
    return ["count    tensor, type, shape, parameter", *lines, total]


def planned_contents(source: Source, recipe) -> list:
    """The tensors of an NVFP4 target that is made from plain numbers."""
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(source.config))
    policy = jax.eval_shape(lambda params: pack(params, source.config, recipe), shapes)
    return nvfp4_files.nvfp4_contents(policy, _LAYOUT.value, _CALIBRATION.value is not None)


def nvfp4_table(source: Source, recipe) -> list[str]:
    """The table of an NVFP4 target; of a source in NVFP4, its own with the target's names."""
    if source.kind == "nvfp4":
        return [f"the same numbers in the layout {_LAYOUT.value}"]
    contents = planned_contents(source, recipe)
    rows = [(each.name, each.dtype, each.source.shape, each.source.leaf) for each in contents]
    return table(rows, mt.num_params(source.config), sum(each.nbytes for each in contents))


def size_of_target(source: Source, to: str, recipe, like: Path | None) -> int:
    """About so many bytes will be written; of orbax, which compresses, 0.

    Raises:
      UserError: `like` is no folder of this model.
    """
    if to == "nvfp4":
        if like is not None:
            nvfp4_files.read_like(like, source.config)
        return source.nbytes if source.kind == "nvfp4" else sum(each.nbytes for each in planned_contents(source, recipe))
    if to == "hf" and like is not None:
        return huggingface.open_like(like, source.config).nbytes
    return 0 if to == "orbax" else files.nbytes(TYPES[_DTYPE.value], (mt.num_params(source.config),))


def convert(source: Source, target: Path, to: str, recipe) -> None:
    """Reads the source and writes the target."""
    # What can be known to go wrong is known before anything large is read.
    like = None if _LIKE.value is None else Path(_LIKE.value)
    total = size_of_target(source, to, recipe, like)
    if to != "orbax" or not checkpoint.has_only_leftovers(target):
        check_room(check_new(target), total)
    sequences = None if _CALIBRATION.value is None else read_ids(Path(_CALIBRATION.value), source.config.vocab_size)
    texts = source.texts() if to != "orbax" and like is None else {}
    start = time.perf_counter()
    if to == "nvfp4":
        held = source.pack(recipe)
    elif source.kind == "nvfp4" and to == "hf":
        held = source.pack(None).weights
    else:
        through = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}.get(_DTYPE.value, jnp.float32)
        # A folder's layout may hold any type; without one, what is written need not be held wider than it is.
        held = source.read(through if source.kind != "orbax" and to == "hf" and like is None else jnp.float32)
    held = jax.block_until_ready(held)
    size = sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(held))
    _print_speed("read ", source.nbytes, time.perf_counter() - start)
    _print_memory(size)
    scales = None
    if sequences is not None:
        start = time.perf_counter()
        scales = calibrate(held, sequences)
        print(f"calibrated with {sum(map(len, sequences)):,} tokens in {time.perf_counter() - start:.1f} s")
    elif to == source.kind == "nvfp4":
        scales = nvfp4_files.read_input_scales(_SOURCE.value) or None
    start = time.perf_counter()
    if to == "orbax":
        config = {"kind": _KIND, "model": to_plain(source.config)}
        checkpoint.save(target, 0, {"params": held}, config)
    elif to == "nvfp4":
        if like is None and source.kind in ("hf", "nvfp4"):
            like = Path(_SOURCE.value)  # its tokenizer and the like
        contents = nvfp4_files.nvfp4_contents(held, _LAYOUT.value, scales is not None)
        with _bar("writing", sum(each.nbytes for each in contents)) as bar:
            mt.save_nvfp4(
                target, held, layout=_LAYOUT.value, input_scales=scales, like=like, extra=source.extra, beside=texts,
                progress=bar.update,
            )  # fmt: skip
    else:
        with _bar("writing", total) as bar:
            mt.save_huggingface(
                target, held, source.config, like=like, dtype=_DTYPE.value, fused_experts=_FUSED.value, extra=source.extra,
                beside=texts, progress=bar.update,
            )  # fmt: skip
    written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    _print_speed("wrote", written, time.perf_counter() - start, f", to {target}")
    _print_memory(size)


def _print_speed(what: str, nbytes: int, seconds: float, where: str = "") -> None:
    print(f"{what}    {nbytes:,} bytes in {seconds:.1f} s, {nbytes / seconds / 1e9:.2f} GB/s{where}")


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
    for flag in (_RECIPE, *_PLAIN.values(), _CALIBRATION):
        if flag.value is not None and to != "nvfp4":
            raise UserError(f"--{flag.name} is for NVFP4, and {to} is written: leave it out, or say --to=nvfp4")
    recipe = choose_recipe(source) if to == "nvfp4" else None
    if _DRY_RUN.value:
        print("\n".join(table(source.rows, mt.num_params(source.config), source.nbytes)))
        if to == "nvfp4":
            print("\n".join(["", f"as {to}, layout {_LAYOUT.value}:", *nvfp4_table(source, recipe)]))
        print(f"would be written as {to}" + (f" to {_TARGET.value}" if _TARGET.value else ""))
        return
    if not _TARGET.value:
        raise UserError("--target is missing: give the folder to write, or --dry_run to look only")
    convert(source, Path(_TARGET.value), to, recipe)


if __name__ == "__main__":
    cli.run(main, required=("source",))
