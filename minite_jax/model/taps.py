"""Looking into the forward: its named tensors, handed out on request, or replaced on their way.

    taps = Taps(["layer.3/moe/*", "final/*"])
    hidden, _ = hidden_states(policy, tokens, taps=taps)
    taps.tensors["layer.3/moe/router/experts"]           # an array, or inside jit a tracer: return it

The forward says at each point what the tensor there is called. Without taps nothing is done there: the program is the same to the
last equation. A tensor has one row for each of the B T tokens, in the order of the flattened batch.

An operand that is quantised has three more tensors beside its plain numbers: ``.codes`` (one E2M1 code a byte), ``.block_scale``
and ``.outer_scale``. Some tensors exist only inside a kernel; they are computed beside it, by the kernels that the forward itself
uses: plain numbers of a quantised norm or gate, ``q_norm`` and ``k_norm`` (the same kernel, turned by an angle of 0),
``router/probs`` (the same kernel, asked for all experts), and the learner's logits.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from minite_jax.model.policy import Policy
from minite_jax.precision.activation import Activation
from minite_jax.precision.recipe import ATTENTION, EXPERTS, MLP, MatmulFormat
from pallas_kernels import nvfp4

CODES, BLOCK_SCALE, OUTER_SCALE = ".codes", ".block_scale", ".outer_scale"
PARTS = (CODES, BLOCK_SCALE, OUTER_SCALE)

Edit = Callable[[Any], Any]


def layer_tensors(policy: Policy, layer: int) -> list[str]:
    """Names of a layer's tensors without ``layer.<i>/``, in the order in which they are computed."""
    config = policy.config

    def operand(name: str, kind: str) -> list[str]:
        return [name, *(name + part for part in PARTS)] if policy.format_of(kind, layer).quantized else [name]

    names = ["input", *operand("attention/norm", ATTENTION), "attention/qkv"]
    names += ["attention/q_norm", "attention/k_norm"] if config.qk_norm else []
    names += ["attention/q", "attention/k", *operand("attention/heads", ATTENTION), "attention/o", "attention/stream"]
    if config.is_moe_layer(layer):
        names += [*operand("moe/norm", EXPERTS), "moe/router/probs", "moe/router/experts", "moe/router/weights"]
        names += ["moe/experts/gate_up", *operand("moe/experts/gated", EXPERTS), "moe/experts/down", "moe/out"]
    else:
        names += [*operand("mlp/norm", MLP), "mlp/gate_up", *operand("mlp/gated", MLP), "mlp/down"]
    return names


def tensor_names(policy: Policy) -> list[str]:
    """Names of all tensors of a forward, in the order in which they are computed."""
    layers = [f"layer.{i}/{name}" for i in range(policy.config.num_hidden_layers) for name in layer_tensors(policy, i)]
    return ["embed", *layers, "final/stream", "final/norm", "final/logits", "final/log_prob", "final/entropy"]


