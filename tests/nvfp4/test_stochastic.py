"""Stochastic rounding: unbiased, between neighbours, exact where nothing needs rounding."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4

_round = jax.jit(lambda x, key: nvfp4.quantize(x, nvfp4.ScaleRule.fp8_exact(), key=key))
DRAWS = 4096


def test_unbiased():
    x = np.float32([384.0, 0.1, -0.7, 3.3, -19.9, 77.0, 130.0, 250.0, -300.0, 1.0, 5.0, 9.0, -33.0, 64.0, 100.0, 383.0])
    x = np.stack([x, x / 3])  # a power of two times the scale, and a row whose scale is 1.5 x 2^e
    q = _round(jnp.asarray(np.repeat(x[None], DRAWS, axis=0)), jax.random.key(5))
    assert nvfp4.is_fp8_exact(q)
    y = np.asarray(nvfp4.dequantize(q), np.float64)
    gap = y.max(axis=0) - y.min(axis=0)
    scale = np.asarray(nvfp4.block_scale_values(q) * q.outer_scale[..., None])[0]
    assert (gap <= 2 * scale).all()  # never further than the two neighbours, which are at most 2 scales apart
    # The mean of n draws from two values a gap apart has a standard deviation of at most gap / (2 sqrt(n)): 6 of them.
    assert (np.abs(y.mean(axis=0) - x) <= 6 * gap / (2 * np.sqrt(DRAWS)) + 1e-6).all()
    assert (gap > 0).sum() > 16


def test_numbers_of_the_format_are_left_alone():
    values = np.array(nvfp4.E2M1_VALUES, np.float32)[None] * np.float32([[1.0], [2.0**-40], [2.0**70]])
    q = _round(jnp.asarray(np.repeat(values, 64, axis=0)), jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(nvfp4.dequantize(q)), np.repeat(values, 64, axis=0))


def test_nothing_saturates():
    x = np.random.default_rng(2).standard_normal((256, 64)).astype(np.float32)
    q = _round(jnp.asarray(x), jax.random.key(1))
    amax = np.abs(x.reshape(256, 4, 16)).max(axis=-1)
    scale = np.asarray(nvfp4.block_scale_values(q)) * np.asarray(q.outer_scale)[:, None]
    assert (6 * scale >= amax).all()
    # The smallest such scale: the next smaller one in the set, at most 1.5 and 4/3 times smaller, would not do.
    assert (6 * scale / (4 / 3) < amax)[scale > 2.0**-5 * np.asarray(q.outer_scale)[:, None]].all()


def test_keys_decide():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, 64)).astype(np.float32))
    first, again, other = (np.asarray(_round(x, jax.random.key(k)).codes) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.2


def test_te_rule_keeps_its_scales_and_saturates():
    rule = nvfp4.ScaleRule.te("row")
    x = jnp.asarray(np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32))
    nearest = jax.jit(nvfp4.quantize, static_argnums=1)(x, rule)
    drawn = jax.jit(lambda x, key: nvfp4.quantize(x, rule, key=key))(x, jax.random.key(0))
    np.testing.assert_array_equal(
        np.asarray(drawn.block_scale).view(np.uint8), np.asarray(nearest.block_scale).view(np.uint8)
    )
    steps = nvfp4.unpack_codes(drawn.codes).astype(int) % 8 - nvfp4.unpack_codes(nearest.codes).astype(int) % 8
    assert jnp.abs(steps).max() == 1
