"""Stochastic rounding: unbiased, between neighbours, exact where nothing needs rounding."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4

SHAPE = (4096, 64)


@jax.jit
def _draw(x, key):
    q = nvfp4.quantize(x, nvfp4.ScaleRule.fp8_exact(), key=key)
    scale = jnp.repeat(nvfp4.block_scale_values(q) * q.outer_scale[:, None], 16, axis=1)
    return q.codes, nvfp4.dequantize(q), scale, nvfp4.is_fp8_exact(q)


def draw(x, seed=0):
    """Codes, values, the whole scale of each element: x [M, K] repeated to one shape, so that it compiles once."""
    x = np.tile(x, (SHAPE[0] // x.shape[0], SHAPE[1] // x.shape[1]))
    codes, values, scale, exact = (np.asarray(part) for part in _draw(jnp.asarray(x), jax.random.key(seed)))
    assert exact
    return x, codes, values, scale


def test_unbiased():
    row = np.float32([384, 0.1, -0.7, 3.3, -19.9, 77, 130, 250, -300, 1, 5, 9, -33, 64, 100, 383])
    x, _, y, scale = draw(np.stack([row, row / 3]), seed=5)
    # Draws of the same element: every second row, four to a row.
    x, y, scale = (a.reshape(-1, 2, 4, 16).transpose(0, 2, 1, 3).reshape(-1, 2, 16) for a in (x, y, scale))
    gap = (y.max(axis=0) - y.min(axis=0)).astype(np.float64)
    assert (gap <= 2 * scale[0]).all()  # two neighbours are at most 2 scales apart
    assert (gap > 0).sum() > 16
    # The mean of n draws from two values a gap apart has a standard deviation of at most gap / (2 sqrt(n)): allow six.
    # A probability is a multiple of 2^-16, and where that rounds it to 0 or 1 the mean is off by 2^-17 of 2 scales.
    allowed = 6 * gap / (2 * np.sqrt(len(y))) + 2.0**-16 * scale[0]
    assert (np.abs(y.mean(axis=0, dtype=np.float64) - x[0]) <= allowed).all()


def test_numbers_of_the_format_are_left_alone():
    x, _, y, _ = draw(np.float32([nvfp4.E2M1_VALUES]) * np.float32([[1.0], [2.0**-40], [2.0**70], [3.0]]))
    np.testing.assert_array_equal(y, x)


def test_the_smallest_scale_that_saturates_nothing():
    x, _, _, scale = draw(np.random.default_rng(2).standard_normal((512, 64)).astype(np.float32))
    amax = np.abs(x.reshape(-1, 16)).max(axis=1)
    scale = scale.reshape(-1, 16)[:, 0]
    assert (6 * scale >= amax).all()
    # The next smaller scale in the set is at least 3/4 of it. All blocks here are far above the smallest scale.
    assert (6 * 0.75 * scale < amax).all()


def test_keys_decide():
    x = np.random.default_rng(3).standard_normal((512, 64)).astype(np.float32)
    first, again, other = (draw(x, seed)[1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.2


def test_te_rule_keeps_its_scales(shared):
    rule = nvfp4.ScaleRule.te("row")
    x = np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32)
    nearest, drawn = shared.quantize(x, rule), shared.quantize(x, rule, jax.random.key(0))
    np.testing.assert_array_equal(*(np.asarray(q.block_scale).view(np.uint8) for q in (nearest, drawn)))
    steps = [np.asarray(nvfp4.unpack_codes(q.codes)).astype(int) % 8 for q in (nearest, drawn)]
    assert np.abs(steps[0] - steps[1]).max() == 1