class Taps:
    """Which tensors of a forward are wanted, and those that it has given.

    Args:
      patterns: names, with ``*``, ``?`` and ``[...]`` as in file names; ``*`` crosses slashes.
      edits: by exact name, a function from a tensor (as it would be handed out) to the one that the forward goes on with, of the
        same shape and type. An operand that is edited is quantised from the edited numbers.

    Attributes:
      tensors: arrays by name, in the order in which they were given.

    Raises:
      ValueError: in the forward, for an edit of a tensor that is not computed on its way, or that gives another shape or type.
    """

    def __init__(self, patterns: Iterable[str] = (), edits: Mapping[str, Edit] | None = None):
        self.patterns, self.edits = tuple(patterns), dict(edits or {})
        self.tensors: dict[str, jax.Array] = {}

    def wants(self, name: str) -> bool:
        """Whether a tensor of this name is to be handed out."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def concerns(self, name: str) -> bool:
        """Whether anything is to be done with a tensor of this name."""
        return name in self.edits or self.wants(name)

    def in_layer(self, policy: Policy, layer: int) -> "Taps":
        """Taps of one layer, whose names have no ``layer.<i>/``."""
        if not self.patterns and not self.edits:
            return Taps()
        prefix = f"layer.{layer}/"
        names = [name for name in layer_tensors(policy, layer) if self.wants(prefix + name)]
        edits = {name.removeprefix(prefix): edit for name, edit in self.edits.items() if name.startswith(prefix)}
        return Taps(names, edits)

    @property
    def program(self) -> tuple:
        """What the code of these taps depends on: layers with equal programs can share a loop."""
        return self.patterns, tuple(self.edits.items())

    def collect(self, layer: int, tensors: Mapping[str, jax.Array]) -> None:
        """Takes over what a layer's taps have collected."""
        self.tensors |= {f"layer.{layer}/{name}": value for name, value in tensors.items()}

    def __call__(self, name: str, value, view: Edit | None = None, back: Edit | None = None):
        """Offers a tensor. Returns what the forward goes on with.

        Args:
          name: of the tensor.
          value: the array, one row for each token once `view` was applied.
          view, back: from the forward's order of rows to that of tokens, and back.
        """
        if not self.concerns(name):
            return value
        shown = view(value) if view else value
        if name in self.edits:
            shown = _edited(name, self.edits[name], shown)
            value = back(shown) if back else shown
        if self.wants(name):
            self.tensors[name] = jax.lax.stop_gradient(shown)
        return value

    def beside(self, name: str, compute: Callable[..., Any], *arguments) -> None:
        """Offers a tensor that the forward does not hold: `compute(*arguments)`, if it is wanted."""
        if name in self.edits:
            raise ValueError(f"{name} is computed beside the forward, which does not read it: edit what it is computed from")
        if self.wants(name):
            self.tensors[name] = compute(*jax.lax.stop_gradient(arguments))

    def operand(
        self,
        name: str,
        format: MatmulFormat,
        x: Activation,
        plain: Callable[..., Any],
        *arguments,
        view: Edit = lambda x: x,
        back: Edit = lambda x: x,
    ) -> Activation:
        """Offers what a matmul reads: its plain numbers, ``plain(*arguments)``, and the parts of its quantised ones."""
        if not any(map(self.concerns, (name, *(name + part for part in PARTS)))):
            return x
        if not format.quantized:
            return Activation(self(name, x.carrier, view, back))
        plain_MK = plain(*jax.lax.stop_gradient(arguments))
        if name in self.edits:
            plain_MK = back(_edited(name, self.edits[name], view(plain_MK)))
            # The carrier's numbers are read where it holds the plain rows (a router); its gradient stays what it was.
            carrier = x.carrier + jax.lax.stop_gradient(plain_MK - x.carrier) if plain_MK.shape == x.carrier.shape else x.carrier
            x = Activation(carrier, nvfp4.quantize_operand(plain_MK, format.activation))
        if self.wants(name):
            self.tensors[name] = view(plain_MK)
        packed = x.quantized
        if not isinstance(packed, nvfp4.Nvfp4Array):  # codes and scales multiplied out: the same numbers
            packed = nvfp4.quantize(plain_MK, format.activation)
        codes = self(name + CODES, nvfp4.unpack_codes(packed.codes), view, back)
        block_scale = self(name + BLOCK_SCALE, packed.block_scale, view, back)
        # One scale for a whole tensor is every row's scale.
        shared = (lambda scale: jnp.broadcast_to(scale, view(packed.codes).shape[:-1])) if packed.outer_scale.ndim == 0 else view
        self.beside(name + OUTER_SCALE, shared, packed.outer_scale)
        if {name + CODES, name + BLOCK_SCALE} & set(self.edits):
            x = Activation(x.carrier, packed.replace(codes=nvfp4.pack_codes(codes), block_scale=block_scale))
        return x


def by_token(slot: Int[Array, "M k"]) -> Edit:
    """From sorted assignments [M k, ...] to tokens and ranks [M, k, ...]."""
    return lambda x: x[slot]


def by_expert(order: Int[Array, "Mk"]) -> Edit:
    """From tokens and ranks [M, k, ...] to sorted assignments [M k, ...]."""
    return lambda x: x.reshape(-1, *x.shape[2:])[order]


def _edited(name: str, edit: Edit, value):
    result = edit(value)
    if (result.shape, result.dtype) != (value.shape, value.dtype):
        raise ValueError(
            f"an edit of {name} gave {result.dtype} {result.shape}; the forward needs {value.dtype} {tuple(value.shape)}"
        )
    return result
