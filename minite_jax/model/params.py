"""The parameter tree. One abstract tree says of every parameter its shape, logical axes, kind and initialiser, once.

Initialisation, packing, checkpoints and shardings are maps over this tree. Matrices are stored as [out, in] (the summed axis
last), as in Hugging Face's files and as NVFP4's blocks want it; query, key and value are one matrix, so are gate and up (gate
first).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from minite_jax.model.config import ModelConfig
from minite_jax.precision.recipe import ATTENTION, EXPERTS, MLP

EMBEDDING, NORM, ROUTER, HEAD, BIAS = "embedding", "norm", "router", "head", "bias"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What is known of one parameter before it has a value. A leaf of the abstract tree.

    Attributes:
      shape: shape of the float32 master.
      axes: logical name of each axis, for sharding rules.
      kind: "embedding", "norm", "router", "head", "bias", or a kind of matmul that a recipe may quantise.
      layer: number of the layer, -1 outside the layers.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    layer: int = -1

    def initial(self, key) -> jax.Array:
        """A new value: ones for norms, zeros for biases, else normal with deviation 0.02 (embedding) or fan_in ** -0.5."""
        if self.kind == NORM:
            return jnp.ones(self.shape, jnp.float32)
        if self.kind == BIAS:
            return jnp.zeros(self.shape, jnp.float32)
        deviation = 0.02 if self.kind == EMBEDDING else self.shape[-1] ** -0.5
        return deviation * jax.random.normal(key, self.shape, jnp.float32)


def abstract_params(config: ModelConfig) -> dict:
    """The tree of `ParamSpec` for a model: ``{"embed", "layers": (...), "final_norm", "lm_head"}``."""
    D, K = config.hidden_size, config.head_dim

    def layer(i: int) -> dict:
        specs = {
            "attention_norm": ParamSpec((D,), ("model",), NORM, i),
            "qkv": ParamSpec((config.qkv_features, D), ("heads", "model"), ATTENTION, i),
            "o": ParamSpec((D, config.num_attention_heads * K), ("model", "heads"), ATTENTION, i),
            "mlp_norm": ParamSpec((D,), ("model",), NORM, i),
        }
        if config.qk_norm:
            specs |= {name: ParamSpec((K,), ("head_dim",), NORM, i) for name in ("q_norm", "k_norm")}
        if config.attention_bias:
            specs["qkv_bias"] = ParamSpec((config.qkv_features,), ("heads",), BIAS, i)
            specs["o_bias"] = ParamSpec((D,), ("model",), BIAS, i)
        if config.is_moe_layer(i):
            E, F = config.num_experts, config.moe_intermediate_size
            specs |= {
                "router": ParamSpec((E, D), ("expert_choice", "model"), ROUTER, i),
                "gate_up": ParamSpec((E, 2 * F, D), ("expert", "ffn", "model"), EXPERTS, i),
                "down": ParamSpec((E, D, F), ("expert", "model", "ffn"), EXPERTS, i),
            }
        else:
            F = config.intermediate_size
            specs |= {
                "gate_up": ParamSpec((2 * F, D), ("ffn", "model"), MLP, i),
                "down": ParamSpec((D, F), ("model", "ffn"), MLP, i),
            }
        return specs

    tree = {
        "embed": ParamSpec((config.vocab_size, D), ("vocab", "model"), EMBEDDING),
        "layers": tuple(layer(i) for i in range(config.num_hidden_layers)),
        "final_norm": ParamSpec((D,), ("model",), NORM),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = ParamSpec((config.vocab_size, D), ("vocab", "model"), HEAD)
    return tree


def path_name(path) -> str:
    """A tree path as people write it: ``layers.3.gate_up``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def abstract_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """The leaves of `abstract_params` by their paths."""
    return {path_name(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]}


def init_params(config: ModelConfig, key) -> dict:
    """New float32 master weights. Each parameter draws from a key of its own path, so adding one leaves the others alone."""
    specs, treedef = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    values = [spec.initial(jax.random.fold_in(key, _stable_hash(path_name(path)))) for path, spec in specs]
    return treedef.unflatten(values)


def _stable_hash(text: str) -> int:
    """A 31-bit number from a name (FNV-1a): Python's own hash changes from process to process."""
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value >> 1


def num_params(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(abstract_params(config)))


def check_params(params: dict, config: ModelConfig) -> None:
    """Checks structure, shapes and types of a parameter tree against the config.

    Raises:
      ValueError: names the first parameter that is missing, unexpected or of the wrong shape or type.
    """
    wanted = abstract_specs(config)
    given = {path_name(p): v for p, v in jax.tree_util.tree_flatten_with_path(params)[0]}
    for name, spec in wanted.items():
        if name not in given:
            raise ValueError(f"parameter {name} {spec.shape} is missing")
        value = given[name]
        if value.shape != spec.shape:
            raise ValueError(f"parameter {name} has shape {value.shape}; the config asks for {spec.shape}")
        if value.dtype != jnp.float32:
            raise ValueError(f"parameter {name} is {value.dtype}; master weights are float32")
    for name in given:
        if name not in wanted:
            raise ValueError(f"parameter {name} is not part of this model")
