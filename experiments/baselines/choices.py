"""What engines do differently, choice by choice, each in place of ours in the one forward; and named sets of them, from strict
alignment to engines that share nothing but weights.

    policy = level_policy("attention", aligned_policy, params)      # samples and scores with one choice in every layer
    policy = switched_policy(aligned_policy, ["attention", "norms"], params)
    policy = policy.replace(switches=...)                           # any set of choices and layers, one compiled program

The learner has no levels: it trains the strict policy, and a sampler of another level gives it a gap, as another engine does.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from experiments.baselines import operations as xla
from experiments.baselines.choice_operations import OPERATIONS
from minite_jax.errors import UserError
from minite_jax.model import pack
from minite_jax.model.config import ModelConfig
from minite_jax.model.policy import Policy
from minite_jax.model.substitutes import Substitutes
from minite_jax.precision.recipe import Recipe

STRICT = "strict"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One thing that an engine does in its own way.

    Attributes:
      about: one line for people.
      inside, outside: whether it concerns layers, and what lies outside of them (final norm and head).
      needs: "weights" or "activations" that are quantised, "experts", or "" for every model and recipe.
    """

    about: str
    inside: bool = True
    outside: bool = False
    needs: str = ""


CHOICES: dict[str, Choice] = {
    "weights": Choice("weights quantised by TransformerEngine's plain rule, one scale a matrix", needs="weights"),
    "te_scales": Choice("activations quantised by TransformerEngine's plain rule", needs="activations"),
    "tensor_scales": Choice("one activation scale for the whole batch in place of one a row", needs="activations"),
    "bf16_quantiser": Choice("codes from quotients in bfloat16", needs="activations"),
    "excess_precision": Choice("sums, norms and gates are quantised without being rounded to bfloat16", needs="activations"),
    "matmul": Choice("XLA's matmuls of the numbers that the operands stand for"),
    "bf16_operands": Choice("a GPU multiplies NVFP4 as bfloat16 in place of E4M3", needs="activations"),
    "split_k": Choice(f"matmuls sum K in {xla.SPLITS} parts"),
    "k_order": Choice("matmuls sum K from its end to its start"),
    "norms": Choice("XLA's norms and rotation", outside=True),
    "attention": Choice("XLA's softmax attention, all scores at once"),
    "gate": Choice("XLA's SwiGLU gate, in bfloat16"),
    "router": Choice("XLA's router, in float32", needs="experts"),
    "bf16_router": Choice("router logits in bfloat16", needs="experts"),
    "combine": Choice("XLA's weighted sum of experts", needs="experts"),
    "head": Choice("XLA's logits and log-softmax", inside=False, outside=True),
    "bf16_head": Choice("logits rounded to bfloat16", inside=False, outside=True),
}
_INDEPENDENT = ("weights", "te_scales", "tensor_scales", "matmul", "norms", "attention", "gate", "router", "combine", "head")
LEVELS: dict[str, tuple[str, ...]] = {
    STRICT: (),
    "scales": ("tensor_scales",),
    "te_scales": ("te_scales",),
    "te_weights": ("weights",),
    "reduction": ("matmul", "norms", "combine"),
    "bf16_operands": ("bf16_operands",),
    "split_k": ("split_k",),
    "k_order": ("k_order",),
    "attention": ("attention",),
    "router": ("router",),
    "bf16_router": ("bf16_router",),
    "head": ("head",),
    "bf16_head": ("bf16_head",),
    "bf16_quantiser": ("bf16_quantiser",),
    "excess_precision": ("excess_precision",),
    # All sums, norms, attention, router and head by XLA; quantised as we do.
    "xla": ("matmul", "norms", "attention", "gate", "router", "combine", "head"),
    # The operations of `naive_engine`, run by the one forward.
    "independent": _INDEPENDENT,
}


def applicable(names: Iterable[str], config: ModelConfig, recipe: Recipe) -> list[str]:
    """Those choices that can change anything in this model and recipe."""
    has_experts = any(map(config.is_moe_layer, range(config.num_hidden_layers)))
    layers = config.num_hidden_layers
    formats = [recipe.format_of(kind, i, layers) for kind in recipe.matmuls for i in range(layers)]
    has = {
        "": True,
        "experts": has_experts,
        "weights": any(each.weight is not None for each in formats),
        "activations": any(each.activation is not None for each in formats),
    }
    return [name for name in names if has[CHOICES[name].needs]]


