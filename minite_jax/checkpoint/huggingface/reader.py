"""Reads a Hugging Face folder into our parameter tree, a piece of a tensor at a time, straight to where the numbers will live."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.config import read_config, read_json
from minite_jax.checkpoint.huggingface.filling import (
    Target,
    check_dtype,
    fill_leaf,
    fill_params,
    finite_in,
    group_by_leaf,
)
from minite_jax.checkpoint.huggingface.names import Placement, is_harmless, placements
from minite_jax.checkpoint.leaves import shorten
from minite_jax.model.config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder whose tensors are all there, in the shapes and types that its config.json asks for.

    Attributes:
      path: of the folder.
      config: what its config.json says.
      tensors: every tensor that counts, by name: with an index, the copy that it names.
      headers: of each file with weights, everything before its first tensor, byte for byte.
      stale: tensors that lie in a file to which the index does not assign them. Nobody reads them.
      placements: where the tensors of the model lie in our tree, in the order of transformers' modules.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, files.Tensor]
    headers: Mapping[Path, bytes]
    stale: tuple[files.Tensor, ...]
    placements: tuple[Placement, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(self.tensors[each.tensor].nbytes for each in self.placements)

    def by_leaf(self) -> dict[str, list[Placement]]:
        """The tensors of each parameter."""
        return group_by_leaf(self.placements)


def open_folder(folder: str | Path) -> Folder:
    """Reads a folder's config.json, index and headers, and checks them against each other; reads no weights.

    Raises:
      CheckpointError: a file is missing, cut off or wrong; the config is of a model that this forward does not run; a tensor is
        missing, has another shape or a type that is no plain float, or is one that nobody reads. Names files and tensors.
    """
    path = Path(folder)
    config = read_config(path)
    tensors, headers, stale = find_tensors(path)
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
    check_counts(path, config, tensors, each_expert=not fused)
    wanted = placements(config, fused_experts=fused)
    problems = []
    for each in wanted:
        problems += misfit(each, tensors.get(each.tensor), files.DTYPES)
    names = {each.tensor for each in wanted}
    for name, tensor in tensors.items():
        if name not in names and not is_harmless(name) and not is_tied_head(name, tensor.shape, config):
            problems.append(f"has {tensor}, which this model does not have")
    if problems:
        raise CheckpointError(f"{path} does not fit its config.json: it {shorten(problems)}; fetch the folder again")
    return Folder(path, config, tensors, headers, tuple(stale), tuple(wanted))


def check_counts(path: Path, config: ModelConfig, tensors: Collection[str], *, each_expert: bool) -> None:
    """Raises CheckpointError where a configuration has more layers or experts than there are tensors.

    Before anything is laid out: a mistyped number of layers would otherwise fill the memory with their names.

    Args:
      path: of the folder or file, for the message.
      config: shape of the model.
      tensors: what is there.
      each_expert: whether each expert has tensors of its own.
    """
    moe_layers = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)) if each_expert else 0
    least = max(config.num_hidden_layers, moe_layers * config.num_experts)
    if least > len(tensors):
        what = f"{config.num_hidden_layers} layers" + (f" of {config.num_experts} experts" if moe_layers else "")
        raise CheckpointError(f"{path} says that it has {what}, and holds {len(tensors)} tensors; fetch it again")


def misfit(
    wanted: Placement,
    found: files.Tensor | None,
    types: Collection[str],
    shapes: Collection[tuple[int, ...]] = (),
    asker: str = "config.json asks",
) -> list[str]:
    """What is wrong with a tensor of a folder or file, at most one thing.

    Args:
      wanted: which it is.
      found: what is there.
      types: those that it may have.
      shapes: those that it may have, if not its placement's.
      asker: who wants the shape, for the message.
    """
    if found is None:
        return [f"lacks tensor {wanted.tensor} {list(wanted.shape)}"]
    if found.shape not in (shapes or (wanted.shape,)):
        return [f"has {found} where {asker} for {list(wanted.shape)}"]
    return [] if found.dtype in types else [f"has {found}, which is none of {', '.join(types)}"]


def find_tensors(path: Path) -> tuple[dict[str, files.Tensor], dict[Path, bytes], list[files.Tensor]]:
    """Every tensor of a folder by name (with an index, the copy that it names), the headers of its files, and the copies of
    tensors that lie elsewhere.

    Raises:
      CheckpointError: a file is missing, cut off or wrong, or the index does not fit the files.
    """
    single, index = path / SINGLE, path / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(f"{path} has {SINGLE} and {INDEX}: which of the two holds the weights? Remove the other")
    if single.exists():
        tensors, header = files.read_header(single)
        return tensors, {single: header}, []
    if not index.exists():
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}: give a folder with safetensors weights")
    assigned = read_json(index).get("weight_map")
    if not isinstance(assigned, dict) or not all(isinstance(each, str) for each in assigned.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files: fetch it again")
    headers: dict[Path, bytes] = {}
    there: dict[str, dict[str, files.Tensor]] = {}
    for name in sorted(set(assigned.values())):
        if not name or PurePath(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is no file of this folder: fetch it again")
        if not (path / name).exists():
            lost = next(tensor for tensor, file in assigned.items() if file == name)
            raise CheckpointError(f"{path / name} is missing; {INDEX} says that it holds {lost}: fetch the file")
        there[name], headers[path / name] = files.read_header(path / name)
    tensors = {}
    for name, file in assigned.items():
        if name not in there[file]:
            raise CheckpointError(f"{path / file} lacks tensor {name}, which {INDEX} says is there: fetch both again")
        tensors[name] = there[file][name]
    others = [tensor for held in there.values() for tensor in held.values() if tensors.get(tensor.name) != tensor]
    unlisted = [str(each) for each in others if each.name not in assigned and not is_harmless(each.name)]
    if unlisted:
        raise CheckpointError(f"{index} does not list {shorten(unlisted)}: fetch both again")
    stale = [each for each in others if each.name in assigned]
    if stale:
        logging.warning("%s: the index assigns these to other files, so they are not read: %s", path, shorten([*map(str, stale)]))
    return tensors, headers, stale


def load_huggingface(
    folder: str | Path,
    *,
    dtype=jnp.float32,
    sharding: Target = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a Qwen3, Qwen3-MoE or Llama-type model from a folder with config.json and safetensors files.

    One piece of a tensor (one expert, at most some 16 MB of rows) is on the host at a time and goes to its devices before the
    next is read. On a CPU, where the parameters are themselves on the host, they are filled in place.

    Args:
      folder: as `save_pretrained` writes it: ``model.safetensors``, or shards with ``model.safetensors.index.json``.
      dtype: float32, which BF16, F16 and F32 fit exactly: master weights. Or bfloat16: F16 and F32 are rounded to nearest even.
      sharding: of every parameter, or a function that says it for each `ParamSpec`. None: the default device.
      progress: called with the number of bytes of each piece that was read.

    Returns:
      The config, and the tree of `minite_jax.model.abstract_params` in `dtype`.

    Raises:
      CheckpointError: see `open_folder`; or a tensor holds NaN or infinity, is beyond bfloat16, or is a tied output embedding
        unlike the input embedding. Names file and tensor.
      ValueError: another dtype.
    """
    dtype = np.dtype(dtype)
    check_dtype(dtype)
    opened = open_folder(folder)
    check_tied_head(opened.config, opened.tensors)

    def pieces(each: Placement):
        return checked_pieces(opened.tensors[each.tensor], dtype)

    return opened.config, fill_params(opened.config, opened.placements, pieces, dtype, sharding, progress)


