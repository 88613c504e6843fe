"""Large models into NVFP4 and out of it, a matrix (of one expert) at a time.

`minite_jax.prepare` quantises a whole tree in one program, on the accelerator that holds it. Here memory stays near one matrix
above the result, on the host too. The bits are the same: quantisation depends on the matrix alone.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface.filling import Filling, Target, target
from minite_jax.checkpoint.huggingface.reader import Folder, check_tied_head, checked_pieces, open_folder, read_leaf
from minite_jax.checkpoint.nvfp4_files.blocks import quantized_matrices
from minite_jax.checkpoint.nvfp4_files.filling import PackedFilling
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec, abstract_params, check_params, path_name
from minite_jax.model.policy import Policy, check_recipe, plain_dtype, with_fp8_exact
from minite_jax.precision.recipe import Recipe
from pallas_kernels import nvfp4
from pallas_kernels.numerics import round_to

Matrices = Iterator[tuple[tuple[int, ...], np.ndarray | jax.Array]]


@functools.partial(jax.jit, static_argnums=1)
def _quantize(matrix_NK, rule):
    return nvfp4.quantize(matrix_NK, rule)


@jax.jit
def _dequantize(q):
    return nvfp4.dequantize(q)


def prepare_huggingface(
    folder: str | Path, recipe: Recipe, *, sharding: Target = None, progress: Callable[[int], None] | None = None
) -> Policy:
    """Reads a Hugging Face folder straight into a policy: what ``prepare(load_huggingface(folder))`` gives, bit for bit, without
    float32 masters. For sampling and evaluation, and to write NVFP4 folders.

    Args:
      folder: see `load_huggingface`.
      recipe: precision recipe.
      sharding: as in `load_huggingface`; block scales and codes are cut along the same axes.
      progress: called with the number of bytes of each piece that was read.

    Raises:
      CheckpointError: see `load_huggingface`.
      ValueError: the recipe quantises nothing in this model.
    """
    opened = open_folder(folder)
    check_recipe(opened.config, recipe)
    check_tied_head(opened.config, opened.tensors)
    by_leaf = opened.by_leaf()

    def plain(name: str, spec: ParamSpec, dtype: np.dtype):
        return read_leaf(spec.shape, dtype, target(sharding, spec), by_leaf[name], opened.tensors, progress)

    return _pack(opened.config, recipe, sharding, plain, lambda name, spec: _read_matrices(opened, by_leaf[name], spec, progress))


def _read_matrices(opened: Folder, places, spec: ParamSpec, progress) -> Matrices:
    """The matrices of a leaf in float32."""
    matrix_NK, rows = None, 0
    for each in places:
        for first, nbytes, values in checked_pieces(opened.tensors[each.tensor], np.dtype(np.float32)):
            if progress is not None:
                progress(nbytes)
            if values.ndim == 3:  # all experts in one tensor: whole matrices
                yield from (((first + i,), values_NK) for i, values_NK in enumerate(values))
                continue
            if matrix_NK is None:  # a new one each time: the last may still be read
                matrix_NK, rows = np.empty(spec.shape[-2:], np.float32), 0
            start = each.corner(first)
            matrix_NK[start[-2] : start[-2] + len(values)] = values
            rows += len(values)
            if rows == spec.shape[-2]:
                yield start[:-2], matrix_NK
                matrix_NK = None


def pack_params(params: dict, config: ModelConfig, recipe: Recipe) -> Policy:
    """`minite_jax.prepare` for a tree in host memory that is large beside it.

    Args:
      params: float32 tree, see `minite_jax.prepare`.
      config: shape of the model.
      recipe: precision recipe.

    Raises:
      CheckpointError: a matrix holds NaN or infinity.
      ValueError: a parameter is missing or of the wrong shape or type, or the recipe quantises nothing in this model.
    """
    check_params(params, config)
    check_recipe(config, recipe)
    given = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}

    def matrices(name: str, spec: ParamSpec) -> Matrices:
        yield from ((index, given[name][index]) for index in np.ndindex(*spec.shape[:-2]))

    return _pack(config, recipe, None, lambda name, spec, dtype: round_to(given[name], dtype), matrices)


def _pack(config: ModelConfig, recipe: Recipe, sharding: Target, plain: Callable, matrices: Callable) -> Policy:
    quantized = quantized_matrices(config, recipe)

    def leaf(path, spec: ParamSpec):
        name = path_name(path)
        if name not in quantized:
            return plain(name, spec, plain_dtype(spec, recipe.compute_dtype))
        rule = recipe.quantized.weight
        filling, waiting = PackedFilling(spec.shape, target(sharding, spec)), None
        for index, matrix_NK in matrices(name, spec):
            # One matrix is quantised while the next is read.
            begun = index, _quantize(matrix_NK, rule)
            if waiting is not None:
                _put(filling, name, *waiting)
            waiting = begun
        _put(filling, name, *waiting)
        return filling.finish()

    weights = jax.tree_util.tree_map_with_path(leaf, abstract_params(config))
    fp8_exact = bool(quantized) and recipe.quantized.weight.family == "fp8_exact"
    return Policy(weights=with_fp8_exact(weights, fp8_exact), config=config, recipe=recipe)


def _put(filling: PackedFilling, name: str, index: tuple[int, ...], q: nvfp4.Nvfp4Array) -> None:
    outer = np.asarray(q.outer_scale)
    if not np.isfinite(outer):
        raise CheckpointError(f"parameter {name} holds NaN or infinity{f' in matrix {index[0]}' if index else ''}")
    filling.put(np.asarray(q.codes), np.asarray(q.block_scale), (*index, 0, 0))
    filling.put_outer(outer, index)


def unpack_params(policy: Policy) -> dict:
    """Float32 masters whose values are the policy's own: what to train an NVFP4 model from.

    `prepare` makes the same numbers of them again where the rule of the recipe is `fp8_exact`; codes and scales may be another
    spelling of them (6 x 1 is 4 x 1.5).
    """

    def leaf(stored):
        if not isinstance(stored, nvfp4.Nvfp4Array):
            return stored.astype(jnp.float32)
        filling = Filling(stored.shape, np.dtype(np.float32), stored.codes.sharding)
        for index in np.ndindex(*stored.shape[:-2]):
            matrix_NK = np.asarray(_dequantize(jax.tree.map(lambda x, index=index: x[index], stored)))
            filling.put(matrix_NK.reshape((1,) * len(index) + matrix_NK.shape), (*index, 0, 0))
        return filling.finish()

    return jax.tree.map(leaf, policy.weights, is_leaf=lambda x: isinstance(x, nvfp4.Nvfp4Array))
