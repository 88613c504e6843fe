"""The kernels of log-probs and of truncation in Triton's interpreter, against sorting and float64, and compiled for GPUs that
are not here.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.log_prob import Truncation

# The interpreter is slow: a chunk is cut down from 4096 tokens to 64, so that few tokens make more than one.
_CHUNK = 64
_KEPT = {
    "top-k, one chunk": (Truncation(top_k=7), 40),
    "top-p, one chunk": (Truncation(temperature=0.7, top_p=0.8), 40),
    "top-p, the first token alone": (Truncation(top_p=1e-50), 20),
    "both, two chunks, odd": (Truncation(temperature=1.3, top_k=50, top_p=0.95), 101),
}


def _logits(vocab_size):
    """Rows: many equal logits and impossible ones; different ones from tiny to huge; all equal but for signed zeros; NaN."""
    rng = np.random.default_rng(vocab_size)
    x = rng.standard_normal((4, vocab_size)).astype(np.float32) * 3
    x[0] = np.where(np.arange(vocab_size) % 5 == 2, -np.inf, np.round(x[0] * 2) / 2)
    x[1, ::2] *= 10.0 ** -rng.uniform(0, 30, x[1, ::2].shape)
    x[2] = np.where(np.arange(vocab_size) % 3 == 0, 0.0, -0.0)
    x[3, vocab_size // 2] = np.nan
    return x


def _kept(logits, truncation):
    """What sorting keeps, by the words of the convention, in float64."""
    kept = np.isnan(logits)
    for row, keep in zip(logits / np.float32(truncation.temperature), kept, strict=True):
        order = np.argsort(-row.astype(np.float64), kind="stable")[: truncation.top_k or None]
        weight = np.exp(row[order].astype(np.float64) - row[order[0]])
        keep[order[np.cumsum(weight) - weight < truncation.top_p * weight.sum()]] = True
    return kept


def _exact(logits, kept, temperature):
    """Float64 log-probs [M, V], -inf where dropped, and entropies [M]."""
    with np.errstate(all="ignore"):
        z = np.where(kept, logits.astype(np.float64) / temperature, -np.inf)
        z -= z.max(axis=1, keepdims=True)
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
        return z, -np.where(np.exp(z) > 0, np.exp(z) * z, 0 * np.exp(z)).sum(axis=1)


def _interpreted():
    from pallas_kernels import gpu
    from pallas_kernels.log_prob import triton, triton_sampling

    triton_sampling._CHUNK = _CHUNK
    for name, (truncation, vocab_size) in _KEPT.items():
        logits = _logits(vocab_size)
        cut = triton_sampling.cut(logits, truncation, run=gpu.interpret)
        kept = triton_sampling.kept_of_cut(logits, cut, truncation, run=gpu.interpret)
        assert kept[3, vocab_size // 2] == 1  # NaN; what else that row keeps does not matter
        launch = triton_sampling.kept_launch(3, vocab_size, truncation.temperature)
        yield name, launch, (logits[:3], *(x[:3] for x in cut)), [_kept(logits[:3], truncation).astype(np.int8)]

    for truncated in (False, True):
        _check_values(gpu, triton, 163, truncated)


def _check_values(gpu, triton, vocab_size, truncated):
    logits, truncation, rng = _logits(vocab_size), Truncation(temperature=0.7), np.random.default_rng(1)
    kept = np.ones(logits.shape, bool)
    index = np.full(len(logits), vocab_size // 3, np.int32)
    if truncated:
        kept = rng.random(logits.shape) < 0.3
        kept[:, _CHUNK : 2 * _CHUNK] = False  # a chunk of which nothing is left
        kept[2] = np.arange(vocab_size) <= index[2]  # the logits are equal: a cut can say it, with the key of 0
        kept |= np.isnan(logits)
    tokens = np.argmax(kept & np.isfinite(logits) & (rng.random(logits.shape) < 0.5), axis=1).astype(np.int32)
    log_prob, entropy, maximum, log_sum = triton.row_statistics(
        logits, tokens, truncation, kept.astype(np.int8) if truncated else None, run=gpu.interpret
    )
    exact, exact_entropy = _exact(logits, kept, 0.7)
    np.testing.assert_allclose(log_prob, exact[np.arange(4), tokens], rtol=0, atol=2e-6)
    np.testing.assert_allclose(entropy, exact_entropy, rtol=0, atol=4e-6)
    assert np.isnan(log_prob).tolist() == np.isnan(entropy).tolist() == [False] * 3 + [True]
    outside = np.full(4, vocab_size, np.int32)
    assert np.isnan(triton.row_statistics(logits, outside, truncation, None, run=gpu.interpret)[0]).all()

    # The gradient, in slices that overlap: of the row whose kept set is said by a cut, or of all.
    rows = [2] if truncated else [0, 1, 2]
    key = np.zeros(4, np.int32)
    dlog_prob, dentropy = rng.standard_normal((2, len(rows))).astype(np.float32)
    exact, exact_entropy = exact[rows], exact_entropy[rows, None]
    prob = np.exp(exact)
    onehot = np.arange(vocab_size) == tokens[rows, None]
    expected = dlog_prob[:, None] * (onehot - prob)
    expected -= dentropy[:, None] * prob * (np.where(prob > 0, exact, 0) + exact_entropy)
    expected /= 0.7
    width = vocab_size - vocab_size // 3
    saved = [x[rows] for x in (tokens, maximum, log_sum, entropy)]
    actual = np.full_like(expected, np.nan)
    # As the backward goes: the last slice first, then the others over it.
    for dtype, (start, counted_from) in itertools.product((jnp.bfloat16, np.float32), ((vocab_size - width, width), (0, 0))):
        launch = triton.gradient_launch(len(rows), width, dtype, 0.7, truncated=truncated)
        part = logits[rows, start : start + width]
        places = np.int32([start]), np.int32([counted_from])
        (found,) = gpu.interpret(launch, part, *saved, dlog_prob, dentropy, key[rows], index[rows], *places)
        if dtype == jnp.bfloat16:
            counted = max(counted_from - start, 0)
            wanted = expected[:, start + counted : start + width]
            np.testing.assert_allclose(found[:, counted:].astype(np.float32), wanted, rtol=2.0**-8, atol=1e-6)
            continue
        assert (found[:, : max(counted_from - start, 0)] == 0).all()
        actual[:, start : start + width] = found
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


def _compiled():
    from pallas_kernels.log_prob import triton, triton_sampling

    shape = jax.ShapeDtypeStruct
    rows, vocab_size = 64, 151936
    logits, kept = shape((rows, vocab_size), jnp.float32), shape((rows, vocab_size), jnp.int8)
    integers, floats, digits = (shape((rows,), t) for t in (jnp.int32, jnp.float32, jnp.uint32))
    cut, maxima, sums = (integers, integers), shape((rows, 38), jnp.float32), shape((rows, 38, 16), jnp.float32)
    counts, one = shape((rows, 38), jnp.int32), shape((1,), jnp.int32)
    yield "chunks", triton.chunk_launch(rows, vocab_size, 0.7, truncated=True), (logits, kept)
    yield "rows", triton.row_launch(rows, vocab_size, 0.7, truncated=True), (logits, kept, integers, *[maxima] * 3)
    yield (
        "gradient",
        triton.gradient_launch(rows, vocab_size, jnp.bfloat16, 0.7, truncated=True),
        (logits, integers, *[floats] * 5, *cut, one, one),
    )
    settings = dict(limit=0.95, by_mass=True, has_cut=True)
    for number in (0, 1):
        launch = triton_sampling.pass_launch(rows, vocab_size, 0.7, number=number, **settings)
        yield f"pass {number}", launch, (logits, *cut, maxima, sums, digits, floats, floats)
    launch = triton_sampling.cut_launch(rows, vocab_size, 0.7, by_mass=True, has_cut=True)
    yield "divided", triton_sampling.divided_launch(rows, vocab_size, 0.7), (logits,)
    yield "cut", launch, (logits, *cut, maxima, counts, digits, floats, floats)


_COMPILED = ("chunks", "rows", "gradient", "pass 0", "pass 1", "divided", "cut")


@pytest.mark.parametrize("name", _KEPT)
def test_what_is_kept_is_what_sorting_keeps(child, name):
    assert child("interpret")[name] == [0]


@pytest.mark.parametrize("capability", ["90", "103"])
@pytest.mark.parametrize("name", _COMPILED)
def test_compiled_without_atomics(child, name, capability):
    found = child("compile")[name][capability]
    assert found["atomics"] == found["mma"] == 0
    if name.startswith(("chunks", "gradient", "pass 0", "divided")):
        assert found["wide_loads"] > 0


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