def read_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    placements: list[Placement],
    tensors: Mapping[str, files.Tensor],
    progress: Callable[[int], None] | None,
) -> jax.Array:
    """An array whose blocks are these tensors; see `checked_pieces`."""
    return fill_leaf(shape, dtype, sharding, placements, lambda each: checked_pieces(tensors[each.tensor], dtype), progress)


def checked_pieces(tensor: files.Tensor, dtype: np.dtype) -> Iterator[tuple[int, int, np.ndarray]]:
    """A tensor in runs of its first axis: number of the first row, bytes in the file, and the numbers in `dtype`.

    Raises:
      CheckpointError: the file ends early; or numbers are NaN, infinite, or beyond `dtype`.
    """
    for first, piece in files.read_pieces(tensor):
        yield first, piece.nbytes, finite_in(dtype, piece, tensor)


def is_tied_head(name: str, shape: tuple[int, ...], config: ModelConfig) -> bool:
    """Whether a tensor is the copy of the embedding that old files have beside it; compared when it is read."""
    return config.tie_word_embeddings and name == _TIED_HEAD and shape == (config.vocab_size, config.hidden_size)


def check_tied_head(config: ModelConfig, tensors: Mapping[str, files.Tensor]) -> None:
    """Raises CheckpointError where a tied model has an output embedding that is unlike its input embedding."""
    if _TIED_HEAD not in tensors or not config.tie_word_embeddings:
        return
    head, embedding = tensors[_TIED_HEAD], tensors[_EMBEDDING]
    same = head.dtype == embedding.dtype and all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for (_, a), (_, b) in zip(files.read_pieces(head), files.read_pieces(embedding), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{head} is unlike {_EMBEDDING}, though config.json says tie_word_embeddings: set that to false, or remove the tensor"
        )
