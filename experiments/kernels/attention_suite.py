"""The attention cases of the kernel benchmark: a causal pass, its gradient, and one token of each sequence over a paged cache;
and what comes before them, the norm and the rotation of queries and keys.

Let B be sequences, T tokens of each, H query heads, N key/value heads, K the head dimension.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from experiments.kernels import peers
from experiments.kernels.cases import BF16, COPY, READ, SHARE, VS_CUDNN, VS_SDPA, VS_UNFUSED, Case, Other, Scale, normal
from experiments.kernels.peers import Peer
from pallas_kernels import shapes
from pallas_kernels.attention import attention, key_block, paged_attention
from pallas_kernels.qk_norm_rotary import qk_norm_rotary
from pallas_kernels.rotary import rotary_table

_EPSILON = 1e-6


def cases(scale: Scale) -> Iterator[Case]:
    """Norm and rotation, then for each model a pass over each shape and its gradient, and decoding."""
    yield from _norm_and_rotation(scale.tokens, scale.moe)
    for each in scale.attention:
        for B, T in each.passes:
            yield from _passes(each.model, B, T)
        for B, T in each.caches:
            yield _decode(each.model, B, T)


def plain_norm_and_rotation(qkv, q_weight, k_weight, cos, sin, *, num_heads: int, num_kv_heads: int):
    """Split, norm and rotation in jnp, as libraries without a kernel write them, rounded where `qk_norm_rotary` rounds."""

    def turned(x_MHK, weight_K):
        x32_MHK = x_MHK.astype(jnp.float32)
        scale_MH1 = jax.lax.rsqrt(jnp.mean(x32_MHK**2, axis=-1, keepdims=True) + _EPSILON)
        normed_MHK = (x32_MHK * scale_MH1 * weight_K[None, None]).astype(x_MHK.dtype).astype(jnp.float32)
        first, second = jnp.split(normed_MHK, 2, axis=-1)
        cos_M1K, sin_M1K = cos[:, None], sin[:, None]
        halves = first * cos_M1K - second * sin_M1K, second * cos_M1K + first * sin_M1K
        return jnp.concatenate(halves, axis=-1).astype(x_MHK.dtype)

    q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
    return turned(q, q_weight), turned(k, k_weight), v


def _norm_and_rotation(M: int, model: shapes.Model) -> Iterator[Case]:
    H, N, K = model.heads, model.kv_heads, model.head_dim
    heads = dict(num_heads=H, num_kv_heads=N)
    shape = f"{M} x {H + 2 * N} x {K}"

    def make(key):
        qkv_key, q_key, k_key = jax.random.split(key, 3)
        weights = normal(q_key, K, dtype=jnp.float32), normal(k_key, K, dtype=jnp.float32)
        return normal(qkv_key, M, H + 2 * N, K), *weights, *map(jnp.asarray, rotary_table(M, K, 1e6))

    def make_with_gradients(key):
        return tuple(normal(each, M, n, K) for each, n in zip(jax.random.split(key, 3), (H, N, N), strict=True)), *make(key)

    def ours(*inputs):
        return qk_norm_rotary(*inputs, **heads, eps=_EPSILON)

    def plain(*inputs):
        return plain_norm_and_rotation(*inputs, **heads)

    def gradients(function, g, qkv, q_weight, k_weight, cos, sin):
        return _gradients(lambda *weighed: function(*weighed, cos, sin), g, qkv, q_weight, k_weight)

    def plain_gradients(*inputs):
        return gradients(plain, *inputs)

    tables = 2 * 4 * M * K // 2
    common = dict(suite="attention", operands="qkv bf16, angles f32", shape=shape, flops=0, ceiling=COPY)
    yield Case(
        name=f"{model.name}, split, norm and rotation of q and k",
        function=ours,
        make=make,
        nbytes=2 * 2 * M * (H + 2 * N) * K + tables,
        ratios={VS_UNFUSED: Other(f"split, norm and rotation, {shape}", plain, make)},
        **common,
    )
    yield Case(
        name=f"{model.name}, split, norm and rotation, gradients alone",
        function=lambda *inputs: gradients(ours, *inputs),
        make=make_with_gradients,
        nbytes=2 * M * ((H + N) + 2 * (H + 2 * N)) * K + tables,  # v itself is not read
        ratios={VS_UNFUSED: Other(f"split, norm and rotation, gradients, {shape}", plain_gradients, make_with_gradients)},
        **common,
    )


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
