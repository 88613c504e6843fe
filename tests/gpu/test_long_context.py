"""32,768 tokens on a GPU: a long row's bits are a short row's, by pass, by page and packed; nothing is of size T x T."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import assert_same, same

import minite_jax as mt
from minite_jax.model import qwen3_30b_a3b
from pallas_kernels.attention import attention, key_block, paged_attention

pytestmark = pytest.mark.gpu

LENGTH, H, N, K = 32_768, 32, 4, 128  # of Qwen3-30B-A3B
PLACES = (0, 2047, 2048, 4499, 20_000, 32_703, 32_767)  # ends and beginnings of chunks of 2,048 keys among them


@functools.cache
def _inputs():
    """q, k, v, g: queries of norm 2 sqrt(K), so that maxima rise and weights spread."""
    rng = np.random.default_rng(0)
    shapes = ((H, 2.0), (N, 1.0), (N, 1.0), (H, 1.0))
    return tuple(jnp.asarray(rng.standard_normal((1, LENGTH, n, K), np.float32) * scale, jnp.bfloat16) for n, scale in shapes)


def _positions(length=LENGTH):
    return jnp.arange(length, dtype=jnp.int32)[None]


@functools.cache
def _program(implementation, length=LENGTH):
    """Compiled: of q, k, v, positions, g the output and the gradients."""

    def run(q, k, v, positions, g):
        out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, positions, implementation=implementation), q, k, v)
        return out, *pullback(g)

    q, k, v, g = (x[:, :length] for x in _inputs())
    return jax.jit(run).lower(q, k, v, _positions(length), g).compile()


@functools.cache
def _whole():
    q, k, v, g = _inputs()
    return tuple(map(np.asarray, _program(None)(q, k, v, _positions(), g)))


def test_near_the_softmax_in_float64():
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64)[0] for x in _inputs()[:3])
    rows = np.asarray(PLACES)
    score = np.einsum("tngk,snk->ngts", q[rows].reshape(-1, N, H // N, K), k) * K**-0.5
    score = np.where(np.arange(LENGTH)[None, :] <= rows[:, None], score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    exact, size = (np.einsum("ngts,snk->tngk", weight, x).reshape(-1, H, K) for x in (v, np.abs(v)))
    # Weights and outputs are rounded, 2^-8 each.
    assert (np.abs(_whole()[0][0, rows].astype(np.float64) - exact) / size).max() <= 1.05 * 2.0**-7


def test_the_bits_are_the_triton_kernels():
    q, k, v, g = _inputs()
    for got, want in zip(_whole(), _program("triton")(q, k, v, _positions(), g), strict=True):
        assert_same(got, want)


def test_a_shorter_pass_gives_the_first_rows():
    length = 4500
    q, k, v, g = (x[:, :length] for x in _inputs())
    out, *_ = _program(None, length)(q, k, v, _positions(length), g)
    assert_same(out, _whole()[0][:, :length])


def test_packed_sequences_are_as_if_alone():
    """28,160 tokens and behind them 4,500: the output and all gradients of the second are those of the sequence alone."""
    first, length = 28_160, 4500
    second = slice(first, first + length)
    positions = jnp.concatenate([_positions(first), _positions(LENGTH - first)], axis=1)
    q, k, v, g = _inputs()
    g = g.at[:, first + length :].set(0)
    alone = _program(None, length)(*(x[:, second] for x in (q, k, v)), _positions(length), g[:, second])
    for packed, want in zip(_program(None)(q, k, v, positions, g), alone, strict=True):
        assert_same(packed[:, second], want)


def test_a_token_over_pages_is_the_row_of_the_pass():
    q, k, v, _ = _inputs()
    size, rows = key_block(), np.asarray(PLACES)
    order = np.random.default_rng(1).permutation(LENGTH // size)
    pages = [jnp.zeros((LENGTH // size, size, N, K), x.dtype).at[order].set(x.reshape(-1, size, N, K)) for x in (k, v)]
    tables = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (len(rows), len(order)))
    out = paged_attention(q[0, rows][:, None], *pages, tables, jnp.asarray(rows, jnp.int32)[:, None])
    assert_same(out[:, 0], _whole()[0][0, rows])


def test_nothing_is_of_size_t_x_t():
    """XLA plans four times as much for four times the length; [T, T] bfloat16 of one head would be 2 GiB."""
    long, short = (_program(None, length).memory_analysis().temp_size_in_bytes for length in (LENGTH, LENGTH // 4))
    assert long < 1.1 * 4 * short + 2**20
    assert long < 2**30


def test_a_model_with_a_prompt_of_32k():
    """Two layers of Qwen3-30B-A3B: prompts of 32,700 and 20,001 tokens in chunks, two samples of each, and the learner's pass."""
    config = qwen3_30b_a3b(num_hidden_layers=2)
    policy = mt.prepare(mt.init_params(config, jax.random.key(1)), config, mt.recipe("nvfp4"))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in (32_700, 20_001)]
    params = mt.SamplingParams(n=2, max_tokens=64)
    rollouts = mt.sample(policy, prompts, params, key=jax.random.key(0), prefill_chunk=8192)
    tokens, mask, log_probs = (np.asarray(x) for x in rollouts.sequences())
    assert tokens.shape[1] > LENGTH - 8 and mask.sum() == 4 * 64 and np.isfinite(log_probs[mask]).all()
    scored = np.concatenate([np.asarray(mt.token_log_probs(policy, jnp.asarray(tokens[row : row + 1]))) for row in range(4)])
    assert same(scored[mask], log_probs[mask])
