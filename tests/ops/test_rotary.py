import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotary import rotary, rotary_table


def _inputs(dtype, num_rows=130):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((num_rows, 3, 8)), dtype)
    cos, sin = (table[rng.permutation(num_rows)] for table in rotary_table(num_rows, 8, 1e4))
    return x, jnp.asarray(cos), jnp.asarray(sin)


def test_pairs_are_half_a_head_apart():
    cos, sin = rotary_table(2, 4, 1e4)
    turned = jax.jit(rotary)(jnp.asarray([[[1.0, 0, 0, 0]]]), cos[1:], sin[1:])
    np.testing.assert_allclose(turned[0, 0], [0.540302, 0, 0.841471, 0], atol=1e-6)  # interleaved: [.54, .84, 0, 0]


@pytest.mark.parametrize("theta, second, last", [(1e6, 0.805842, 1.240938e-06), (1e4, 0.865964, 1.154782e-04)])
def test_frequencies_of_a_head_of_128(theta, second, last):
    cos, sin = rotary_table(2, 128, theta)
    assert cos.shape == sin.shape == (2, 64)
    assert cos.dtype == sin.dtype == np.float32
    angle = np.arctan2(sin[1].astype(np.float64), cos[1].astype(np.float64))
    np.testing.assert_allclose(angle[[0, 1, -1]], [1.0, second, last], rtol=1e-6)


def test_angles_of_far_positions_are_not_rounded_to_float32():
    cos, sin = rotary_table(40_001, 128, 1e6)
    angle = 40_000 * 1e6 ** (-2 / 128)  # float32 would be off by 1e-3
    np.testing.assert_allclose([cos[-1, 1], sin[-1, 1]], [np.cos(angle), np.sin(angle)], atol=1e-7)


# Per element: one rounding of the result to its type, of numbers up to the pair's length; float32 products before.
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2.0**-8), ("float32", 2.0**-22)])
def test_values(dtype, tolerance):
    x, cos, sin = _inputs(dtype)
    pairs = np.asarray(x, np.float64)
    turned = (pairs[..., :4] + 1j * pairs[..., 4:]) * (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None]
    result = jax.jit(rotary)(x, cos, sin)
    assert result.dtype == x.dtype
    error = np.abs(np.asarray(result, np.float64) - np.concatenate([turned.real, turned.imag], axis=-1))
    assert (error <= tolerance * np.tile(np.abs(turned), 2)).all()


def test_scores_depend_on_the_distance_alone():
    cos, sin = rotary_table(60, 8, 1e4)
    q, k = np.random.default_rng(6).standard_normal((2, 1, 1, 8)).astype(np.float32)
    positions = [7, 3, 57, 53]
    turned = jax.jit(rotary)(np.concatenate([q, k, q, k]), cos[positions], sin[positions])
    near_q, near_k, far_q, far_k = np.asarray(turned)[:, 0]
    np.testing.assert_allclose(near_q @ near_k, far_q @ far_k, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_rows(check_rows, dtype):
    check_rows(lambda rows: rotary(*rows), _inputs(dtype))


def test_gradient_turns_back():
    x, cos, sin = _inputs("float32", 5)
    g = jnp.asarray(np.random.default_rng(8).standard_normal(x.shape), jnp.float32)

    def plain(x):
        first, second = jnp.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    actual = jax.jit(lambda x, g: jax.vjp(lambda x: rotary(x, cos, sin), x)[1](g)[0])(x, g)
    expected = jax.jit(lambda x, g: jax.vjp(plain, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)  # two float32 products and an add
