"""Recipes: which matmuls run in which format. Named, frozen, printed at start, stored in checkpoints."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.nvfp4 import ScaleRule

# The matmuls that a recipe may quantise. Embedding, norms, router, lm_head, attention scores and softmax never are.
ATTENTION, MLP, EXPERTS = "attention", "mlp", "experts"
KINDS = (ATTENTION, MLP, EXPERTS)
_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class MatmulFormat:
    """How one matmul's operands are held.

    Attributes:
      activation: scale rule of the activations, None for plain values.
      weight: scale rule of the weights, None for plain values.

    Raises:
      ValueError: activations are quantised and weights are not, which no matmul here multiplies.
    """

    activation: ScaleRule | None = None
    weight: ScaleRule | None = None

    def __post_init__(self):
        if self.activation is not None and self.weight is None:
            raise ValueError("a format with quantised activations needs quantised weights: give weight a scale rule")

    @property
    def quantized(self) -> bool:
        """Whether anything is quantised: the weights, and perhaps the activations."""
        return self.weight is not None


_PLAIN = MatmulFormat()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A precision recipe.

    Attributes:
      name: as in `RECIPES`.
      description: one line for people.
      dtype: "bfloat16" or "float32": residual stream, norms' output, attention, and every matmul that is not quantised.
      quantized: the format of the quantised matmuls.
      matmuls: which kinds are quantised, out of "attention", "mlp", "experts".
      first_plain: leading layers that stay in `dtype`.
      last_plain: trailing layers that stay in `dtype`.

    Raises:
      ValueError: a value that is none of these.
    """

    name: str
    description: str
    dtype: str = "bfloat16"
    quantized: MatmulFormat = _PLAIN
    matmuls: tuple[str, ...] = ()
    first_plain: int = 0
    last_plain: int = 0

    def __post_init__(self):
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(_DTYPES)}")
        if not isinstance(self.matmuls, (tuple, list)) or not all(kind in KINDS for kind in self.matmuls):
            raise ValueError(f"matmuls={self.matmuls!r} must be a tuple out of {', '.join(KINDS)}")
        object.__setattr__(self, "matmuls", tuple(self.matmuls))  # recipes are static arguments: hashable
        for name in ("first_plain", "last_plain"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be a number of layers, an integer of at least 0")

    @property
    def compute_dtype(self):
        return jnp.dtype(self.dtype)

    def format_of(self, kind: str, layer: int, num_layers: int) -> MatmulFormat:
        """Format of the matmuls of `kind` in one layer of a model of `num_layers`."""
        plain = kind not in self.matmuls or layer < self.first_plain or layer >= num_layers - self.last_plain
        return _PLAIN if plain else self.quantized


def _nvfp4(activation: ScaleRule, weight: ScaleRule) -> MatmulFormat:
    return MatmulFormat(activation=activation, weight=weight)


_FP8_EXACT = _nvfp4(ScaleRule.fp8_exact(outer="row"), ScaleRule.fp8_exact(outer="matrix"))
_FOUR_OVER_SIX = _nvfp4(
    ScaleRule.te(outer="row", four_over_six="mae", bound=256), ScaleRule.te(outer="matrix", four_over_six="mae", bound=256)
)
_NAIVE = _nvfp4(ScaleRule.te(outer="matrix"), ScaleRule.te(outer="matrix"))



def _weights_only(format: MatmulFormat) -> MatmulFormat:
    """The same weights; activations stay in the recipe's type."""
    return dataclasses.replace(format, activation=None)


_RECIPES = (
    Recipe("fp32", "nothing quantised, float32 throughout", dtype="float32"),
    Recipe("bf16", "nothing quantised, bfloat16"),
    Recipe(
        "nvfp4",
        "W4A4: every projection and every MLP or expert matrix; fp8_exact scales, activations per row",
        quantized=_FP8_EXACT,
        matmuls=KINDS,
    ),
    Recipe("nvfp4_46", "as nvfp4, with four-over-six scales from all of E4M3", quantized=_FOUR_OVER_SIX, matmuls=KINDS),
    Recipe(
        "nvfp4_experts",
        "routed experts only; first 2 and last 4 layers bfloat16",
        quantized=_FP8_EXACT,
        matmuls=(EXPERTS,),
        first_plain=2,
        last_plain=4,
    ),
    Recipe(
        "nvfp4_te",
        "as nvfp4, with one amax per activation tensor: the naive comparator, which breaks the batch contract",
        quantized=_NAIVE,
        matmuls=KINDS,
    ),
    # W4A16. What the weights' rule alone costs, and how most 4-bit models are served.
    Recipe("nvfp4_a16", "the weights of nvfp4, bfloat16 activations", quantized=_weights_only(_FP8_EXACT), matmuls=KINDS),
    Recipe(
        "nvfp4_46_a16", "the weights of nvfp4_46, bfloat16 activations", quantized=_weights_only(_FOUR_OVER_SIX), matmuls=KINDS
    ),
    Recipe("nvfp4_te_a16", "the weights of nvfp4_te, bfloat16 activations", quantized=_weights_only(_NAIVE), matmuls=KINDS),
)
RECIPES: dict[str, Recipe] = {each.name: each for each in _RECIPES}


def recipe(name: str, **changes) -> Recipe:
    """Looks a recipe up by name; `changes` replace fields, e.g. ``recipe("nvfp4", first_plain=1, last_plain=1)``.

    Raises:
      ValueError: there is no recipe of that name, no such field, or a field has a value that `Recipe` refuses.
    """
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    unknown = set(changes) - {field.name for field in dataclasses.fields(Recipe)}
    if unknown:
        raise ValueError(f"a recipe has no field {', '.join(sorted(unknown))}")
    return dataclasses.replace(RECIPES[name], **changes)


def recipe_from_plain(plain: Mapping[str, Any]) -> Recipe:
    """The recipe of which `minite_jax.checkpoint.config.to_plain` made this, as files record it.

    Raises:
      ValueError: it is no recipe.
    """
    try:
        rules = {name: rule and ScaleRule(**rule | {"block": tuple(rule["block"])}) for name, rule in plain["quantized"].items()}
        return Recipe(**{**plain, "quantized": MatmulFormat(**rules), "matmuls": tuple(plain["matmuls"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no recipe of this version: {' '.join(str(error).split())}") from None
