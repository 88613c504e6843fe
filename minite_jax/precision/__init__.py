"""Recipes (which layer in which format) and the linear maps that follow them."""

from minite_jax.precision.linear import expert_linear, linear, stored_value
from minite_jax.precision.recipe import RECIPES, MatmulFormat, Recipe, recipe

__all__ = ["RECIPES", "MatmulFormat", "Recipe", "expert_linear", "linear", "recipe", "stored_value"]
