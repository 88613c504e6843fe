"""Log-probs, truncation and sampling on a GPU: a row's bits are its own, what is kept is what sorting keeps, and the gradients
are those of the formula.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits, sample_tokens, token_log_prob
from pallas_kernels.matmul import matmul

pytestmark = pytest.mark.gpu

_TRUNCATIONS = {
    "none": Truncation(),
    "greedy": Truncation(temperature=0.0, top_k=3),
    "temperature": Truncation(temperature=0.7),
    "top-k": Truncation(top_k=50),
    "top-p": Truncation(temperature=1.3, top_p=0.9),
    "both": Truncation(temperature=0.8, top_k=50, top_p=0.95),
}
_VOCABULARIES = (40, 1003, 151669, 151936)
_COUNTS = (1, 2, 7, 64, 129)
# One float32 rounding is 2^-24; a chunk's sum is a chain of at most 32 in a thread and 7 between threads, then up to 6 chunks.
_SUM_BOUND = 2.0**-24 * 64


@functools.partial(jax.jit, static_argnums=(1,), static_argnames=("implementation",))
def _kept(logits, truncation, implementation="triton"):
    return kept_tokens(logits, truncation, implementation=implementation)


@functools.partial(jax.jit, static_argnums=2)
def _of_logits(logits, tokens, truncation):
    kept = kept_tokens(logits, truncation, implementation="triton")
    return log_prob_of_logits(logits, tokens, truncation, kept, implementation="triton")


@functools.partial(jax.jit, static_argnums=3)
def _of_hidden(hidden, head, tokens, truncation):
    return token_log_prob(hidden, head, tokens, truncation, implementation="triton")


@functools.partial(jax.jit, static_argnums=2, static_argnames=("implementation",))
def _sample(logits, key_data, truncation, implementation="triton"):
    kept = kept_tokens(logits, truncation, implementation=implementation)
    return sample_tokens(logits, jax.random.wrap_key_data(key_data), truncation, kept, implementation=implementation)


_logits_of = jax.jit(functools.partial(matmul, out_dtype=jnp.float32))


def _key_data(rows, seed=1):
    return jax.random.key_data(jax.random.split(jax.random.key(seed), rows))


def _logits(rows, vocab_size):
    """A third of the rows has many equal logits."""
    x = np.random.default_rng(vocab_size).standard_normal((rows, vocab_size)).astype(np.float32) * 3
    x[::3] = np.round(x[::3] * 4) / 4
    return x


def _operands(rows, width, vocab_size, dtype):
    rng = np.random.default_rng(rows)
    hidden = jnp.asarray(rng.standard_normal((rows, width)), dtype)
    head = jnp.asarray(rng.standard_normal((vocab_size, width), np.float32) * (3 * width**-0.5), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, vocab_size, rows), jnp.int32)


def _same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _divided(logits, truncation):
    return logits if truncation.greedy else logits / np.float32(truncation.temperature)


@pytest.mark.parametrize("vocab_size", _VOCABULARIES)
@pytest.mark.parametrize("name", ("top-k", "top-p", "both"))
def test_what_is_kept_is_what_sorting_keeps(name, vocab_size):
    truncation, logits = _TRUNCATIONS[name], _logits(24, vocab_size)
    kept = _kept(logits, truncation)
    if kept is None:
        assert truncation.keeps_all(vocab_size)
        return
    for row, keep in zip(_divided(logits, truncation), np.asarray(kept), strict=True):
        order = np.argsort(-row, kind="stable")[: truncation.top_k or None]
        weight = np.exp(row[order].astype(np.float64) - row[order[0]])
        before, target = np.cumsum(weight) - weight, truncation.top_p * weight.sum()
        count = int(keep.sum())
        assert keep[order[:count]].all()  # a beginning of the order
        if truncation.top_p == 1.0:
            assert count == truncation.top_k
        else:  # what lies before decides: exactly, but for the rounding of the sums and of their terms
            slack = (_SUM_BOUND + 2.0**-20) * weight.sum()
            assert before[count - 1] < target + slack
            assert count == len(order) or before[count] >= target - slack


@pytest.mark.parametrize("vocab_size", _VOCABULARIES)
@pytest.mark.parametrize("name", _TRUNCATIONS)
def test_values_against_float64(name, vocab_size):
    truncation, logits = _TRUNCATIONS[name], _logits(24, vocab_size)
    kept = _kept(logits, truncation)
    kept = np.ones(logits.shape, bool) if kept is None else np.asarray(kept)
    rng = np.random.default_rng(2)
    tokens = np.argmax(np.where(kept, rng.random(logits.shape), -1), axis=1).astype(np.int32)
    log_prob, entropy = map(np.asarray, _of_logits(logits, tokens, truncation))
    exact = np.where(kept, _divided(logits, truncation).astype(np.float64), -np.inf)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    exact_entropy = -(np.exp(exact) * np.where(kept, exact, 0)).sum(axis=1)
    exact = np.take_along_axis(exact, tokens[:, None], axis=1)[:, 0]
    assert (np.abs(log_prob - exact) <= _SUM_BOUND + 2.0**-23 * np.abs(exact)).all(), np.abs(log_prob - exact).max()
    # Its sum has terms of both sizes: e^shift and shift e^shift.
    assert (np.abs(entropy - exact_entropy) <= 2 * _SUM_BOUND * (1 + exact_entropy)).all(), np.abs(entropy - exact_entropy).max()
    dropped = np.argmin(kept, axis=1).astype(np.int32)
    if not kept.all():
        assert np.isneginf(_of_logits(logits, dropped, truncation)[0]).all()


@pytest.mark.parametrize("name", _TRUNCATIONS)
def test_a_row_has_its_bits_alone_in_a_batch_and_in_the_learners_chunks(name):
    truncation = _TRUNCATIONS[name]
    hidden, head, tokens = _operands(1024, 128, 151936, jnp.bfloat16)
    whole = jax.tree.map(np.asarray, _of_hidden(hidden, head, tokens, truncation))  # in two chunks
    key_data = _key_data(1024)
    drawn = np.asarray(_sample(_logits_of(hidden, head), key_data, truncation))
    for count in (*_COUNTS, 1024):
        for first in {0, 5 % (1025 - count), 1024 - count}:
            part = slice(first, first + count)
            logits = _logits_of(hidden[part], head)
            _same(_of_logits(logits, tokens[part], truncation), jax.tree.map(lambda x, part=part: x[part], whole))
            _same(_sample(logits, key_data[part], truncation), drawn[part])
    assert np.isfinite(_of_logits(_logits_of(hidden, head), drawn, truncation)[0]).all()


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("vocab_size", (1003, 151669))
def test_odd_vocabularies_in_chunks_and_whole(monkeypatch, vocab_size, dtype):
    truncation = _TRUNCATIONS["both"]
    hidden, head, tokens = _operands(300, 64, vocab_size, dtype)
    monkeypatch.setattr("pallas_kernels.log_prob.triton.LOGITS_BYTES", 1)
    in_chunks = jax.jit(lambda *inputs: token_log_prob(*inputs, truncation, implementation="triton"))(hidden, head, tokens)
    _same(in_chunks, _of_logits(_logits_of(hidden, head), tokens, truncation))
    _same(jax.tree.map(lambda x: x[:1], in_chunks), _of_hidden(hidden[:1], head, tokens[:1], truncation))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("vocab_size", (5003, 151669, 151936))
def test_logits_of_a_slice_of_the_head_are_those_of_the_whole(vocab_size, dtype):
    # The backward compares them with a cut that the forward made; the slice may run as another kernel.
    hidden, head, _ = _operands(256, 2048 if dtype == jnp.bfloat16 else 256, vocab_size, dtype)
    whole = np.asarray(_logits_of(hidden, head))
    for start in (0, 1024, vocab_size - 2048):
        _same(_logits_of(hidden, head[start : start + 2048]), whole[:, start : start + 2048])


@pytest.mark.parametrize("name", _TRUNCATIONS)
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("columns", ("whole", "in slices"))
def test_gradients_against_float64(monkeypatch, name, dtype, columns):
    truncation = _TRUNCATIONS[name]
    rows, width, vocab_size = 200, 64, 5003
    hidden, head, tokens = _operands(rows, width, vocab_size, dtype)
    logits = np.asarray(_logits_of(hidden, head))
    kept = _kept(logits, truncation)
    kept = np.ones(logits.shape, bool) if kept is None else np.asarray(kept)
    tokens = jnp.asarray(np.argmax(np.where(kept, np.random.default_rng(1).random(kept.shape), -1), axis=1), jnp.int32)
    g = np.random.default_rng(6).standard_normal((2, rows)).astype(np.float32)
    if columns == "in slices":  # five, of which two overlap
        monkeypatch.setattr("pallas_kernels.log_prob.triton.LOGITS_BYTES", 1)

    @jax.jit
    def run(hidden, master, g):
        op = lambda hidden, master: token_log_prob(  # noqa: E731
            hidden, head, tokens, truncation, head_master=master, implementation="triton"
        )
        return jax.vjp(op, hidden, master)[1]((g[0], g[1]))

    dhidden, dhead = run(hidden, jnp.full(head.shape, jnp.nan, jnp.float32), g)
    assert dhidden.dtype == dtype and dhead.dtype == jnp.float32
    x, w = (np.asarray(each.astype(jnp.float32), np.float64) for each in (hidden, head))
    temperature = truncation.temperature or 1.0
    log_prob = np.where(kept, x @ w.T / temperature, -np.inf)
    log_prob -= log_prob.max(axis=1, keepdims=True)
    log_prob -= np.log(np.exp(log_prob).sum(axis=1, keepdims=True))
    prob, safe = np.exp(log_prob), np.where(kept, log_prob, 0)
    entropy = -(prob * safe).sum(axis=1, keepdims=True)
    onehot = np.arange(vocab_size) == np.asarray(tokens)[:, None]
    dlogits = (g[0][:, None] * (onehot - prob) - g[1][:, None] * prob * (safe + entropy)) / temperature
    # A logit of up to 30 has an absolute error of some 2^-17 (64 products), its probability that relative error, and the terms of
    # a gradient cancel: so the bound is on their sizes before. bfloat16: each gradient is rounded once (2^-8), dhidden once more.
    sizes = (np.abs(g[0][:, None]) * (onehot + prob) + np.abs(g[1][:, None]) * prob * (np.abs(safe) + entropy)) / temperature
    rounding = 1.05 * 2.0**-7 if dtype == jnp.bfloat16 else 0.0
    for actual, a, size, b in ((dhidden, dlogits, sizes, w), (dhead, dlogits.T, sizes.T, x)):
        error = np.abs(np.asarray(actual.astype(jnp.float32), np.float64) - a @ b)
        assert (error <= rounding * (np.abs(a) @ np.abs(b)) + 2.0**-15 * (size @ np.abs(b))).all(), error.max()


def test_twenty_runs_give_one_result_forward_and_backward():
    truncation = _TRUNCATIONS["both"]
    hidden, head, tokens = _operands(1024, 128, 151936, jnp.bfloat16)
    g = np.random.default_rng(3).standard_normal((2, 1024)).astype(np.float32)

    @jax.jit
    def run(hidden, master, g):
        op = lambda hidden, master: token_log_prob(  # noqa: E731
            hidden, head, tokens, truncation, head_master=master, implementation="triton"
        )
        value, pullback = jax.vjp(op, hidden, master)
        return value, *pullback((g[0], g[1]))

    first = [np.asarray(y).tobytes() for y in jax.tree.leaves(run(hidden, head.astype(jnp.float32), g))]
    for _ in range(19):
        assert [np.asarray(y).tobytes() for y in jax.tree.leaves(run(hidden, head.astype(jnp.float32), g))] == first


@pytest.mark.parametrize("name", ("greedy", "temperature", "top-k"))
def test_tokens_are_those_that_the_reference_draws(name):
    logits, key_data = _logits(64, 1003), _key_data(64)
    drawn = [_sample(logits, key_data, _TRUNCATIONS[name], implementation=each) for each in ("triton", "reference")]
    np.testing.assert_array_equal(*drawn)


def test_frequencies_of_100000_draws():
    truncation, draws = Truncation(temperature=2.0, top_k=3, top_p=0.8), 100_000
    logits = np.log(np.float32([0.4, 0.1, 0.3, 0.2]))
    tokens = np.asarray(_sample(np.tile(logits, (draws, 1)), _key_data(draws, 7), truncation))
    expected = np.sqrt([0.4, 0, 0.3, 0.2])
    expected /= expected.sum()
    # Before the third token lies 0.73 of the mass: all three are kept. Five standard deviations of a frequency.
    assert (np.abs(np.bincount(tokens, minlength=4) / draws - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()


def test_greedy_takes_the_lower_of_two():
    logits = np.float32([[0, 5, 5, 1], [9, -1, 9, 9], [-3, -2, -4, -1]])
    np.testing.assert_array_equal(_sample(logits, _key_data(3), _TRUNCATIONS["greedy"]), [1, 0, 3])


@pytest.mark.parametrize("name", _TRUNCATIONS)
def test_a_logit_that_is_not_a_number_shows_in_its_row_alone(name):
    truncation, logits = _TRUNCATIONS[name], _logits(3, 5003)
    tokens = np.argmax(logits, axis=1).astype(np.int32)
    clean = _of_logits(logits, tokens, truncation)
    logits[1, 4500] = np.nan
    for a, b in zip(_of_logits(logits, tokens, truncation), clean, strict=True):
        assert np.isnan(a).tolist() == [False, True, False]
        _same(a[::2], b[::2])


def test_inside_a_while_loop():
    truncation = _TRUNCATIONS["both"]
    logits, key_data = jnp.asarray(_logits(4, 5003)), _key_data(4)

    @jax.jit
    def loop(logits):
        def step(state):
            i, tokens, log_probs = state
            tokens = _sample(logits, key_data + i.astype(jnp.uint32), truncation)
            return i + 1, tokens, log_probs + _of_logits(logits, tokens, truncation)[0]

        return lax.while_loop(lambda state: state[0] < 3, step, (jnp.int32(0), jnp.zeros(4, jnp.int32), jnp.zeros(4)))

    _, tokens, log_probs = loop(logits)
    total = np.zeros(4, np.float32)
    for i in range(3):
        expected = _sample(logits, key_data + np.uint32(i), truncation)
        total = total + np.asarray(_of_logits(logits, expected, truncation)[0])
    _same((tokens, log_probs), (expected, total))


@pytest.mark.parametrize("width", (2048, 4096))
def test_memory(width):
    from pallas_kernels.log_prob import triton  # not at the top: a machine without a GPU may have no Triton

    shape = jax.ShapeDtypeStruct
    rows, vocab_size = 8192, 151936
    hidden, head = shape((rows, width), jnp.bfloat16), shape((vocab_size, width), jnp.bfloat16)
    tokens, master = shape((rows,), jnp.int32), shape((vocab_size, width), jnp.float32)

    def loss(hidden, master, head, tokens):
        log_prob, entropy = token_log_prob(hidden, head, tokens, Truncation(), head_master=master, implementation="triton")
        return jnp.sum(log_prob) + jnp.sum(entropy)

    held = lambda function: jax.jit(function).lower(hidden, master, head, tokens).compile().memory_analysis()  # noqa: E731
    matrix = 4 * vocab_size * width
    assert held(loss).temp_size_in_bytes < 1.5 * triton.LOGITS_BYTES  # [M, V] would be 5 GB
    # Logits, their gradient, slices of the head and of its gradient; the result itself may be counted, and once more as a copy.
    backward = held(jax.grad(loss, argnums=(0, 1)))
    assert backward.temp_size_in_bytes < 3 * triton.LOGITS_BYTES + 2 * matrix, backward
