"""Models that did not come from a run: a folder in Hugging Face's layout, or a GGUF file."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import minite_jax as mt
from minite_jax.checkpoint.gguf import is_gguf, open_gguf
from minite_jax.errors import UserError
from minite_jax.text import Tokenizer
from minite_jax.text.tokenizer import read_json


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A model on disk.

    Attributes:
      load: reads config and float32 parameters; slow.
      tokenizer: the model's.
      sampling: what it says of how to sample: temperature, top_p, top_k.
      positions: how many tokens the model can attend to; infinite where it does not say.
    """

    load: Callable[[], tuple[mt.ModelConfig, dict]]
    tokenizer: Tokenizer
    sampling: dict[str, float]
    positions: float


def open_model(path: Path) -> ModelFile:
    """Looks into a folder or file; reads the tokenizer and no weights.

    Raises:
      UserError: it does not fit together.
    """
    return _open_gguf(path) if is_gguf(path) else _open_huggingface(path)


def _loader(path: Path, read: Callable, tokenizer: Tokenizer) -> Callable[[], tuple[mt.ModelConfig, dict]]:
    def load():
        config, params = read(path)
        if tokenizer.vocab_size > config.vocab_size:
            counts = f"{tokenizer.vocab_size} tokens and its model {config.vocab_size}"
            raise UserError(f"the tokenizer in {path} has {counts}: copy the files of one model there")
        return config, params

    return load


def _open_gguf(path: Path) -> ModelFile:
    opened, tokenizer = open_gguf(path), Tokenizer.from_gguf(path)
    return ModelFile(_loader(path, mt.load_gguf, tokenizer), tokenizer, {}, opened.context_length or math.inf)


def _open_huggingface(folder: Path) -> ModelFile:
    tokenizer = Tokenizer.from_folder(folder)
    said = read_json(folder / "generation_config.json")
    own = {name: said[name] for name in ("temperature", "top_p", "top_k") if said.get(name) is not None}
    if said.get("do_sample") is False:
        own = {"temperature": 0.0}
    load = _loader(folder, mt.load_huggingface, tokenizer)
    return ModelFile(load, tokenizer, own, max_positions(read_json(folder / "config.json")))


def max_positions(config: dict) -> float:
    """How many tokens the model of a config.json can attend to; YaRN and its kin stretch what it was trained with."""
    positions = config.get("max_position_embeddings") or math.inf
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return max(positions, int((rope.get("factor") or 0) * (rope.get("original_max_position_embeddings") or 0)))
