"""Reads a GGUF file into our parameter tree, a piece of a tensor at a time, straight to where the numbers will live."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.gguf import file as file_lib
from minite_jax.checkpoint.gguf import names
from minite_jax.checkpoint.gguf.config import architecture, read_config
from minite_jax.checkpoint.huggingface.files import Tensor
from minite_jax.checkpoint.huggingface.filling import fill_params, finite_in
from minite_jax.checkpoint.huggingface.names import Placement
from minite_jax.checkpoint.huggingface.reader import check_counts, misfit
from minite_jax.checkpoint.leaves import shorten
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file whose tensors are all there, in the shapes that its metadata ask for and in types that can be read.

    Attributes:
      path: of the file.
      config: what its metadata say.
      metadata: all of them: the tokenizer too.
      tensors: by name.
      placements: where the tensors lie in our tree.
      turned: whether query and key rows stand in llama.cpp's order.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    placements: tuple[Placement, ...]
    turned: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(self.tensors[each.tensor].nbytes for each in self.placements)

    @property
    def context_length(self) -> int | None:
        """How many positions the model has, if the file says so."""
        length = self.metadata.get(f"{self.metadata['general.architecture']}.context_length")
        return length if isinstance(length, int) and length > 0 else None


def open_gguf(path: str | Path) -> GgufFile:
    """Reads a file's header and checks that a model is in it; reads no weights.

    Raises:
      CheckpointError: see `file.read_header` and `config.read_config`; or a tensor is missing, of another shape, of a type that
        cannot be dequantised, or one that nobody reads. Names file and tensor.
      ImportError: the package `gguf` is not installed.
    """
    path = Path(path)
    metadata, tensors = file_lib.read_header(path)
    config = read_config(metadata, tensors, str(path))
    check_counts(path, config, tensors, each_expert=False)
    wanted = names.placements(config)
    types = file_lib.readable_types()
    problems = []
    for each in wanted:
        problems += misfit(each, tensors.get(each.tensor), types, asker="the metadata ask")
    strays = set(tensors) - {each.tensor for each in wanted}
    problems += [f"has {tensors[name]}, which this model does not have" for name in sorted(strays)]
    if problems:
        raise CheckpointError(f"{path} does not fit its metadata: it {shorten(problems)}; fetch the file again, or another model")
    return GgufFile(path, config, metadata, tensors, tuple(wanted), architecture(metadata, str(path)) == "llama")


def load_gguf(
    path: str | Path,
    *,
    dtype=jnp.float32,
    sharding: jax.sharding.Sharding | Callable[[ParamSpec], jax.sharding.Sharding] | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a Llama-type, Qwen3 or Qwen3-MoE model from a GGUF file; its weights are dequantised.

    The numbers are those that llama.cpp's own Python package makes of the blocks, in float32. One piece of a tensor is on the
    host at a time, as with `load_huggingface`.

    Args:
      path: of the file.
      dtype: float32, or bfloat16: rounded to nearest even.
      sharding: of every parameter, or a function that says it for each `ParamSpec`. None: the default device.
      progress: called with the number of bytes of each piece that was read.

    Returns:
      The config, and the tree of `minite_jax.model.abstract_params` in `dtype`.

    Raises:
      CheckpointError: see `open_gguf`; or a tensor holds NaN or infinity, or is beyond bfloat16. Names file and tensor.
      ImportError: the package `gguf` is not installed.
      ValueError: another dtype.
    """
    opened, dtype = open_gguf(path), np.dtype(dtype)

    def pieces(each: Placement) -> Iterator[tuple[int, int, np.ndarray]]:
        turned = opened.turned and names.is_turned(each.tensor)
        head_dim = opened.config.head_dim
        tensor = opened.tensors[each.tensor]
        for first, nbytes, values in file_lib.read_pieces(tensor, head_dim if turned else 1):
            values = names.rows_in_order(values, head_dim) if turned else values
            yield first, nbytes, finite_in(dtype, values, tensor)

    return opened.config, fill_params(opened.config, opened.placements, pieces, dtype, sharding, progress)
