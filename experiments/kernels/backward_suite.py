"""The two matmuls of a gradient, dense and grouped: for the inputs (dgrad) and for the weights (wgrad).

Letters as in `suites`.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from experiments.kernels import peers
from experiments.kernels.cases import BF16, VS_BF16, VS_GROUPED, Case, Scale, activations, int32s, normal, packed
from experiments.kernels.peers import Peer
from pallas_kernels import shapes
from pallas_kernels.grouped_matmul import grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.matmul import matmul_dgrad, matmul_wgrad


def cases(scale: Scale) -> Iterator[Case]:
    """Dense matmuls, then the experts'."""
    for shape in scale.backward:
        yield from _backward_dense(scale.rows, shape)
    for shape in scale.moe.grouped():
        yield from _backward_grouped(scale.tokens * shape.top_k, shape)


def _backward_dense(M: int, shape: shapes.Dense) -> Iterator[Case]:
    N, K, name = shape.features, shape.depth, f"{shape.model} {shape.name}"
    common = dict(suite="backward", shape=f"{M} x {N} x {K}", flops=shape.flops(M), ceiling=BF16)
    yield Case(
        name=f"{name} dgrad, w expanded here",
        operands="g bf16, w packed",
        function=_dgrad,
        make=lambda key: (normal(key, M, N), packed(key, N, K)),
        nbytes=2 * M * N + N * K * 9 / 16 + 2 * M * K,
        ratios={VS_BF16: Peer(peers.CUBLAS_DGRAD, (M, N, K))},
        **common,
    )
    yield Case(
        name=f"{name} wgrad, x dequantised here",
        operands="x in fp8, g bf16",
        function=matmul_wgrad,
        make=lambda key: (activations(key, M, K), normal(key, M, N)),
        nbytes=2 * M * N + M * K + 4 * N * K,
        ratios={VS_BF16: Peer(peers.CUBLAS_WGRAD, (M, N, K))},
        **common,
    )


def _backward_grouped(M: int, shape: shapes.Grouped) -> Iterator[Case]:
    N, K, E, name = shape.features, shape.depth, shape.experts, f"{shape.model} {shape.name}"
    sizes = shapes.group_sizes(M, E, "equal")
    common = dict(suite="backward", shape=f"{M} x {N} x {K}, E = {E}", flops=shape.flops(M), ceiling=BF16)
    dgrad = dict(function=_grouped_dgrad, ratios={VS_GROUPED: Peer(peers.GROUPED_DGRAD, (sizes, N, K))}, **common)
    wgrad = dict(function=grouped_matmul_wgrad, ratios={VS_GROUPED: Peer(peers.GROUPED_WGRAD, (sizes, N, K))}, **common)
    yield Case(
        name=f"{name} dgrad, w expanded here",
        operands="g bf16, w packed",
        make=lambda key: (normal(key, M, N), packed(key, E, N, K), int32s(sizes)),
        nbytes=2 * M * N + E * N * K * 9 / 16 + 2 * M * K,
        **dgrad,
    )
    yield Case(
        name=f"{name} dgrad, bf16 recipe",
        operands="g and w bf16",
        make=lambda key: (normal(key, M, N), normal(key, E, N, K), int32s(sizes)),
        nbytes=2 * M * N + 2 * E * N * K + 2 * M * K,
        **dgrad,
    )
    yield Case(
        name=f"{name} wgrad, x dequantised here",
        operands="x in fp8, g bf16",
        make=lambda key: (activations(key, M, K), normal(key, M, N), int32s(sizes)),
        nbytes=2 * M * N + M * K + 4 * E * N * K,
        **wgrad,
    )
    yield Case(
        name=f"{name} wgrad, bf16 recipe",
        operands="x and g bf16",
        make=lambda key: (normal(key, M, K), normal(key, M, N), int32s(sizes)),
        nbytes=2 * M * N + 2 * M * K + 4 * E * N * K,
        **wgrad,
    )


def _dgrad(g, w):
    return matmul_dgrad(g, w, out_dtype=jnp.bfloat16)


def _grouped_dgrad(g, w, group_sizes):
    return grouped_matmul_dgrad(g, w, group_sizes, out_dtype=jnp.bfloat16)
