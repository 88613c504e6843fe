"""Which tensor of a Hugging Face folder is which part of our parameter tree.

Ours has query, key and value in one matrix, gate and up in one, and all experts of a layer in one array; theirs are apart, or
(experts, in newer files) together. Every one of their tensors is a block of one of our leaves: nothing is transposed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from minite_jax.model.config import ModelConfig


class Placement(NamedTuple):
    """One tensor of a folder and where it lies in a leaf.

    Attributes:
      tensor: name in the folder.
      shape: of the tensor.
      leaf: path of the leaf, such as ``layers.3.gate_up``.
      start: corner of the block in the leaf; the leaf may have an axis of experts in front that the tensor lacks.
    """

    tensor: str
    shape: tuple[int, ...]
    leaf: str
    start: tuple[int, ...]

    def block(self) -> tuple[int, ...]:
        """Shape of the block in the leaf: that of the tensor, with the axis that it lacks."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape

    def corner(self, row: int) -> tuple[int, ...]:
        """Where, in the leaf, the tensor's rows from this one on begin. (Its first axis is the leaf's last but some.)"""
        axis = len(self.start) - len(self.shape)
        return tuple(at + row * (i == axis) for i, at in enumerate(self.start))


def is_harmless(tensor: str) -> bool:
    """Whether a tensor may lie in a folder without anybody reading it: old files hold the rotary frequencies."""
    return tensor.endswith("rotary_emb.inv_freq")


def placements(config: ModelConfig, *, fused_experts: bool = False) -> list[Placement]:
    """Every tensor of a model, in the order of transformers' modules.

    Args:
      config: shape of the model.
      fused_experts: whether a layer's experts are two tensors, ``experts.gate_up_proj`` [E, 2 F, D] (gate first) and
        ``experts.down_proj`` [E, D, F], or three matrices for each expert.
    """
    V, D = config.vocab_size, config.hidden_size
    found = [Placement("model.embed_tokens.weight", (V, D), "embed", (0, 0))]
    for layer in range(config.num_hidden_layers):
        found += _attention(config, layer)
        if config.is_moe_layer(layer):
            found += _experts(config, layer, fused_experts)
        else:
            found += _mlp(f"model.layers.{layer}.mlp", f"layers.{layer}", config.intermediate_size, D, ())
        found += [
            Placement(f"model.layers.{layer}.{theirs}.weight", (D,), f"layers.{layer}.{ours}", (0,))
            for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm"))
        ]
    found.append(Placement("model.norm.weight", (D,), "final_norm", (0,)))
    if not config.tie_word_embeddings:
        found.append(Placement("lm_head.weight", (V, D), "lm_head", (0, 0)))
    return found


def _attention(config: ModelConfig, layer: int) -> Iterator[Placement]:
    D, K = config.hidden_size, config.head_dim
    theirs, ours = f"model.layers.{layer}.self_attn", f"layers.{layer}"
    first = 0
    for name, heads in zip("qkv", (config.num_attention_heads, *[config.num_key_value_heads] * 2), strict=True):
        yield Placement(f"{theirs}.{name}_proj.weight", (heads * K, D), f"{ours}.qkv", (first, 0))
        if config.attention_bias:
            yield Placement(f"{theirs}.{name}_proj.bias", (heads * K,), f"{ours}.qkv_bias", (first,))
        first += heads * K
    yield Placement(f"{theirs}.o_proj.weight", (D, config.num_attention_heads * K), f"{ours}.o", (0, 0))
    if config.attention_bias:
        yield Placement(f"{theirs}.o_proj.bias", (D,), f"{ours}.o_bias", (0,))
    if config.qk_norm:
        yield from (Placement(f"{theirs}.{name}.weight", (K,), f"{ours}.{name}", (0,)) for name in ("q_norm", "k_norm"))


def _mlp(theirs: str, ours: str, F: int, D: int, expert: tuple[int, ...]) -> Iterator[Placement]:
    yield Placement(f"{theirs}.gate_proj.weight", (F, D), f"{ours}.gate_up", (*expert, 0, 0))
    yield Placement(f"{theirs}.up_proj.weight", (F, D), f"{ours}.gate_up", (*expert, F, 0))
    yield Placement(f"{theirs}.down_proj.weight", (D, F), f"{ours}.down", (*expert, 0, 0))


def _experts(config: ModelConfig, layer: int, fused: bool) -> Iterator[Placement]:
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    theirs, ours = f"model.layers.{layer}.mlp", f"layers.{layer}"
    yield Placement(f"{theirs}.gate.weight", (E, D), f"{ours}.router", (0, 0))
    if fused:
        yield Placement(f"{theirs}.experts.gate_up_proj", (E, 2 * F, D), f"{ours}.gate_up", (0, 0, 0))
        yield Placement(f"{theirs}.experts.down_proj", (E, D, F), f"{ours}.down", (0, 0, 0))
    else:
        for expert in range(E):
            yield from _mlp(f"{theirs}.experts.{expert}", ours, F, D, (expert,))
