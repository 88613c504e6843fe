import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.silu_mul import silu_mul


def _gate_up(dtype, num_rows=130, width=40):
    return jnp.asarray(np.random.default_rng(3).standard_normal((num_rows, 2 * width)) * 3, dtype)


# One rounding to bfloat16 is at most 2^-8; float32's sigmoid and two products stay below 2^-20.
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2.0**-7.99), ("float32", 2.0**-20)])
def test_values_with_the_gate_in_the_first_half(dtype, tolerance):
    gate_up = _gate_up(dtype)
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    result = jax.jit(silu_mul)(gate_up)
    assert result.dtype == gate_up.dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), gate / (1 + np.exp(-gate)) * up, rtol=tolerance)


def test_gate_and_up_are_not_exchanged_and_extremes_stay_finite():
    gate_up = jnp.asarray([[1.0, -200.0, 200.0, 10.0, 3.0, 3.0]])
    np.testing.assert_allclose(jax.jit(silu_mul)(gate_up), [[7.31058579, 0.0, 600.0]], rtol=1e-6, atol=1e-30)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(silu_mul(x))))(gate_up)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_rows(check_rows, dtype):
    check_rows(silu_mul, _gate_up(dtype))


def test_gradient():
    gate_up = _gate_up("float32", 5)
    g = jnp.asarray(np.random.default_rng(4).standard_normal((5, 40)), jnp.float32)

    def plain(x):
        gate, up = jnp.split(x, 2, axis=-1)
        return gate / (1 + jnp.exp(-gate)) * up

    gradient = lambda op: jax.jit(lambda x, g: jax.vjp(op, x)[1](g)[0])(gate_up, g)  # noqa: E731
    # Elementwise in float32; atol for elements where the two terms of the derivative cancel.
    np.testing.assert_allclose(gradient(silu_mul), gradient(plain), rtol=1e-5, atol=1e-5)
