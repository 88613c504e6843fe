"""The attention cases of the kernel benchmark: a causal pass, its gradient, and one token of each sequence over a paged cache.

Let B be sequences, T tokens of each, H query heads, N key/value heads, K the head dimension.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from experiments.kernels import peers
from experiments.kernels.cases import BF16, READ, SHARE, VS_CUDNN, VS_SDPA, Case, Other, Scale, normal
from experiments.kernels.peers import Peer
from pallas_kernels import shapes
from pallas_kernels.attention import attention, key_block, paged_attention


def cases(scale: Scale) -> Iterator[Case]:
    """A pass over each shape and its gradient, then decoding."""
    for model in scale.attention_models:
        for B, T in scale.attention_passes:
            yield from _passes(model, B, T)
    for model in scale.attention_models:
        for B, T in scale.attention_caches:
            yield _decode(model, B, T)


def _words(model: shapes.Model, B: int, T: int) -> str:
    return f"B = {B}, T = {T}, H = {model.heads}, N = {model.kv_heads}, K = {model.head_dim}"


def _cudnn(what: str, model: shapes.Model, B: int, T: int, function, make) -> dict[str, Other]:
    """cuDNN's attention through JAX, which asks for a GPU already when it is traced."""
    name = f"jax.nn.dot_product_attention by cuDNN, {what}, {_words(model, B, T)}"
    return {VS_CUDNN: Other(name, function, make)} if jax.default_backend() == "gpu" else {}


def _dot_product_attention(q, k, v, *, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def _gradients(function, g, *inputs):
    return jax.vjp(function, *inputs)[1](g)


def _passes(model: shapes.Model, B: int, T: int) -> Iterator[Case]:
    H, N, K = model.heads, model.kv_heads, model.head_dim
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    pairs = B * H * T * (T + 1) // 2

    def inputs(key):
        q_key, k_key, v_key = jax.random.split(key, 3)
        return normal(q_key, B, T, H, K), normal(k_key, B, T, N, K), normal(v_key, B, T, N, K)

    def inputs_and_gradient(key):
        return normal(key, B, T, H, K), *inputs(key)

    def ours(q, k, v):
        return attention(q, k, v, positions)

    def cudnn(q, k, v):
        return _dot_product_attention(q, k, v, is_causal=True)

    q_bytes, k_bytes = 2 * B * T * H * K, 2 * B * T * N * K
    common = dict(suite="attention", operands="q, k, v bf16", shape=_words(model, B, T), ceiling=BF16)
    yield Case(
        name=f"{model.name}, causal pass",
        function=ours,
        make=inputs,
        flops=4 * K * pairs,
        nbytes=2 * q_bytes + 2 * k_bytes,
        ratios={
            **_cudnn("causal", model, B, T, cudnn, inputs),
            VS_SDPA: Peer(peers.SDPA_CAUSAL, (B, T, H, N, K)),
        },
        goals={VS_CUDNN: 0.8} if jax.default_backend() == "gpu" else {},
        **common,
    )
    # Two products of the pass, five of the backward; the log-sum-exp is not counted among the bytes.
    yield Case(
        name=f"{model.name}, causal pass and its gradients",
        function=lambda g, q, k, v: _gradients(ours, g, q, k, v),
        make=inputs_and_gradient,
        flops=14 * K * pairs,
        nbytes=5 * q_bytes + 6 * k_bytes,
        ratios={
            **_cudnn("with gradients", model, B, T, lambda g, q, k, v: _gradients(cudnn, g, q, k, v), inputs_and_gradient),
            VS_SDPA: Peer(peers.SDPA_GRADIENTS, (B, T, H, N, K)),
        },
        goals={VS_CUDNN: 0.7} if jax.default_backend() == "gpu" else {},
        **common,
    )


def _decode(model: shapes.Model, B: int, T: int) -> Case:
    H, N, K, S = model.heads, model.kv_heads, model.head_dim, key_block()
    J = -(-T // S)

    def make(key):
        q_key, k_key, v_key, table_key = jax.random.split(key, 4)
        tables = jax.random.permutation(table_key, B * J).astype(jnp.int32).reshape(B, J)
        pages = (normal(each, B * J, S, N, K) for each in (k_key, v_key))
        return normal(q_key, B, 1, H, K), *pages, tables, jnp.full((B, 1), T - 1, jnp.int32)

    def contiguous(key):
        q_key, k_key, v_key = jax.random.split(key, 3)
        return normal(q_key, B, 1, H, K), normal(k_key, B, T, N, K), normal(v_key, B, T, N, K)

    return Case(
        suite="attention",
        name=f"{model.name}, one token each over pages",
        operands="q, k, v bf16",
        shape=_words(model, B, T),
        function=paged_attention,
        make=make,
        flops=4 * B * T * H * K,
        nbytes=4 * B * T * N * K,
        ceiling=READ,
        ratios={
            **_cudnn("one token", model, B, T, lambda q, k, v: _dot_product_attention(q, k, v, is_causal=False), contiguous),
            VS_SDPA: Peer(peers.SDPA_DECODE, (B, T, H, N, K)),
        },
        goals={SHARE: 0.8},
    )
