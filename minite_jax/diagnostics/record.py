"""The operands of every matmul of the one forward, taken from a run of that forward itself.

    recorded, logits = record_matmuls(policy, tokens)
    recorded["layer.0/attention/qkv"].x      # what the matmul was given, packed NVFP4 or plain

While `record_matmuls` traces the forward anew, the two matmuls that it calls hand their operands to the host on the way. Nothing
is computed a second time and no layer is written a second time.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minite_jax.model.config import ModelConfig
from minite_jax.model.policy import Policy
from pallas_kernels.operands import Operand, take_rows

# Where the forward takes its matmuls from. Modules by name: their packages export functions that are called the same.
_forward = importlib.import_module("minite_jax.model.forward")
_linear = importlib.import_module("minite_jax.precision.linear")
_MATMULS = ((_linear, "matmul"), (_linear, "grouped_matmul"), (_forward, "matmul"))


@dataclasses.dataclass(frozen=True)
class MatmulOperands:
    """What one matmul read.

    Attributes:
      x: [M, K] activations.
      w: [N, K] weights, or [E, N, K] of all experts.
      group_sizes: [E] rows of each expert, None for a dense matmul.
    """

    x: Operand
    w: Operand
    group_sizes: Int[Array, "E"] | None = None


def matmul_names(config: ModelConfig) -> list[str]:
    """Names of the forward's matmuls in the order in which they run: ``layer.3/attention/qkv``, ``layer.3/attention/o``,
    ``layer.3/moe/gate_up`` (``mlp`` in a dense layer), ``layer.3/moe/down``, and ``head``.
    """
    names = []
    for i in range(config.num_hidden_layers):
        mlp = "moe" if config.is_moe_layer(i) else "mlp"
        names += [f"layer.{i}/{name}" for name in ("attention/qkv", "attention/o", f"{mlp}/gate_up", f"{mlp}/down")]
    return [*names, "head"]


def record_matmuls(policy: Policy, tokens: Int[Array, "B T"]) -> tuple[dict[str, MatmulOperands], Float[Array, "B T V"]]:
    """Runs the forward once over whole sequences.

    The forward is compiled anew for each call (seconds to half a minute), so this is for looking, not for loops.

    Args:
      policy: see `minite_jax.prepare`.
      tokens: [B, T] int32. Every position is recorded: leave padding out where it should not count.

    Returns:
      The operands of its matmuls by name (see `matmul_names`), in order, and the logits of this same run.

    Raises:
      RuntimeError: the forward has other matmuls than `matmul_names` says.
    """
    names = matmul_names(policy.config)
    with recording(lambda *operands: operands) as calls:
        # A new function object: a program that was compiled without the recorder must not be found again.
        logits = jax.jit(lambda policy, tokens: _forward.forward.__wrapped__(policy, tokens))(policy, tokens)
        jax.block_until_ready(logits)
        jax.effects_barrier()
    if len(calls) != len(names):
        raise RuntimeError(f"the forward called {len(calls)} matmuls where {len(names)} were expected: mend matmul_names")
    return {name: MatmulOperands(*call) for name, call in zip(names, calls, strict=True)}, logits


@contextlib.contextmanager
def recording(observe: Callable[..., Any]) -> Iterator[list]:
    """Inside, whatever is traced and run gives what `observe` makes of its matmuls' operands, in the order in which they run
    (also out of loops).

    Args:
      observe: traced function of ``x, w, group_sizes``, the fields of `MatmulOperands`; returns a pytree of arrays.
    """
    calls: list[Any] = []

    def recorder(matmul):
        def recorded(x, w, group_sizes=None, *, rows=None, **kwargs):
            # What is multiplied are copies of these rows of x.
            seen = observe(x if rows is None else take_rows(x, rows), w, group_sizes)
            leaves, treedef = jax.tree.flatten(seen)
            keep = lambda *leaves: calls.append(treedef.unflatten(map(jnp.asarray, leaves)))  # noqa: E731
            jax.debug.callback(keep, *leaves, ordered=True)
            sizes = () if group_sizes is None else (group_sizes,)
            return matmul(x, w, *sizes, **kwargs | ({} if rows is None else {"rows": rows}))

        return recorded

    with contextlib.ExitStack() as stack:
        for module, name in _MATMULS:
            stack.enter_context(mock.patch.object(module, name, recorder(getattr(module, name))))
        yield calls
