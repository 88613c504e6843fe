"""The operands of every matmul of the one forward, taken from a run of that forward itself.

    recorded, logits = record_matmuls(policy, tokens)
    recorded["layer.0/attention/qkv"].x      # what the matmul was given, packed NVFP4 or plain

While `record_matmuls` traces the forward anew, the two matmuls that it calls hand their operands to the host on the way. Nothing
is computed a second time and no layer is written a second time.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
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
    with _recording() as calls:
        # A new function object: a program that was compiled without the recorder must not be found again.
        logits = jax.jit(lambda policy, tokens: _forward.forward.__wrapped__(policy, tokens))(policy, tokens)
        jax.block_until_ready(logits)
        jax.effects_barrier()
    if len(calls) != len(names):
        raise RuntimeError(f"the forward called {len(calls)} matmuls where {len(names)} were expected: mend matmul_names")
    return dict(zip(names, calls, strict=True)), logits


@contextlib.contextmanager
def _recording() -> Iterator[list[MatmulOperands]]:
    """Inside, whatever is traced and run gives its matmuls' operands, in the order in which they run (also out of loops)."""
    calls: list[MatmulOperands] = []

    def keep(x, w, group_sizes=None):
        calls.append(MatmulOperands(*jax.tree.map(jnp.asarray, (x, w, group_sizes))))

    def recorder(matmul):
        def recorded(x, w, *args, rows=None, **kwargs):
            if rows is not None:  # what is multiplied are copies of these rows of x
                x = take_rows(x, rows)
            jax.debug.callback(keep, x, w, *args, ordered=True)
            return matmul(x, w, *args, **kwargs)

        return recorded

    with contextlib.ExitStack() as stack:
        for module, name in _MATMULS:
            stack.enter_context(mock.patch.object(module, name, recorder(getattr(module, name))))
        yield calls
