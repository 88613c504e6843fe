"""Other operations in place of ours, layer by layer, in the one forward: how an engine that differs on purpose runs.

A policy has none, unless someone gives it some (`Policy.with_substitutes`): `experiments.baselines` holds the operations, this
module only says when the forward uses them. Each belongs to a named *choice*, such as "attention", which is on or off in each
layer and outside of the layers (the head). Which are on is either fixed when the program is compiled, or an argument of the
program: then one compiled program runs every combination, which is what a search through them needs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels import dispatch

On = Mapping[str, "bool | jax.Array"]


@dataclasses.dataclass(frozen=True)
class Substitutes:
    """Operations that take the place of ours. Hashable: a policy that has them is another program.

    Attributes:
      operations: pairs of an operation's name (see `pallas_kernels.dispatch.substituted`) and ``f(on, ours, *args, **kwargs)``,
        which runs in its place; `on` says by name which choices are on, each a bool, or a scalar of the program.
      choices: names of the choices.
      inside, outside: those that concern the layers, and what lies outside of them. The others are off there.
      on: for each layer, and last for what lies outside of the layers, which choices are on; None where the policy's `switches`
        say so.
    """

    operations: tuple[tuple[str, Callable[..., Any]], ...]
    choices: tuple[str, ...]
    inside: frozenset[str]
    outside: frozenset[str]
    on: tuple[tuple[bool, ...], ...] | None = None

    def fixed(self, layer: int) -> tuple[bool, ...] | None:
        """What is on in a layer (-1: outside), where the program says so: layers that differ in it cannot share a loop."""
        return None if self.on is None else self.on[layer]

    def running(self, layer: int, switches: jax.Array | None) -> contextlib.AbstractContextManager:
        """Inside, the operations that are traced belong to a layer (-1: none).

        Args:
          layer: number of the layer.
          switches: [choices] bool of this layer, where `on` is None.
        """
        concerned = self.outside if layer < 0 else self.inside
        values = switches if self.on is None else self.fixed(layer)
        on = {name: values[i] if name in concerned else False for i, name in enumerate(self.choices)}
        if all(value is False for value in on.values()):
            return contextlib.nullcontext()
        return dispatch.substituted({name: functools.partial(operation, on) for name, operation in self.operations})


def choose(on: "bool | jax.Array", theirs: Callable[[], Any], ours: Callable[[], Any]) -> Any:
    """``theirs()`` where the choice is on, else ``ours()``; only one of the two runs. Where the choice is an argument of the
    program, both must give arrays of the same shapes and types.
    """
    if isinstance(on, bool):
        return theirs() if on else ours()
    return jax.lax.cond(on, theirs, ours)
