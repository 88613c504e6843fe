"""A policy: the one stored set of weights that sampler, learner, evaluation and diagnostics share."""

import contextlib
from typing import Any, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.model import params as params_lib
from minite_jax.model.config import ModelConfig
from minite_jax.model.substitutes import Substitutes
from minite_jax.precision.recipe import MatmulFormat, Recipe
from pallas_kernels import nvfp4
from pallas_kernels.numerics import round_to


@flax.struct.dataclass
class Weight:
    """One weight as the forward sees it.

    Attributes:
      stored: what the forward reads: `Nvfp4Array`, bfloat16 or float32.
      master: float32 array that receives the gradient, or None. Its values are never read.
    """

    stored: Any
    master: Any = None


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class Policy:
    """Weights in the formats of a recipe, and what is needed to run them.

    Attributes:
      weights: tree of `abstract_params` with each leaf in its stored format. Made once per update by `pack`. None in the copy
        that a layer is handed beside its own weights.
      config: shape of the model.
      recipe: precision recipe.
      masters: float32 master tree, present only inside a gradient (see `with_masters`).
      substitutes: operations in place of ours, of an engine that differs on purpose; None: none.
      switches: [layers + 1, choices] bool, which of their choices are on, where `substitutes` leaves that open.
    """

    weights: dict | None
    config: ModelConfig = flax.struct.field(pytree_node=False)
    recipe: Recipe = flax.struct.field(pytree_node=False)
    masters: dict | None = None
    substitutes: Substitutes | None = flax.struct.field(pytree_node=False, default=None)
    switches: Any = None

    def with_masters(self, masters: dict) -> "Policy":
        """The same policy, whose forward hands its weight gradients to `masters`. Values do not change.

        Raises:
          ValueError: the policy has substitutes, which have no gradients.
        """
        if self.substitutes is not None:
            raise ValueError("a policy with substitutes samples and scores, and has no gradient: train the one without them")
        return self.replace(masters=masters)

    def with_substitutes(self, substitutes: Substitutes, switches: Any = None) -> "Policy":
        """The same weights, run with other operations: see `minite_jax.model.substitutes`."""
        return self.replace(substitutes=substitutes, switches=switches)

    def running(self, layer: int = -1, switches: Any = None) -> contextlib.AbstractContextManager:
        """Inside, what is traced belongs to a layer, or to none (-1): there substitutes take the place of our operations.

        Args:
          layer: number of the layer.
          switches: the layer's row of `switches`; None: it is looked up.
        """
        if self.substitutes is None:
            return contextlib.nullcontext()
        if switches is None and self.switches is not None:
            switches = self.switches[layer]
        return self.substitutes.running(layer, switches)

    def paired_weights(self) -> dict:
        """The tree with a `Weight` at each leaf."""
        is_leaf = lambda x: isinstance(x, nvfp4.Nvfp4Array)  # noqa: E731
        if self.masters is None:
            return jax.tree.map(Weight, self.weights, is_leaf=is_leaf)
        return jax.tree.map(Weight, self.weights, self.masters, is_leaf=is_leaf)

    def format_of(self, kind: str, layer: int) -> MatmulFormat:
        """Format of one layer's matmuls of a kind."""
        return self.recipe.format_of(kind, layer, self.config.num_hidden_layers)


def plain_dtype(spec: params_lib.ParamSpec, compute_dtype) -> np.dtype:
    """The type in which a policy stores a weight that is not quantised."""
    is_float32 = spec.kind in (params_lib.NORM, params_lib.ROUTER, params_lib.BIAS)
    return np.dtype(np.float32 if is_float32 else compute_dtype)


def _stored(spec: params_lib.ParamSpec, master: jax.Array, config: ModelConfig, recipe: Recipe):
    format = recipe.format_of(spec.kind, spec.layer, config.num_hidden_layers)
    if format.quantized:
        return nvfp4.quantize(master, format.weight)
    return round_to(master, plain_dtype(spec, recipe.compute_dtype))


@jax.named_scope("pack")
def pack(params: dict, config: ModelConfig, recipe: Recipe) -> Policy:
    """Quantises master weights by a recipe. Pure; runs inside the jitted update, outside the gradient."""
    weights = jax.tree.map(lambda spec, master: _stored(spec, master, config, recipe), params_lib.abstract_params(config), params)
    return Policy(weights=weights, config=config, recipe=recipe)


def check_recipe(config: ModelConfig, recipe: Recipe) -> None:
    """Raises ValueError where a recipe that should quantise quantises nothing in this model."""
    specs = jax.tree.leaves(params_lib.abstract_params(config))
    if recipe.matmuls and not any(recipe.format_of(s.kind, s.layer, config.num_hidden_layers).quantized for s in specs):
        raise ValueError(
            f"recipe {recipe.name} quantises nothing in this model: it wants {' or '.join(recipe.matmuls)} between the first "
            f"{recipe.first_plain} and the last {recipe.last_plain} of {config.num_hidden_layers} layers; choose another recipe, "
            f"or recipe({recipe.name!r}, first_plain=..., last_plain=...)"
        )


def prepare(params: dict, config: ModelConfig, recipe: Recipe) -> Policy:
    """Checks master weights and quantises them once. Not differentiable: a gradient reaches the masters through
    `Policy.with_masters`, as the learner's update does it.

    Args:
      params: float32 tree as `init_params` makes it.
      config: shape of the model.
      recipe: precision recipe, see `minite_jax.recipe`.

    Returns:
      The `Policy` that `forward`, `sample` and the learner share.

    Raises:
      ValueError: a parameter is missing, of the wrong shape or type, or holds NaN or infinity (named); or the recipe quantises
        nothing.
    """
    params_lib.check_params(params, config)
    check_recipe(config, recipe)
    finite = _all_finite(params)
    for path, ok in jax.tree_util.tree_flatten_with_path(finite)[0]:
        if not ok:
            raise ValueError(f"parameter {params_lib.path_name(path)} holds NaN or infinity; restore an earlier checkpoint")
    return _pack_jit(params, config, recipe)


_pack_jit = jax.jit(pack, static_argnums=(1, 2))
_all_finite = jax.jit(lambda params: jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), params))


def with_fp8_exact(weights: Any, value: bool) -> Any:
    """A tree of weights whose NVFP4 arrays all say whether their products are E4M3 numbers: one mark, one program."""
    is_leaf = lambda x: isinstance(x, nvfp4.Nvfp4Array)  # noqa: E731
    return jax.tree.map(lambda x: x.replace(fp8_exact=value) if is_leaf(x) else x, weights, is_leaf=is_leaf)