def check_level(level: str, config: ModelConfig, recipe: Recipe) -> None:
    """Refuses a level that is the strict one under another name.

    Raises:
      UserError: no such level, or none of its choices concerns this model and recipe.
    """
    if level not in LEVELS:
        raise UserError(f"there is no alignment level {level!r}: choose from {', '.join(LEVELS)}")
    if LEVELS[level] and not applicable(LEVELS[level], config, recipe):
        raise UserError(
            f"alignment level {level} changes nothing in this model with recipe {recipe.name}: "
            f"{CHOICES[LEVELS[level][0]].about}; choose another level or recipe"
        )


def level_policy(level: str, policy: Policy, params: dict) -> Policy:
    """The policy as a sampler of this level runs it; itself for the strict level.

    Args:
      level: a name out of `LEVELS`.
      policy: the aligned policy, whose weights are used as they are, except where the level quantises its own.
      params: float32 masters, for levels that do.
    """
    check_level(level, policy.config, policy.recipe)
    return policy_with(LEVELS[level], policy, params)


def policy_with(names: Iterable[str], policy: Policy, params: dict) -> Policy:
    """The policy with choices that are on in every layer; those that cannot change anything are left out."""
    names = tuple(applicable(names, policy.config, policy.recipe))
    if not names:
        return policy
    on = _rows(names, policy.config, {name: range(policy.config.num_hidden_layers + 1) for name in names})
    policy = policy.with_substitutes(_substitutes(names, tuple(map(tuple, on.tolist()))))
    return policy.replace(weights=their_weights(policy, params)) if "weights" in names else policy


def switched_policy(policy: Policy, names: Sequence[str]) -> Policy:
    """The policy with choices that are all off, and are switched by its argument `switches`: see `switches_of`.

    Both ways are compiled. Quantised activations are marked as not `fp8_exact` where "te_scales" is among the choices, since both
    ways must have one type; a GPU then multiplies them as bfloat16, and ours may differ from the strict bits.
    """
    names = tuple(names)
    off = switches_of(names, policy.config, {})
    return policy.with_substitutes(_substitutes(names, None), off)


def switches_of(names: Sequence[str], config: ModelConfig, on: dict[str, Iterable[int]]) -> Bool[Array, "L1 G"]:
    """The argument `switches`: by name of a choice, the layers where it is on; L, their number, stands for what lies outside."""
    return jnp.asarray(_rows(names, config, on))


def _rows(names, config, on) -> np.ndarray:
    rows = np.zeros((config.num_hidden_layers + 1, len(names)), bool)
    for name, layers in on.items():
        choice = CHOICES[name]
        for layer in layers:
            if choice.outside if layer == config.num_hidden_layers else choice.inside:
                rows[layer, names.index(name)] = True
    return rows


def places(name: str, config: ModelConfig) -> list[int]:
    """Where a choice can be on: numbers of layers, and their number for what lies outside."""
    inside = range(config.num_hidden_layers) if CHOICES[name].inside else ()
    return [*inside, *([config.num_hidden_layers] if CHOICES[name].outside else ())]


def their_weights(policy: Policy, params: dict) -> dict:
    """Weights as TransformerEngine's plain rule quantises them, where the recipe quantises."""
    recipe = policy.recipe
    quantized = dataclasses.replace(recipe.quantized, weight=xla.TENSOR_RULE)
    return _pack(params, policy.config, dataclasses.replace(recipe, quantized=quantized)).weights


_pack = jax.jit(pack, static_argnums=(1, 2))


@functools.cache
def _substitutes(names: tuple[str, ...], on) -> Substitutes:
    wanted = set(names)
    found = tuple((operation, function) for operation, (function, choices) in OPERATIONS.items() if wanted & set(choices))
    return Substitutes(
        operations=found,
        choices=names,
        inside=frozenset(name for name in names if CHOICES[name].inside),
        outside=frozenset(name for name in names if CHOICES[name].outside),
        on=on,
    )
