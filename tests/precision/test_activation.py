"""A norm that is rounded to a matmul's format: its gradient is that of the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.precision.activation import normed
from minite_jax.precision.recipe import MLP
from pallas_kernels.rms_norm import add_rms_norm

_EPS = 1e-6


@pytest.mark.parametrize(("adds", "keep"), [(True, False), (False, True)])
def test_the_gradient_goes_straight_through_the_rounding(adds, keep):
    rng = np.random.default_rng(0)
    x, y, g_sum, g_normed = (jnp.asarray(rng.standard_normal((5, 32)), jnp.float32) for _ in range(4))
    y = y if adds else None
    weight = jnp.linspace(0.5, 2, 32)
    format = mt.recipe("nvfp4").format_of(MLP, 1, 3)
    assert format.quantized

    def quantised(x, y, weight):
        total, rows = normed(format, x, y, weight, eps=_EPS, keep=keep)
        return (total, rows.carrier), rows.quantized

    def gradients(op, **kwargs):
        def run(x, y, weight, *gradients):
            results, pullback, *rest = jax.vjp(op, x, y, weight, **kwargs)
            return results, pullback(gradients), rest

        return jax.jit(run)(x, y, weight, g_sum, g_normed)

    (total, carrier), actual, (quantized,) = gradients(quantised, has_aux=True)
    (plain_total, plain), expected, _ = gradients(lambda *inputs: add_rms_norm(*inputs, eps=_EPS))
    assert quantized.shape == x.shape
    np.testing.assert_array_equal(total, plain_total)
    if keep:
        np.testing.assert_array_equal(carrier, plain)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
