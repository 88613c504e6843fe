"""The cases of what stands between a model's last hidden state and a token: the head's matmul, log-probs, truncation and
sampling; and the router, which is the same kind of operation over experts.

Let M be rows, V the vocabulary, D the model's width, E experts, k experts per token.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from experiments.kernels import peers
from experiments.kernels.cases import BF16, READ, VS_BF16, VS_UNFUSED, Case, Other, Scale, normal
from experiments.kernels.peers import Peer
from pallas_kernels import shapes
from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits, sample_tokens, token_log_prob
from pallas_kernels.matmul import matmul
from pallas_kernels.router import router

_TEMPERATURE = Truncation(temperature=0.8)
_TRUNCATION = Truncation(temperature=0.8, top_k=50, top_p=0.95)


def cases(scale: Scale) -> Iterator[Case]:
    """Log-probs of the learner's rows for each model, then the sampler's rows, then the head's matmul alone, then the router."""
    models = [model for model in (scale.moe, scale.wide) if model is not None]
    for model in models:
        yield from _log_probs(scale.rows, model)
    yield from _sampling(scale.decode_rows[-1], scale.moe.vocabulary)
    for model in models:
        for rows in dict.fromkeys((scale.decode_rows[-1], scale.rows)):
            yield _head(rows, model.projection("lm_head"))
    for rows in scale.router_rows:
        yield _router(rows, scale.moe)


