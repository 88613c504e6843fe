"""What a checkpoint says about the arrays in it, and whether that fits a template.

Orbax casts silently when a template asks for another dtype (int32 16777217 becomes float32 16777216), so
shapes, dtypes and structure are compared here before anything is read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from minite_jax.checkpoint.errors import CheckpointError

_SHOWN = 5  # so many leaves are named in an error; the rest is counted


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state: its shape, its dtype by name, and for a typed PRNG key the generator's name."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    def __str__(self) -> str:
        kind = self.dtype if self.key_impl is None else f"PRNG key of {self.key_impl}"
        return f"{kind} {list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Leaf":
        return cls(tuple(stored["shape"]), stored["dtype"], stored["key_impl"])


def flatten(state: PyTree) -> dict[str, Any]:
    """Returns the leaves of `state` under their paths (`params.layers.0.gate`).

    Raises:
        CheckpointError: two leaves have the same path, or there are none.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "state"
        if name in leaves:
            raise CheckpointError(f"two leaves are called {name!r}: rename the dictionary key with a dot")
        leaves[name] = leaf
    if not leaves:
        raise CheckpointError("the state holds no arrays: there is nothing to save or restore")
    return leaves


def describe(name: str, leaf: Any) -> Leaf:
    """Returns the description of a leaf: an array, a typed PRNG key, or a `jax.ShapeDtypeStruct` of either.

    Raises:
        CheckpointError: the leaf is no array.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise CheckpointError(f"leaf {name!r} of the state is a {type(leaf).__name__}, not an array: wrap it in jnp.asarray")
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return Leaf(tuple(leaf.shape), str(data.dtype), key_impl(leaf))
    return Leaf(tuple(leaf.shape), str(np.dtype(leaf.dtype)))


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is (or describes) a typed PRNG key array."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl(leaf: Any) -> str:
    """The name of a typed key's generator, such as `threefry2x32`, as `jax.random.wrap_key_data` takes it."""
    # A ShapeDtypeStruct has no key to ask, but an abstract evaluation makes one of its type.
    found = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))) or jax.random.key_data(key), leaf)
    return found[0]


def check_fit(where: str, stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> None:
    """Compares what a checkpoint holds with what a template wants.

    Args:
        where: the checkpoint, for the message.
        stored: leaf descriptions of the checkpoint, by path.
        wanted: leaf descriptions of the template, by path.

    Raises:
        CheckpointError: a leaf is missing, unknown, or has another shape or dtype; names the paths.
    """
    problems = [f"lacks {name!r} ({leaf})" for name, leaf in wanted.items() if name not in stored]
    unknown = [name for name in stored if name not in wanted]
    problems += [f"has {name!r} ({stored[name]}), which is unknown here" for name in unknown]
    problems += [
        f"has {name!r} as {stored[name]} where {leaf} is wanted"
        for name, leaf in wanted.items()
        if name in stored and stored[name] != leaf
    ]
    if problems:
        remedy = "restore it into a state like the one that was saved"
        raise CheckpointError(f"{where} does not fit: it {shorten(problems)}; {remedy}")


def shorten(problems: list[str]) -> str:
    """Joins the first few problems and counts the others."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
