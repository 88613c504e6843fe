"""Qwen3, dense and MoE, as pure functions over a tree of weights."""

from minite_jax.model.cache import PagedCache, init_cache, pages_for_samples
from minite_jax.model.config import ModelConfig, qwen3_0_6b, qwen3_8b, qwen3_30b_a3b, tiny_dense, tiny_moe
from minite_jax.model.forward import forward, hidden_states, logits_of, scored_tokens, token_log_probs
from minite_jax.model.params import abstract_params, init_params, num_params
from minite_jax.model.policy import Policy, pack, prepare
from minite_jax.model.taps import Taps, tensor_names

__all__ = [
    "ModelConfig", "PagedCache", "Policy", "Taps", "abstract_params", "forward", "hidden_states", "init_cache", "init_params",
    "logits_of", "num_params", "pack", "pages_for_samples", "prepare", "qwen3_0_6b", "qwen3_30b_a3b", "qwen3_8b", "scored_tokens",
    "tensor_names", "tiny_dense", "tiny_moe", "token_log_probs",
]  # fmt: skip
