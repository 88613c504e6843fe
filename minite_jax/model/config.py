"""The shape of a model: Qwen3 dense, Qwen3-MoE, and Llama-type ones. Field names are those of Hugging Face's config.json."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from minite_jax.model.rope import RopeScaling

_MOST = 10_000  # layers, and experts: beyond it is a mistake, which walking through them would take minutes to find


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Qwen3 or Llama-type model.

    Attributes:
      vocab_size: V, rows of the embedding. A padded vocabulary counts whole: its ids have probabilities and can be sampled.
      hidden_size: D.
      num_hidden_layers: number of layers.
      num_attention_heads: H.
      num_key_value_heads: N; H is a multiple of N.
      head_dim: K; need not be D / H.
      intermediate_size: F of a dense MLP. Unused where every layer is MoE.
      num_experts: E, 0 for a dense model.
      num_experts_per_tok: k.
      moe_intermediate_size: F of an expert.
      norm_topk_prob: whether a token's k router weights are divided by their sum. Hugging Face's default is False;
        Qwen3-30B-A3B has True.
      decoder_sparse_step: with experts, every so many layers one is MoE, the last of them; the others are dense.
      mlp_only_layers: numbers of layers that are dense all the same.
      qk_norm: whether each query and key head is normalised before it is rotated: Qwen3's are, Llama's are not.
      attention_bias: whether the attention's four projections have biases.
      rope_theta: base of the rotary angles.
      rope_scaling: how the angles are stretched, as a `RopeScaling` or a mapping of its fields; None: not at all.
      rms_norm_eps: added to the mean square in every norm.
      tie_word_embeddings: whether the output embedding is the input embedding.

    Raises:
      ValueError: a combination that no model can have, or that NVFP4's blocks of 16 do not fit.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = ()
    qk_norm: bool = True
    attention_bias: bool = False
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self):
        # Configurations are static arguments of compiled functions: hashable.
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_hidden_layers", "num_experts"):
            if getattr(self, name) > _MOST:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {_MOST}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be finite and above 0")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps} must be finite and at least 0")
        if self.num_experts < 0:
            raise ValueError(f"num_experts={self.num_experts} must be at least 1, or 0 for a dense model")
        if self.is_moe:
            if not 1 <= self.num_experts_per_tok <= self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and num_experts={self.num_experts}"
                )
            if self.decoder_sparse_step < 1:
                raise ValueError(f"decoder_sparse_step={self.decoder_sparse_step} must be at least 1")
        elif self.decoder_sparse_step != 1 or self.mlp_only_layers:
            raise ValueError("decoder_sparse_step and mlp_only_layers are for models with experts; this one has num_experts=0")
        strays = [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]
        if strays:
            raise ValueError(f"mlp_only_layers names layer {strays[0]}; there are 0 to {self.num_hidden_layers - 1}")
        has_experts = {self.is_moe_layer(layer) for layer in range(self.num_hidden_layers)}
        if self.is_moe and True not in has_experts:
            raise ValueError(
                f"num_experts={self.num_experts}, but decoder_sparse_step and mlp_only_layers leave no layer for experts; say 0"
            )
        # The summed axes of the matmuls: NVFP4 holds 16 numbers per block, and a block never crosses a row.
        summed = {
            "hidden_size": self.hidden_size,
            "num_attention_heads * head_dim": self.num_attention_heads * self.head_dim,
        }
        if True in has_experts:
            summed["moe_intermediate_size"] = self.moe_intermediate_size
        if False in has_experts:
            summed["intermediate_size"] = self.intermediate_size
        for name, size in summed.items():
            if size < 16 or size % 16:
                raise ValueError(f"{name}={size} must be a positive multiple of 16, the block size of NVFP4")

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.is_moe and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def qkv_features(self) -> int:
        """Rows of the fused query, key and value projection: (H + 2 N) K."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim


def tiny_moe(**changes) -> ModelConfig:
    """The quick start's model: a quarter of a million parameters, the structure of Qwen3-30B-A3B."""
    shape = dict(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, rope_theta=1e4,
    )  # fmt: skip
    return ModelConfig(**(shape | changes))


def tiny_dense(**changes) -> ModelConfig:
    """The dense twin of `tiny_moe`."""
    shape = dict(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    return ModelConfig(**(shape | changes))


def qwen3_30b_a3b(**changes) -> ModelConfig:
    """Qwen/Qwen3-30B-A3B, from its config.json."""
    shape = dict(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, rope_theta=1e6,
    )  # fmt: skip
    return ModelConfig(**(shape | changes))


def qwen3_8b(**changes) -> ModelConfig:
    """Qwen/Qwen3-8B, from its config.json."""
    shape = dict(
        vocab_size=151936, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, rope_theta=1e6,
    )  # fmt: skip
    return ModelConfig(**(shape | changes))


def qwen3_0_6b(**changes) -> ModelConfig:
    """Qwen/Qwen3-0.6B, from its config.json."""
    shape = dict(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, rope_theta=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    return ModelConfig(**(shape | changes))
