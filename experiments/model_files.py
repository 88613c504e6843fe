"""Models that did not come from a run: a folder in Hugging Face's layout, plain or NVFP4, or a GGUF file."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minite_jax as mt
from minite_jax.checkpoint import huggingface, nvfp4_files
from minite_jax.checkpoint.gguf import is_gguf, open_gguf
from minite_jax.errors import UserError
from minite_jax.precision import Recipe
from minite_jax.text import Tokenizer
from minite_jax.text.tokenizer import read_json


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A model on disk.

    Attributes:
      load: reads config and float32 parameters; slow. An NVFP4 folder has none.
      prepare: reads a policy by a recipe, or None: bf16, and in an NVFP4 folder its own; slow.
      tokenizer: the model's.
      sampling: what it says of how to sample: temperature, top_p, top_k.
      positions: how many tokens the model can attend to; infinite where it does not say.
    """

    load: Callable[[], tuple[mt.ModelConfig, dict]]
    prepare: Callable[[Recipe | None], mt.Policy]
    tokenizer: Tokenizer
    sampling: dict[str, float]
    positions: float


def open_model(path: Path) -> ModelFile:
    """Looks into a folder or file; reads the tokenizer and no weights.

    Raises:
      UserError: it does not fit together.
    """
    return _open_gguf(path) if is_gguf(path) else _open_huggingface(path)


def _check_vocabulary(path: Path, tokenizer: Tokenizer, config: mt.ModelConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        counts = f"{tokenizer.vocab_size} tokens and its model {config.vocab_size}"
        raise UserError(f"the tokenizer in {path} has {counts}: copy the files of one model there")


def _open_gguf(path: Path) -> ModelFile:
    opened, tokenizer = open_gguf(path), Tokenizer.from_gguf(path)
    _check_vocabulary(path, tokenizer, opened.config)

    def prepare(recipe: Recipe | None) -> mt.Policy:
        config, params = mt.load_gguf(path)
        return mt.prepare(params, config, recipe or mt.recipe("bf16"))

    return ModelFile(lambda: mt.load_gguf(path), prepare, tokenizer, {}, opened.context_length or math.inf)


def _open_huggingface(folder: Path) -> ModelFile:
    tokenizer, raw = Tokenizer.from_folder(folder), read_json(folder / "config.json")
    if nvfp4_files.is_nvfp4(folder):
        config = nvfp4_files.open_nvfp4(folder).config
        prepare = lambda recipe: mt.load_nvfp4(folder, recipe)  # noqa: E731
    else:
        config = huggingface.read_config(folder)
        # Without float32 masters: a large model would not fit beside them.
        prepare = lambda recipe: mt.prepare_huggingface(folder, recipe or mt.recipe("bf16"))  # noqa: E731
    _check_vocabulary(folder, tokenizer, config)
    positions = max_positions(raw, config, str(folder / "config.json"))
    return ModelFile(lambda: mt.load_huggingface(folder), prepare, tokenizer, sampling_of(folder), positions)


def sampling_of(folder: Path) -> dict[str, float]:
    """What a folder's generation_config.json says of how to sample, by the names of `SamplingParams`.

    Raises:
      UserError: the file holds no object, or something else than numbers.
    """
    file = folder / "generation_config.json"
    said = read_json(file)
    if said.get("do_sample") is False:
        return {"temperature": 0.0}
    own = {name: said[name] for name in ("temperature", "top_p", "top_k") if said.get(name) is not None}
    for name, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{file}: {name}={value!r} must be a number")
    return own


def max_positions(raw: dict[str, Any], config: mt.ModelConfig, where: str) -> float:
    """How many tokens a model can attend to; YaRN and its kin stretch what it was trained with.

    Args:
      raw: its config.json.
      config: what that means.
      where: its name, for messages.

    Raises:
      UserError: the number in config.json is none.
    """
    said, scaling = raw.get("max_position_embeddings"), config.rope_scaling
    if said is not None and (type(said) is not int or said < 1):
        raise UserError(f"{where}: max_position_embeddings={said!r} must be a whole number above 0")
    stretched = int(scaling.factor * scaling.original_max_position_embeddings) if scaling else 0
    return max(said or math.inf, stretched)
