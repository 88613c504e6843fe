"""Reads an NVFP4 folder into a policy: codes and scales as they are, straight to where they will live."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface import files
from minite_jax.checkpoint.huggingface.config import from_json, read_json
from minite_jax.checkpoint.huggingface.filling import Target, group_by_leaf, target
from minite_jax.checkpoint.huggingface.names import is_harmless
from minite_jax.checkpoint.huggingface.reader import check_counts, check_tied_head, find_tensors, is_tied_head, misfit, read_leaf
from minite_jax.checkpoint.leaves import shorten
from minite_jax.checkpoint.nvfp4_files import layouts
from minite_jax.checkpoint.nvfp4_files.blocks import Block, blocks, matrices, quantized_matrices
from minite_jax.checkpoint.nvfp4_files.filling import PackedFilling, check_scales, is_fp8_exact
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec, abstract_params, path_name
from minite_jax.model.policy import Policy, plain_dtype, with_fp8_exact
from minite_jax.precision.recipe import Recipe, recipe_from_plain
from minite_jax.precision.recipe import recipe as named_recipe

OURS = "minite_jax"  # key of config.json under which recipe and rules are recorded


@dataclasses.dataclass(frozen=True)
class Nvfp4Folder:
    """A folder whose tensors are all there, in the shapes and types that it says.

    Attributes:
      path: of the folder.
      config: shape of the model.
      layout: names of its tensors.
      quantized: paths of the parameters that are NVFP4.
      recorded: the recipe that wrote it, if it says so.
      tensors: by name.
      blocks: where the tensors lie in a policy's weights, in the order of transformers' modules.
    """

    path: Path
    config: ModelConfig
    layout: layouts.Layout
    quantized: frozenset[str]
    recorded: Recipe | None
    tensors: Mapping[str, files.Tensor]
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(self.tensors[each.placement.tensor].nbytes for each in self.blocks)


def open_nvfp4(folder: str | Path) -> Nvfp4Folder:
    """Reads an NVFP4 folder's configuration, index and headers, and checks them against each other; reads no weights.

    Raises:
      CheckpointError: a file is missing, cut off or wrong; weights are quantised in another way than NVFP4; a matrix is
        quantised in part; a tensor is missing, has another shape or type, or is one that nobody reads. Names files and tensors.
    """
    path = Path(folder)
    where = path / "config.json"
    raw = read_json(where)
    layout = layouts.read_layout(path, raw)
    config = from_json({key: value for key, value in raw.items() if key not in ("quantization_config", OURS)}, str(where))
    tensors, _, _ = find_tensors(path)
    check_counts(path, config, tensors, each_expert=True)
    quantized, problems = _find_quantized(config, layout, tensors)
    wanted = blocks(config, layout, quantized, input_scales=True)
    for each in wanted:
        found = tensors.get(each.placement.tensor)
        types = files.DTYPES if each.dtype is None else (each.dtype,)
        shapes = ((), (1,)) if each.part in ("outer_scale", "input_scale") else ()
        if found is not None or each.part != "input_scale":
            problems += misfit(each.placement, found, types, shapes)
    names = {each.placement.tensor for each in wanted}
    cache_scales = [name for name in tensors if layouts.is_cache_scale(name)]
    for name, tensor in tensors.items():
        known = name in names or is_harmless(name) or is_tied_head(name, tensor.shape, config) or name in cache_scales
        if not known:
            problems.append(f"has {tensor}, which this model does not have")
    if problems:
        raise CheckpointError(f"{path} does not fit its config.json: it {shorten(problems)}; fetch the folder again")
    if cache_scales:
        logging.warning("%s has scales of a quantised cache (%s), which are not used: the cache is plain", path, cache_scales[0])
    there = tuple(each for each in wanted if each.placement.tensor in tensors)
    return Nvfp4Folder(path, config, layout, frozenset(quantized), _recorded(raw, where), tensors, there)


def _find_quantized(config: ModelConfig, layout: layouts.Layout, tensors: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """The quantised parameters, and what is wrong with those that are so in part."""
    codes = [each.placement for each in blocks(config, layout, set(matrices(config)), input_scales=False) if each.part == "codes"]
    quantized, problems = set(), []
    for leaf, places in group_by_leaf(codes).items():
        has = [each for each in places if each.tensor in tensors and tensors[each.tensor].dtype == "U8"]
        lacks = [each for each in places if each not in has]
        if has:
            quantized.add(leaf.removesuffix(".codes"))
        if has and lacks:
            problems.append(f"has codes of {has[0].tensor} and not of {lacks[0].tensor}, which is multiplied with it")
    return quantized, problems


def _recorded(raw: Mapping[str, Any], where: Path) -> Recipe | None:
    ours = raw.get(OURS)
    if ours is None:
        return None
    try:
        return recipe_from_plain(ours["recipe"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {OURS} records {error}; remove the key to have a recipe chosen") from None


def _choose_recipe(opened: Nvfp4Folder, given: Recipe | None, fp8_exact: bool) -> Recipe:
    """The recipe that a policy of this folder has: the given, the recorded, or one for what is quantised."""
    chosen = given or opened.recorded or _derived(opened.config, opened.quantized, fp8_exact)
    differ = sorted(quantized_matrices(opened.config, chosen) ^ opened.quantized)
    if not opened.quantized:
        raise CheckpointError(f"{opened.path} has no NVFP4 tensor, though it says so: read it with load_huggingface")
    if differ:
        says = "NVFP4" if differ[0] in opened.quantized else "plain"
        source = "given" if given else "recorded" if opened.recorded else f"nearest ({chosen.name})"
        raise CheckpointError(
            f"{opened.path}: {differ[0]} is {says} (one of {len(differ)}), and the {source} recipe has it otherwise; a recipe "
            "quantises whole kinds of matrices between its first and last plain layers"
        )
    return chosen


def _derived(config: ModelConfig, quantized: Collection[str], fp8_exact: bool) -> Recipe:
    specs = [spec for name, spec in matrices(config).items() if name in quantized]
    layers = [spec.layer for spec in specs]
    return named_recipe(
        # Activations by the same rule, so that the units that can run the weights run the product.
        "nvfp4" if fp8_exact else "nvfp4_46",
        matmuls=tuple(sorted({spec.kind for spec in specs})),
        first_plain=min(layers, default=0),
        last_plain=config.num_hidden_layers - 1 - max(layers, default=config.num_hidden_layers - 1),
    )


def load_nvfp4(
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    sharding: Target = None,
    progress: Callable[[int], None] | None = None,
) -> Policy:
    """Reads an NVFP4 model: the policy that `forward` and `sample` take, with the stored codes and scales themselves. Nothing is
    quantised again.

    Block scales of all of E4M3 are kept. Only where every one of them is in the `fp8_exact` set may a GPU without FP4 units
    multiply on its fp8 units; other weights are multiplied as bfloat16 (`pallas_kernels.operands`).

    What an engine's static outer scale of activations says is not used: ours are made for each row. Its logits are therefore
    not those of an engine that uses them, though the weights are the same numbers.

    Args:
      folder: in ModelOpt's or compressed-tensors' layout.
      recipe: None: the recorded one; in a folder that is not ours, `nvfp4` where all block scales are in the `fp8_exact` set,
        else `nvfp4_46`, for the kinds of matrices and the layers that are quantised. Its rule of weights is not applied.
      sharding: as in `load_huggingface`; block scales and codes are cut along the same axes.
      progress: called with the number of bytes of each piece that was read.

    Raises:
      CheckpointError: see `open_nvfp4`; a recipe does not say what is quantised; query, key and value, or gate and up, have
        unlike outer scales; a scale is NaN, negative, or (outer) zero. Names file and tensor.
    """
    opened = open_nvfp4(folder)
    check_tied_head(opened.config, opened.tensors)
    if recipe or opened.recorded:
        _choose_recipe(opened, recipe, fp8_exact=False)  # before anything large is read
    dtype = (recipe or opened.recorded or named_recipe("nvfp4")).compute_dtype
    by_leaf = group_by_leaf(each.placement for each in opened.blocks)
    exact = []

    def read(path, spec: ParamSpec):
        name, where = path_name(path), target(sharding, spec)
        if name not in opened.quantized:
            return read_leaf(spec.shape, plain_dtype(spec, dtype), where, by_leaf[name], opened.tensors, progress)
        leaf, is_exact = _read_packed(opened, name, spec, where, by_leaf, progress)
        exact.append(is_exact)
        return leaf

    weights = jax.tree_util.tree_map_with_path(read, abstract_params(opened.config))
    chosen = _choose_recipe(opened, recipe, all(exact))
    # One answer for the whole model: layers of unlike kinds could not run as one loop.
    return Policy(weights=with_fp8_exact(weights, all(exact)), config=opened.config, recipe=chosen)


def _read_packed(opened, name, spec, where, by_leaf, progress):
    outer = _read_scalars(opened, by_leaf[f"{name}.outer_scale"], spec, progress)
    leaf = PackedFilling(spec.shape, where)
    leaf.put_outer(outer)
    exact = True
    pairs = zip(by_leaf[f"{name}.codes"], by_leaf[f"{name}.block_scale"], strict=True)
    for places in pairs:
        codes_tensor, scale_tensor = (opened.tensors[each.tensor] for each in places)
        # Codes and scales in step, so that a block's codes are at hand where its scale asks for them.
        for first, codes, scales in _in_step(codes_tensor, scale_tensor):
            check_scales(scale_tensor, scales)
            exact = exact and is_fp8_exact(codes, scales)
            leaf.put(codes, scales, places[0].corner(first))
            if progress is not None:
                progress(codes.nbytes + scales.nbytes)
    return leaf.finish(), exact


def _in_step(codes: files.Tensor, scales: files.Tensor):
    row_bytes = codes.nbytes // codes.shape[0]
    rows = max(1, files.PIECE // row_bytes)
    for pair in zip(files.read_pieces(codes, rows), files.read_pieces(scales, rows), strict=True):
        (first, codes_NK), (_, scales_NQ) = pair
        yield first, codes_NK, scales_NQ


def _read_scalars(opened, places, spec, progress=None) -> np.ndarray:
    """One outer scale for each expert, or one: what all tensors of a matrix agree upon."""
    found = np.full(spec.shape[:-2] or (1,), np.nan, np.float32)
    first: dict[tuple[int, ...], files.Tensor] = {}
    for each in places:
        tensor = opened.tensors[each.tensor]
        ((_, stored),) = files.read_pieces(tensor)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            value = opened.layout.from_file(stored)[0]
        # A subnormal number would be flushed to zero by some devices.
        if not (np.finfo(np.float32).tiny <= value < np.inf and 0 < stored[0] < np.inf):
            raise CheckpointError(f"{tensor} is {stored[0]}, which is no scale: it must be positive and finite; fetch it again")
        other = first.setdefault(each.start, tensor)
        if other is not tensor and found[each.start] != value:
            raise CheckpointError(
                f"{tensor} is unlike {other.name}: matrices that are multiplied as one share an outer scale; quantise them so"
            )
        found[each.start] = value
        if progress is not None:
            progress(tensor.nbytes)
    return found


def read_input_scales(folder: str | Path) -> dict[str, np.ndarray]:
    """The outer scales of activations that a folder holds, for `save_nvfp4`.

    Returns:
      By the path of the parameter, float32 [E] or [1] that multiply; empty if there are none.

    Raises:
      CheckpointError: as `load_nvfp4`, or some are there and others are not.
    """
    opened = open_nvfp4(folder)
    by_leaf = group_by_leaf(each.placement for each in opened.blocks)
    specs, scales = matrices(opened.config), {}
    for name in sorted(opened.quantized):
        places = by_leaf.get(f"{name}.input_scale", [])
        if len(places) not in (0, len(by_leaf[f"{name}.codes"])):
            raise CheckpointError(f"{opened.path} has {places[0].tensor} and not all the others of {name}: fetch it again")
        if places:
            scales[name] = _read_scalars(opened, places, specs[name])
    if scales and len(scales) < len(opened.quantized):
        lost = sorted(opened.quantized - set(scales))[0]
        raise CheckpointError(f"{opened.path} has outer scales of activations and none for {lost}: fetch it again")
    return scales