def plain_log_prob(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies from one [M, V] matrix of logits, as libraries without a kernel write it."""
    logits = lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    return jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0], entropy


def _log_probs(M: int, model: shapes.Model) -> Iterator[Case]:
    V, D = model.vocabulary, model.hidden
    shape, flops = f"{M} x {V} x {D}", 2 * M * V * D

    def make(key):
        hidden, head, tokens = jax.random.split(key, 3)
        return normal(hidden, M, D), normal(head, V, D, scale=0.02), jax.random.randint(tokens, (M,), 0, V)

    def make_with_gradients(key):
        return *make(key), normal(key, 2, M, dtype=jnp.float32)

    def forward(hidden, head, tokens):
        return token_log_prob(hidden, head, tokens, Truncation())

    def both_ways(hidden, head, tokens, g):
        def op(hidden, master):
            return token_log_prob(hidden, head, tokens, Truncation(), head_master=master)

        value, pullback = jax.vjp(op, hidden, jnp.zeros(head.shape, jnp.float32))  # the master's values are not read
        return value, pullback((g[0], g[1]))

    def plain_both_ways(hidden, head, tokens, g):
        value, pullback = jax.vjp(lambda hidden, head: plain_log_prob(hidden, head, tokens), hidden, head)
        return value, pullback((g[0], g[1]))

    plain = dict(repeats=5, calls=1)
    yield Case(
        suite="log_prob",
        name=f"{model.name} log-probs",
        operands="hidden and head bf16",
        shape=shape,
        function=forward,
        make=make,
        flops=flops,
        nbytes=2 * M * D + 2 * V * D,
        ceiling=BF16,
        ratios={VS_UNFUSED: Other(f"log_softmax of all logits, {shape}", plain_log_prob, make, **plain)},
        held=True,
    )
    yield Case(
        suite="log_prob",
        name=f"{model.name} log-probs and gradients",
        operands="hidden and head bf16",
        shape=shape,
        function=both_ways,
        make=make_with_gradients,
        flops=4 * flops,  # logits are computed twice
        nbytes=2 * (2 * M * D + 2 * V * D) + 4 * V * D,
        ceiling=BF16,
        ratios={
            VS_UNFUSED: Other(f"log_softmax of all logits and gradients, {shape}", plain_both_ways, make_with_gradients, **plain)
        },
        held=True,
    )


def _draw(truncation: Truncation, logits: jax.Array, key_data: jax.Array) -> tuple[jax.Array, jax.Array]:
    kept = kept_tokens(logits, truncation)
    tokens = sample_tokens(logits, jax.random.wrap_key_data(key_data), truncation, kept)
    return tokens, log_prob_of_logits(logits, tokens, truncation, kept)[0]


def plain_draw(truncation: Truncation, logits: jax.Array, key_data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same in jnp. What truncates sorts: the smallest logit that is kept, then a draw from those that are not smaller."""
    logits = logits / truncation.temperature
    if not truncation.keeps_all(logits.shape[1]):
        falling = -jnp.sort(-logits, axis=-1)
        falling = jnp.where(jnp.arange(falling.shape[1])[None, :] < truncation.top_k, falling, -jnp.inf)
        probs = jax.nn.softmax(falling, axis=-1)
        is_kept = jnp.cumsum(probs, axis=-1) - probs < truncation.top_p
        smallest = jnp.min(jnp.where(is_kept, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    tokens = jax.vmap(jax.random.categorical)(jax.random.wrap_key_data(key_data), logits)
    return tokens, jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=-1)[:, 0]


def _sampling(M: int, V: int) -> Iterator[Case]:
    def make(key):
        return normal(key, M, V, scale=3.0, dtype=jnp.float32), jax.random.key_data(jax.random.split(key, M))

    for truncation, words in (
        (_TEMPERATURE, "sampling by temperature alone"),
        (_TRUNCATION, f"sampling, top-k {_TRUNCATION.top_k} and top-p {_TRUNCATION.top_p}"),
    ):
        plain = Other(f"{words}, in jnp, {M} x {V}", functools.partial(plain_draw, truncation), make)
        yield Case(
            suite="log_prob",
            name=f"{words}, and log-probs",
            operands="logits f32",
            shape=f"{M} x {V}",
            function=functools.partial(_draw, truncation),
            make=make,
            flops=0,
            nbytes=4 * M * V,
            ceiling=READ,
            ratios={VS_UNFUSED: plain},
            held=True,
        )


def _head(M: int, shape: shapes.Dense) -> Case:
    V, D = shape.features, shape.depth
    return Case(
        suite="log_prob",
        name=f"{shape.model} {shape.name}, {M} rows",
        operands="hidden and head bf16, logits f32",
        shape=f"{M} x {V} x {D}",
        function=lambda hidden, head: matmul(hidden, head, out_dtype=jnp.float32),
        make=lambda key: (normal(key, M, D), normal(key, V, D, scale=0.02)),
        flops=shape.flops(M),
        nbytes=2 * M * D + 2 * V * D + 4 * M * V,
        ceiling=BF16,
        ratios={VS_BF16: Peer(peers.CUBLAS_BF16, (M, V, D))},
    )


def plain_router(x: jax.Array, weight: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts, the k largest, their weights divided by their sum."""
    logits = jnp.matmul(x.astype(jnp.float32), weight.T, precision=lax.Precision.HIGHEST)
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    return weights / jnp.sum(weights, axis=-1, keepdims=True), experts


def _router(M: int, model: shapes.Model) -> Case:
    E, D, k = model.experts, model.hidden, model.top_k

    def make(key):
        return normal(key, M, D), normal(key, E, D, scale=D**-0.5, dtype=jnp.float32)

    return Case(
        suite="log_prob",
        name=f"{model.name} router, {M} tokens",
        operands="x bf16, weight f32, product f32",
        shape=f"{M} x {E} x {D}, k = {k}",
        function=lambda x, weight: router(x, weight, top_k=k, normalize=True),
        make=make,
        flops=2 * M * E * D,
        nbytes=2 * M * D + 4 * E * D + 8 * M * k,
        ceiling=READ,  # no ceiling for float32 products is measured: the share is of the memory's speed
        ratios={VS_UNFUSED: Other(f"softmax and top_k, {M} x {E} x {D}", lambda x, weight: plain_router(x, weight, k), make)},
    )
