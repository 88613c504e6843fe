"""Which tensor of an NVFP4 folder is which part of a policy's weights."""

from collections.abc import Collection
from typing import NamedTuple

from minite_jax.checkpoint.huggingface.names import Placement, placements
from minite_jax.checkpoint.nvfp4_files.layouts import Layout
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import ParamSpec, abstract_specs
from minite_jax.precision.recipe import KINDS, Recipe


class Block(NamedTuple):
    """A tensor of the folder.

    Attributes:
      placement: where it lies in its leaf. The leaf of a part is called as the path of an `Nvfp4Array`'s field,
        ``layers.3.gate_up.codes``; outer scales lie in a vector with an entry for each expert, or one.
      part: "codes", "block_scale", "outer_scale", "input_scale", or "plain".
    """

    placement: Placement
    part: str

    @property
    def dtype(self) -> str | None:
        """In the file, None for plain ones: any float."""
        return {"codes": "U8", "block_scale": "F8_E4M3", "plain": None}.get(self.part, "F32")


def matrices(config: ModelConfig) -> dict[str, ParamSpec]:
    """The parameters that a recipe may quantise, by path."""
    return {name: spec for name, spec in abstract_specs(config).items() if spec.kind in KINDS}


def quantized_matrices(config: ModelConfig, recipe: Recipe) -> set[str]:
    """Those that this recipe does."""
    layers = config.num_hidden_layers
    return {name for name, spec in matrices(config).items() if recipe.format_of(spec.kind, spec.layer, layers).quantized}


def blocks(config: ModelConfig, layout: Layout, quantized: Collection[str], input_scales: bool) -> list[Block]:
    """Every tensor of a model, in the order of transformers' modules.

    Args:
      config: shape of the model.
      layout: the layout.
      quantized: paths of the parameters that are NVFP4.
      input_scales: whether the outer scales of activations are there.
    """
    found = []
    for each in placements(config):
        if each.leaf not in quantized:
            found.append(Block(each, "plain"))
            continue
        module = each.tensor.removesuffix(".weight")
        rows, columns = each.shape
        place = each.start[:-2] or (0,)
        shapes = {
            "codes": ((rows, columns // 2), each.start),
            "block_scale": ((rows, columns // 16), each.start),
            "outer_scale": (layout.scalar, place),
            "input_scale": (layout.scalar, place),
        }
        for part, (shape, start) in shapes.items():
            if part != "input_scale" or input_scales:
                found.append(Block(Placement(f"{module}.{layout.suffixes[part]}", shape, f"{each.leaf}.{part}", start), part))
    return found
