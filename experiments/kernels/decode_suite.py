"""Decoding: few rows, packed weights that are read and expanded in the kernel, against reading them from memory.

Letters as in `suites`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments.kernels import peers
from experiments.kernels.cases import (
    READ,
    SHARE,
    VS_BF16,
    VS_GROUPED,
    Case,
    Scale,
    activations,
    int32s,
    other_rows,
    other_weights,
    packed,
)  # fmt: skip
from experiments.kernels.peers import Peer
from pallas_kernels import shapes
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.matmul import matmul


def cases(scale: Scale) -> Iterator[Case]:
    """Each batch size's dense and grouped matmuls."""
    for tokens in scale.decode_rows:
        for shape in scale.decode:
            yield _decode_dense(tokens, shape)
        for shape in scale.moe.grouped():
            yield _decode_grouped(tokens, shape)
            if tokens == 64:
                yield _decode_other_scales(tokens, shape)


def _decode_goals(tokens: int, ratio: str) -> dict[str, float]:
    return {ratio: 2.5, SHARE: 0.7} if tokens == 64 else {}  # stated for batch 64


def _decode_dense(M: int, shape: shapes.Dense) -> Case:
    N, K = shape.features, shape.depth
    return Case(
        suite="decode",
        name=f"{shape.model} {shape.name}, batch {M}",
        operands="x in fp8, w packed",
        shape=f"{M} x {N} x {K}",
        function=matmul,
        make=lambda key: (activations(key, M, K), packed(key, N, K)),
        flops=shape.flops(M),
        nbytes=shape.packed_bytes(),
        ceiling=READ,
        ratios={VS_BF16: Peer(peers.CUBLAS_BF16, (M, N, K))},
        goals=_decode_goals(M, VS_BF16),
        native=True,
    )


def _decode_grouped(tokens: int, shape: shapes.Grouped) -> Case:
    N, K, E = shape.features, shape.depth, shape.experts
    sizes = decode_group_sizes(tokens, E, shape.top_k)
    M, hit = sum(sizes), sum(size > 0 for size in sizes)
    return Case(
        suite="decode",
        name=f"{shape.model} {shape.name}, batch {tokens}, {hit} of {E} experts hit",
        operands="x in fp8, w packed",
        shape=f"{M} x {N} x {K}, E = {E}",
        function=grouped_matmul,
        make=lambda key: (activations(key, M, K), packed(key, E, N, K), int32s(sizes)),
        flops=shape.flops(M),
        nbytes=shape.packed_bytes(hit),
        ceiling=READ,
        ratios={VS_GROUPED: Peer(peers.GROUPED_BF16, (sizes, N, K))},
        goals=_decode_goals(tokens, VS_GROUPED),
        native=True,
    )


def _decode_other_scales(tokens: int, shape: shapes.Grouped) -> Case:
    case, M = _decode_grouped(tokens, shape), tokens * shape.top_k
    sizes = decode_group_sizes(tokens, shape.experts, shape.top_k)

    def make(key):
        weights = other_weights(key, shape.experts, shape.features, shape.depth)
        return other_rows(key, M, shape.depth), weights, int32s(sizes)

    name = f"{case.name}, scales that fp8 cannot hold"
    return dataclasses.replace(case, name=name, operands="x and w packed, TE's scales", make=make, goals={})


def decode_group_sizes(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[int, ...]:
    """Rows of each expert where every token chooses `top_k` different ones at random."""
    rng = np.random.default_rng(seed)
    chosen = np.concatenate([rng.choice(experts, top_k, replace=False) for _ in range(tokens)])
    return tuple(int(count) for count in np.bincount(chosen, minlength=experts))
