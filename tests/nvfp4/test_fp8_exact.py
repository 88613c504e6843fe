"""The `fp8_exact` rule against a plain float64 search, for rows, matrices and 16x16 tiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import nvfp4

SIX = np.array(nvfp4.FP8_EXACT_SCALES)
FOUR = np.array([*nvfp4.FP8_EXACT_SCALES, *nvfp4.FP8_EXACT_SCALES_UP_TO_4])
VALUES = np.array(nvfp4.E2M1_VALUES[:8])


def tree_sum(x):
    x = x.astype(np.float32).reshape(-1)
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0]


def plain_block(y):
    """Scale and values of one block of numbers that were divided by their outer scale, by searching."""
    candidates = []
    for scales, largest in ((SIX, 6), (FOUR, 4)):
        distance = np.abs(scales - np.abs(y).max() / largest)
        scale = scales[np.flatnonzero(distance == distance.min())[-1]]
        allowed = VALUES[VALUES <= largest]
        steps = np.abs(np.abs(y)[..., None] / scale - allowed)
        # Ties to the even index: of two equal distances prefer it.
        index = np.lexsort((np.broadcast_to(np.arange(len(allowed)) % 2, steps.shape), steps))[..., 0]
        candidates.append((tree_sum(np.abs(np.abs(y) - allowed[index] * scale)), scale, allowed[index] * np.sign(y)))
    return candidates[1][1:] if candidates[1][0] < candidates[0][0] else candidates[0][1:]


def plain_dequantized(x, block):
    """One matrix, one outer scale."""
    outer = 2.0 ** np.ceil(np.log2(np.abs(x).max() / 384))
    y = x.astype(np.float64) / outer
    result = np.zeros_like(y)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], 16):
            part = (slice(i, i + block[0]), slice(j, j + 16))
            scale, values = plain_block(y[part])
            result[part] = values * scale * outer
    return result


# Multiples of 1/8, so that ties occur, all exact in float64.
eighths = st.integers(-4000, 4000).map(lambda i: i / 8)
scales = st.integers(-60, 60).map(lambda e: 2.0**e)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(numbers=st.lists(eighths, min_size=32, max_size=32).filter(any), scale=scales)
def test_rows_against_a_plain_search(shared, numbers, scale):
    x = np.float32(numbers).reshape(1, 32) * np.float32(scale)
    q = shared.quantize(x, nvfp4.ScaleRule.fp8_exact())
    np.testing.assert_array_equal(shared.dequantize(q), plain_dequantized(x, (1, 16)))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_matrices_against_a_plain_search(shared, block):
    rng = np.random.default_rng(0)
    x = np.stack([rng.standard_normal((32, 32)), rng.standard_t(3, (32, 32)) * 1e-7]).astype(np.float32)
    q = shared.quantize(x, nvfp4.ScaleRule.fp8_exact("matrix", block))
    for i in range(2):
        np.testing.assert_array_equal(shared.dequantize(q)[i], plain_dequantized(x[i], block))
    assert nvfp4.is_fp8_exact(q)
    scale = np.asarray(q.block_scale, np.float32)
    if block == (16, 16):
        np.testing.assert_array_equal(scale, np.repeat(scale[:, ::16], 16, axis=1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(numbers=st.lists(eighths, min_size=32, max_size=32), exponent=st.integers(-90, 90))
def test_powers_of_two_pass_through(shared, numbers, exponent):
    x = np.float32(numbers).reshape(1, 32)
    q = shared.quantize(x, nvfp4.ScaleRule.fp8_exact())
    scaled = shared.quantize(x * np.float32(2.0**exponent), nvfp4.ScaleRule.fp8_exact())
    np.testing.assert_array_equal(np.asarray(q.codes), np.asarray(scaled.codes))
    if x.any():
        np.testing.assert_array_equal(np.asarray(scaled.outer_scale), np.asarray(q.outer_scale) * 2.0**exponent)
