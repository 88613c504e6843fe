"""The parameter tree, filled from the pieces of a file's tensors."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.filling import Filling
from minite_jax.checkpoint.huggingface.names import Placement
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec, abstract_params, path_name


def fill_params(
    config: ModelConfig,
    placements: Sequence[Placement],
    pieces: Callable[[Placement], Iterator[tuple[int, int, np.ndarray]]],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | Callable[[ParamSpec], jax.sharding.Sharding] | None,
    progress: Callable[[int], None] | None,
) -> dict:
    """The tree of `abstract_params`, each leaf filled block by block where it will live.

    Args:
      config: shape of the model.
      placements: where each tensor lies in the tree.
      pieces: gives a tensor in runs of its first axis: number of the first row, bytes in the file, and the numbers in `dtype`.
      dtype: float32 or bfloat16.
      sharding: of every parameter, or a function that says it for each `ParamSpec`. None: the default device.
      progress: called with the number of bytes of each piece.

    Raises:
      ValueError: another dtype.
    """
    if dtype not in (np.dtype(np.float32), files.DTYPES["BF16"]):
        raise ValueError(f"dtype={dtype} must be float32 or bfloat16")
    by_leaf: dict[str, list[Placement]] = {}
    for each in placements:
        by_leaf.setdefault(each.leaf, []).append(each)
    default = jnp.zeros(()).sharding

    def fill(path, spec: ParamSpec) -> jax.Array:
        where = sharding(spec) if callable(sharding) else sharding or default
        leaf = Filling(spec.shape, dtype, where)
        for each in by_leaf[path_name(path)]:
            # A tensor's first axis is the leaf's last but (number of the tensor's axes - 1).
            axis = len(each.start) - len(each.shape)
            for first, nbytes, values in pieces(each):
                start = tuple(at + first * (i == axis) for i, at in enumerate(each.start))
                leaf.put(values.reshape((1,) * axis + values.shape), start)
                if progress is not None:
                    progress(nbytes)
        return leaf.finish()

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def finite_in(dtype: np.dtype, piece: np.ndarray, tensor: files.Tensor) -> np.ndarray:
    """Numbers of a tensor in another type.

    Raises:
      CheckpointError: some are NaN, infinite, or beyond the type.
    """
    with np.errstate(over="ignore"):  # reported below
        values = piece.astype(dtype, copy=False)
    if not files.is_finite(values):
        what = f"infinity in {dtype}" if files.is_finite(piece) else "NaN or infinity"
        raise CheckpointError(f"{tensor} holds {what}: fetch the file again, or take another model")
    return values
