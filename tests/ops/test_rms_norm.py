import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4
from pallas_kernels.numerics import round_to
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_backward, add_rms_norm_quantize, rms_norm

_WIDTH = 48  # not a power of two: the sum's tree is filled up
_EPS = 1e-6


def _inputs(dtype, num_rows=130):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((num_rows, _WIDTH)) * 10.0 ** rng.integers(-3, 3, (num_rows, 1))
    return jnp.asarray(x, dtype), jnp.asarray(rng.uniform(0.5, 2, _WIDTH), jnp.float32)


def _norm(x, weight):
    return rms_norm(x, weight, eps=_EPS)


# One rounding to bfloat16 is at most 2^-8; a few float32 roundings and a reciprocal root are below 2^-20.
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2.0**-7.99), ("float32", 2.0**-20)])
def test_values(dtype, tolerance):
    x, weight = _inputs(dtype)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + _EPS) * np.asarray(weight, np.float64)
    result = jax.jit(_norm)(x, weight)
    assert result.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=tolerance)


def test_a_row_of_zeros_stays_zero_and_eps_is_inside_the_root():
    x = jnp.zeros((2, 4), jnp.float32).at[1].set(3e-3)
    result = jax.jit(lambda x: rms_norm(x, jnp.ones(4), eps=1.6e-5))(x)
    np.testing.assert_allclose(np.asarray(result), [[0] * 4, [0.6] * 4], rtol=1e-6)  # 3e-3 / sqrt(9e-6 + 1.6e-5)


def test_a_row_that_is_not_finite_spoils_no_other():
    x, weight = _inputs("float32", 3)
    jitted = jax.jit(_norm)
    spoiled, expected = jitted(x.at[1, 5].set(jnp.nan), weight), jitted(x, weight)
    np.testing.assert_array_equal(np.asarray(spoiled)[[0, 2]], np.asarray(expected)[[0, 2]])
    assert np.isnan(spoiled[1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_rows(check_rows, dtype):
    x, weight = _inputs(dtype)
    check_rows(lambda x: _norm(x, weight), x)


def test_gradient():
    x, weight = _inputs("float32", 5)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.float32)

    def plain(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + _EPS) * weight[None, :]

    gradients = lambda op: jax.jit(lambda x, weight, g: jax.vjp(op, x, weight)[1](g))(x, weight, g)  # noqa: E731
    actual, expected = gradients(_norm), gradients(plain)
    for a, b in zip(actual, expected, strict=True):
        # A gradient is a difference of numbers of the size of its largest element: float32 rounding is relative to that.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(jnp.abs(b).max()))


def _add_norm(x, y, weight):
    return add_rms_norm(x, y, weight, eps=_EPS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_add_and_norm_are_an_add_and_a_norm(assert_same_bits, dtype):
    x, weight = _inputs(dtype)
    y = jnp.flip(x, axis=0)
    total, normed = jax.jit(_add_norm)(x, y, weight)
    assert_same_bits(total, (np.asarray(x, np.float32) + np.asarray(y, np.float32)).astype(x.dtype))
    norm = jax.jit(_norm)
    assert_same_bits(normed, norm(total, weight))
    assert_same_bits(jax.jit(_add_norm)(x, None, weight), (x, norm(x, weight)))


@pytest.mark.parametrize("adds", [True, False])
def test_add_norm_and_quantise(assert_same_bits, adds):
    x, weight = _inputs("bfloat16", 35)
    y = jnp.flip(x, axis=0) if adds else None
    rule = nvfp4.ScaleRule.fp8_exact()
    run = lambda keep: jax.jit(lambda x, y, w: add_rms_norm_quantize(x, y, w, rule, eps=_EPS, keep=keep))(x, y, weight)  # noqa: E731
    total, normed, operand = run(True)
    assert_same_bits((total, normed), jax.jit(_add_norm)(x, y, weight))
    assert_same_bits(operand, nvfp4.quantize_operand(normed, rule))
    total_alone, nothing, operand_alone = run(False)
    assert nothing is None
    assert_same_bits((total_alone, operand_alone), (total, operand))


@pytest.mark.parametrize("adds", [True, False])
def test_gradient_of_add_and_norm(assert_same_bits, adds):
    x, weight = _inputs("float32", 5)
    rng = np.random.default_rng(2)
    y, g_sum, g_normed = (jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for _ in range(3))
    y = y if adds else None

    def plain(x, y, weight):
        total = x if y is None else x + y
        return total, total / jnp.sqrt(jnp.mean(total**2, axis=-1, keepdims=True) + _EPS) * weight[None, :]

    gradients = lambda op: jax.jit(lambda x, y, w, *g: jax.vjp(op, x, y, w)[1](g))(x, y, weight, g_sum, g_normed)  # noqa: E731
    actual, expected = gradients(_add_norm), gradients(plain)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(jnp.abs(b).max()))
    dx, dy, _ = actual
    assert_same_bits(dy, dx if adds else None)


def test_the_gradient_of_the_stream_is_rounded_once():
    """The parts through the norm and past it nearly cancel: rounded before they are added, they would leave little."""
    total, weight = _inputs("bfloat16")
    g_normed = jnp.asarray(np.random.default_rng(2).standard_normal(total.shape), jnp.bfloat16)
    run = jax.jit(lambda total, g_sum, g_normed: add_rms_norm_backward(total, weight, g_sum, g_normed, eps=_EPS)[0])
    nothing = jnp.zeros(total.shape, jnp.float32)
    through = run(total.astype(jnp.float32), nothing, g_normed)
    past = round_to(-through, jnp.bfloat16)
    exact = np.asarray(through, np.float64) + np.asarray(past, np.float64)
    left = np.asarray(run(total, past, g_normed), np.float64)
    assert (exact != 0).mean() > 0.9
    np.testing.assert_allclose(left, exact, rtol=2.0**-7.99, atol=2.0**-20 * np.abs(exact).max())
