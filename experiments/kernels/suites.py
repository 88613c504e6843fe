"""The cases of the kernel benchmark. Here: dense, grouped, the expert MLP and quantising; modules of their own have decoding,
gradients of matmuls, attention, and log-probs with sampling and the router.

Let M be rows, N output features, K the summed axis, E experts, k experts per token, T tokens, D the model's width, F an expert's
inner width.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from experiments.kernels import attention_suite, backward_suite, decode_suite, log_prob_suite, peers
from experiments.kernels.cases import (
    BF16,
    COPY,
    FP8,
    ROW_RULE,
    SHARE,
    VS_BF16,
    VS_FP8,
    VS_GROUPED,
    VS_GROUPED_FP8,
    VS_RAGGED,
    VS_UNFUSED,
    Case,
    Other,
    Scale,
    activations,
    expanded,
    int32s,
    normal,
    other_rows,
    other_weights,
    packed,
    unfused_quantize_dequantize,
)
from experiments.kernels.peers import Peer
from pallas_kernels import nvfp4, rms_norm, shapes, silu_mul
from pallas_kernels.combine import combine
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.matmul import matmul

_EPSILON = 1e-6


def cases(scale: Scale, only: tuple[str, ...]) -> Iterator[Case]:
    """The cases of the suites asked for, in order."""
    for suite in only:
        yield from SUITES[suite](scale)


def _unfused(M: int, K: int) -> Other:
    return Other(f"unfused jnp {M} x {K}", unfused_quantize_dequantize, lambda key: (normal(key, M, K),))


def _unfused_matmul(M: int, N: int, K: int) -> Other:
    def run(x, w):
        return unfused_quantize_dequantize(x) @ w.T

    return Other(f"unfused jnp + XLA dot {M} x {N} x {K}", run, lambda key: (normal(key, M, K), normal(key, N, K)))


def _ragged_dot(sizes: tuple[int, ...], N: int, K: int) -> Other:
    M, E = sum(sizes), len(sizes)

    # The weights as ragged_dot wants them, [E, K, N], so that no transposition is timed. A call takes 70 ms on an H200.
    def make(key):
        return normal(key, M, K), normal(key, E, K, N), int32s(sizes)

    return Other(f"jax.lax.ragged_dot {M} x {N} x {K}", lax.ragged_dot, make, repeats=3, calls=1)


def _dense(scale: Scale) -> Iterator[Case]:
    return itertools.chain.from_iterable(_dense_of(scale.rows, shape, goal) for shape, goal in scale.dense)


def _dense_of(M: int, shape: shapes.Dense, goal: float) -> Iterator[Case]:
    N, K, name = shape.features, shape.depth, f"{shape.model} {shape.name}"
    out = 2 * M * N
    against = {
        VS_BF16: Peer(peers.CUBLAS_BF16, (M, N, K)),
        VS_FP8: Peer(peers.CUBLAS_FP8, (M, N, K)),
    }
    if shape.name == "qkv":  # once for each model: XLA tries out many ways to multiply, which takes long
        against[VS_UNFUSED] = _unfused_matmul(M, N, K)
    fp8 = dict(suite="dense", shape=f"{M} x {N} x {K}", flops=shape.flops(M), ceiling=FP8, ratios=against, native=True)
    yield Case(
        name=name,
        operands="x and w in fp8",
        function=matmul,
        make=lambda key: (activations(key, M, K), expanded(key, N, K)),
        nbytes=M * K + N * K + out,
        **fp8,
    )
    yield Case(
        name=f"{name}, x quantised",
        operands="x bf16, w in fp8",
        function=lambda x, w: matmul(nvfp4.quantize_operand(x, ROW_RULE), w),
        make=lambda key: (normal(key, M, K), expanded(key, N, K)),
        nbytes=2 * M * K + N * K + out,
        goals={VS_BF16: goal},
        **fp8,
    )
    yield Case(
        name=f"{name}, x quantised, w expanded",
        operands="x bf16, w packed",
        function=lambda x, w: matmul(nvfp4.quantize_operand(x, ROW_RULE), w),
        make=lambda key: (normal(key, M, K), packed(key, N, K)),
        nbytes=2 * M * K + shape.packed_bytes() + out,
        **fp8,
    )
    yield Case(
        suite="dense",
        name=f"{name}, bf16 recipe",
        operands="x and w bf16",
        shape=f"{M} x {N} x {K}",
        function=matmul,
        make=lambda key: (normal(key, M, K), normal(key, N, K)),
        flops=shape.flops(M),
        nbytes=2 * M * K + 2 * N * K + out,
        ceiling=BF16,
        ratios={VS_BF16: against[VS_BF16]},
        goals={VS_BF16: 0.95},
    )
    if shape.name == "qkv":
        yield Case(
            suite="dense",
            name=f"{name}, scales that fp8 cannot hold",
            operands="x and w packed, TE's scales",
            shape=f"{M} x {N} x {K}",
            function=matmul,
            make=lambda key: (other_rows(key, M, K), other_weights(key, N, K)),
            flops=shape.flops(M),
            nbytes=M * K * shapes.PACKED_BYTES + shape.packed_bytes() + out,
            ceiling=BF16,
            ratios={VS_BF16: against[VS_BF16]},
            native=True,
        )


def _grouped(scale: Scale) -> Iterator[Case]:
    for shape, kind in itertools.product(scale.moe.grouped(), ("equal", "skewed")):
        yield from _grouped_of(scale.tokens * shape.top_k, shape, kind)


def _grouped_of(M: int, shape: shapes.Grouped, kind: str) -> Iterator[Case]:
    N, K, E = shape.features, shape.depth, shape.experts
    sizes = shapes.group_sizes(M, E, kind)
    hit = sum(size > 0 for size in sizes)
    name, words = f"{shape.model} {shape.name}, {kind} groups", f"{M} x {N} x {K}, E = {E}"
    against = {VS_GROUPED: Peer(peers.GROUPED_BF16, (sizes, N, K))}
    goals = {VS_GROUPED: 1.6, VS_RAGGED: 50.0} if kind == "equal" else {VS_GROUPED: 1.6}
    ragged = {VS_RAGGED: _ragged_dot(sizes, N, K)} if kind == "equal" else {}
    yield Case(
        suite="grouped",
        name=name,
        operands="x and w in fp8",
        shape=words,
        function=grouped_matmul,
        make=lambda key: (activations(key, M, K), expanded(key, E, N, K), int32s(sizes)),
        flops=shape.flops(M),
        nbytes=M * K + hit * N * K + 2 * M * N,
        ceiling=FP8,
        ratios={**against, VS_GROUPED_FP8: Peer(peers.GROUPED_FP8, (sizes, N, K)), **ragged},
        goals=goals,
        native=True,
    )
    yield Case(
        suite="grouped",
        name=f"{name}, bf16 recipe",
        operands="x and w bf16",
        shape=words,
        function=grouped_matmul,
        make=lambda key: (normal(key, M, K), normal(key, E, N, K), int32s(sizes)),
        flops=shape.flops(M),
        nbytes=2 * (M * K + hit * N * K + M * N),
        ceiling=BF16,
        ratios=against,
        goals={VS_GROUPED: 0.95},
    )
    if kind == "equal":
        yield Case(
            suite="grouped",
            name=f"{name}, scales that fp8 cannot hold",
            operands="x and w packed, TE's scales",
            shape=words,
            function=grouped_matmul,
            make=lambda key: (other_rows(key, M, K), other_weights(key, E, N, K), int32s(sizes)),
            flops=shape.flops(M),
            nbytes=M * K * shapes.PACKED_BYTES + shape.packed_bytes(hit) + 2 * M * N,
            ceiling=BF16,
            ratios=against,
            native=True,
        )


def _expert_mlp(scale: Scale) -> Iterator[Case]:
    model, T = scale.moe, scale.tokens
    gate_up, down = model.grouped()
    k, D, F, E, M = model.top_k, model.hidden, model.inner, model.experts, T * model.top_k
    sizes = shapes.group_sizes(M, E, "equal")

    @jax.jit
    def routing(key):
        slot = jax.random.permutation(key, M).astype(jnp.int32)
        weights = jax.nn.softmax(jax.random.normal(key, (T, k), jnp.float32))
        return (jnp.argsort(slot) // k).astype(jnp.int32), slot.reshape(T, k), weights, int32s(sizes)

    def in_fp8(x, w_in, w_out, token, slot, weights, group_sizes):
        gate_up = grouped_matmul(nvfp4.quantize_operand(x, ROW_RULE), w_in, group_sizes, rows=token)
        return combine(grouped_matmul(silu_mul.silu_mul_quantize(gate_up, ROW_RULE), w_out, group_sizes), weights, slot)

    def in_bf16(x, w_in, w_out, token, slot, weights, group_sizes):
        inner = silu_mul.silu_mul(grouped_matmul(x, w_in, group_sizes, rows=token))
        return combine(grouped_matmul(inner, w_out, group_sizes), weights, slot)

    common = dict(
        suite="expert_mlp",
        shape=f"{T} tokens x {k} = {M} rows, E = {E}, D = {D}, F = {F}",
        flops=gate_up.flops(M) + down.flops(M),
        ratios={VS_GROUPED: Peer(peers.EXPERT_MLP, (T, k, sizes, D, F))},
    )
    # Bytes: each step reads its inputs once and writes its output once.
    yield Case(
        name=f"{model.name}: quantise, gather, gate and up, SwiGLU + quantise, down, combine",
        operands="x bf16, w in fp8",
        function=in_fp8,
        make=lambda key: (normal(key, T, D), expanded(key, E, 2 * F, D), expanded(key, E, D, F), *routing(key)),
        nbytes=3 * E * F * D + 6 * T * D + 10 * M * D + 10 * M * F,
        ceiling=FP8,
        goals={VS_GROUPED: 1.5},
        native=True,
        **common,
    )
    yield Case(
        name=f"{model.name}: the same, bf16 recipe",
        operands="x and w bf16",
        function=in_bf16,
        make=lambda key: (normal(key, T, D), normal(key, E, 2 * F, D), normal(key, E, D, F), *routing(key)),
        nbytes=6 * E * F * D + 4 * T * D + 12 * M * D + 12 * M * F,
        ceiling=BF16,
        **common,
    )


def _quantize(scale: Scale) -> Iterator[Case]:
    model, T = scale.moe, scale.tokens
    M, D, F, k, E = T * model.top_k, model.hidden, model.inner, model.top_k, model.experts

    def rows_case(name, shape, bytes_per_number, function, make, *, goal=0.8, unfused=False):
        return Case(
            suite="quantize",
            name=name,
            operands="bf16 in",
            shape=f"{shape[0]} x {shape[1]}",
            function=function,
            make=make,
            flops=0,
            nbytes=shape[0] * shape[1] * bytes_per_number,
            ceiling=COPY,
            ratios={VS_UNFUSED: _unfused(*shape)} if unfused else {},
            goals={SHARE: goal} if goal else {},
        )

    def to_fp8(x):
        return nvfp4.quantize_expanded(x, ROW_RULE)

    def gated_to_fp8(x):
        return silu_mul.silu_mul_quantize(x, ROW_RULE)

    def norm_inputs(key):
        return normal(key, M, D), normal(key, D, dtype=jnp.float32)

    def stream(key):  # a block's addition to the residual stream, whose rows are tokens
        x, y = jax.random.split(key)
        return normal(x, T, D), normal(y, T, D), normal(key, D, dtype=jnp.float32)

    def add_norm(x, y, w):
        return rms_norm.add_rms_norm(x, y, w, eps=_EPSILON)

    def add_norm_quantize(keep):
        return lambda x, y, w: rms_norm.add_rms_norm_quantize(x, y, w, ROW_RULE, eps=_EPSILON, keep=keep)

    def gate_up(key):
        return (normal(key, M, 2 * F),)

    yield rows_case("quantise to fp8 values", (M, D), 2 + 1, to_fp8, lambda key: (normal(key, M, D),), unfused=True)
    yield rows_case("quantise to fp8 values", (M, F), 2 + 1, to_fp8, lambda key: (normal(key, M, F),), unfused=True)
    yield rows_case(
        "quantise, packed",
        (M, D),
        2 + shapes.PACKED_BYTES,
        lambda x: nvfp4.quantize(x, ROW_RULE),
        lambda key: (normal(key, M, D),),
    )
    yield rows_case(
        "RMS norm + quantise", (M, D), 2 + 1, lambda x, w: rms_norm.rms_norm_quantize(x, w, ROW_RULE, eps=_EPSILON), norm_inputs
    )
    # Before attention, and before experts, whose router reads the norm itself.
    yield rows_case("add + RMS norm + quantise", (T, D), 4 + 2 + 1, add_norm_quantize(keep=False), stream, goal=None)
    yield rows_case("add + RMS norm, kept, + quantise", (T, D), 4 + 4 + 1, add_norm_quantize(keep=True), stream, goal=None)
    yield rows_case("add + RMS norm", (T, D), 4 + 4, add_norm, stream, goal=None)
    yield rows_case("silu(gate) x up + quantise", (M, F), 4 + 1, gated_to_fp8, gate_up)
    if scale.wide is not None:
        wide = scale.wide.inner
        yield rows_case(
            "silu(gate) x up + quantise",
            (scale.rows, wide),
            4 + 1,
            gated_to_fp8,
            lambda key: (normal(key, scale.rows, 2 * wide),),
        )
    yield rows_case(
        "expand the experts' gate and up to fp8 values",
        (2 * E * F, D),
        shapes.PACKED_BYTES + 1,
        lambda w: nvfp4.expand(w, jnp.float8_e4m3fn),
        lambda key: (packed(key, E, 2 * F, D),),
        goal=None,
    )
    yield rows_case("RMS norm", (M, D), 2 + 2, lambda x, w: rms_norm.rms_norm(x, w, eps=_EPSILON), norm_inputs, goal=None)
    yield rows_case("silu(gate) x up", (M, F), 4 + 2, silu_mul.silu_mul, gate_up, goal=None)
    yield rows_case(
        "combine in rank order",
        (T, D),
        2 * k + 2,
        combine,
        lambda key: (normal(key, T, k, D), jax.nn.softmax(jax.random.normal(key, (T, k), jnp.float32))),
        goal=None,
    )


SUITES = {
    "dense": _dense,
    "grouped": _grouped,
    "expert_mlp": _expert_mlp,
    "decode": decode_suite.cases,
    "quantize": _quantize,
    "backward": backward_suite.cases,
    "attention": attention_suite.cases,
    "log_prob": log_prob_suite.cases,
}
