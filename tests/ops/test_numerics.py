"""Helpers that a compiler must not bend, against numpy, under jit with XLA's default flags."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.numerics import (
    _nearest_quotient,
    divide,
    exact_exp2,
    exp,
    ordered_sum,
    reciprocal_sqrt,
    round_to,
    round_to_bfloat16,
    separate_product,
    sigmoid,
)


def _rounded(bits):
    """What `round_to_bfloat16` gives inside a program that goes back to float32, as uint32 bits."""
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jax.lax.bitcast_convert_type(round_to_bfloat16(x).astype(jnp.float32), jnp.uint32)


def test_bfloat16_rounding_of_every_high_half_with_low_halves_around_the_tie():
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (high[:, None] | low[None, :]).reshape(-1)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = bits.view(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    actual = np.asarray(jax.jit(_rounded)(bits)).view(np.float32)
    is_nan = np.isnan(bits.view(np.float32))
    assert np.isnan(actual[is_nan]).all() and np.isnan(expected[is_nan]).all()
    np.testing.assert_array_equal(actual.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def test_bfloat16_rounding_survives_where_a_cast_does_not():
    # 1 + 2^-9: XLA for CPU drops the cast of the plain version and gives the number back unrounded.
    value = jax.jit(lambda x: round_to_bfloat16(x).astype(jnp.float32) - 1.0)(jnp.float32(1 + 2.0**-9))
    assert value == 0.0


def test_bfloat16_rounding_is_straight_through():
    x = jnp.asarray([0.3, -7.1, 1e30, 0.0], jnp.float32)
    value, tangent = jax.jit(lambda x, t: jax.jvp(round_to_bfloat16, (x,), (t,)))(x, jnp.asarray([1.0, 2.0, -3.0, 0.5]))
    assert value.dtype == tangent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(tangent, np.float32), [1.0, 2.0, -3.0, 0.5])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(round_to_bfloat16(x).astype(jnp.float32) * jnp.asarray([1.0, 2, 3, 4]))))(x)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, [1.0, 2, 3, 4])


def test_round_to():
    x = jnp.float32(1 + 2.0**-9)
    assert round_to(x, jnp.bfloat16) == 1 and round_to(x, jnp.bfloat16).dtype == jnp.bfloat16
    assert round_to(x, jnp.float32) == x
    with pytest.raises(TypeError, match="bfloat16 or float32, not float16"):
        round_to(x, jnp.float16)


def test_division_by_a_scalar_and_by_a_row_is_correctly_rounded():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 9, (64, 96)).astype(np.float32)
    row = rng.uniform(0.1, 9, 64).astype(np.float32)

    @jax.jit
    def quotients(x, row):
        by_row = divide(x, row[:, None])
        return divide(x, jnp.float32(6)), divide(x, jnp.float32(0.7)), by_row, jnp.sum(by_row)

    sixth, by_temperature, by_row, _ = quotients(x, row)
    np.testing.assert_array_equal(sixth, x / np.float32(6))
    np.testing.assert_array_equal(by_temperature, x / np.float32(0.7))
    np.testing.assert_array_equal(by_row, x / row[:, None])


def _numpy_tree(x):
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@pytest.mark.parametrize("length", [1, 2, 3, 16, 33])
def test_ordered_sum_is_one_tree(length):
    x = np.random.default_rng(length).standard_normal((length, 40)).astype(np.float32) * 1e3
    padded = np.concatenate([x, np.zeros(((1 << (length - 1).bit_length()) - length, 40), np.float32)])
    expected = _numpy_tree(padded)

    @jax.jit
    def sums(x):
        return ordered_sum(x, axis=0), ordered_sum(x.T), ordered_sum(x[:, :7], axis=-2), jnp.max(ordered_sum(x, axis=0) * 3)

    by_column, by_row, of_fewer, _ = sums(x)
    np.testing.assert_array_equal(by_column, expected)
    np.testing.assert_array_equal(by_row, expected)
    np.testing.assert_array_equal(of_fewer, expected[:7])


def test_ordered_sum_adds_bfloat16_in_float32():
    x = jnp.asarray([256, 1, 1, 1], jnp.bfloat16)
    assert ordered_sum(x) == 259 and ordered_sum(x).dtype == jnp.float32


def test_a_separated_product_is_rounded_before_the_add():
    rng = np.random.default_rng(4)
    a, b, c, d = rng.standard_normal((4, 4096)).astype(np.float32)
    actual = jax.jit(lambda a, b, c, d: separate_product(a * b) + separate_product(c * d))(a, b, c, d)
    np.testing.assert_array_equal(actual, a * b + c * d)
    extremes = jax.jit(lambda x: separate_product(x * 2))(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan], jnp.float32))
    np.testing.assert_array_equal(extremes, np.array([np.finfo(np.float32).max, np.finfo(np.float32).min, np.nan], np.float32))


def test_powers_of_two_are_exact():
    exponent = np.arange(-126, 128)
    np.testing.assert_array_equal(jax.jit(exact_exp2)(exponent), np.ldexp(np.float32(1), exponent))


@pytest.mark.parametrize("largest, tolerance", [(11, 2.0**-20), (87, 2.0**-17)])
def test_exponential_and_sigmoid_are_accurate(largest, tolerance):
    x = np.random.default_rng(5).uniform(-largest, largest, 1 << 16).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(jax.jit(exp)(x), np.float64), exact, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(jax.jit(sigmoid)(x), np.float64), exact / (1 + exact), rtol=tolerance)


def test_exponential_and_sigmoid_at_the_ends():
    x = jnp.asarray([0, -jnp.inf, jnp.inf, jnp.nan, -200, 89], jnp.float32)
    np.testing.assert_array_equal(jax.jit(exp)(x), np.float32([1, 0, np.inf, np.nan, 0, np.inf]))
    np.testing.assert_array_equal(jax.jit(sigmoid)(x[jnp.asarray([0, 1, 2, 4, 5])]), np.float32([0.5, 0, 1, 0, 1]))


def test_reciprocal_root_is_accurate_and_not_silent_about_infinity():
    x = np.exp(np.random.default_rng(6).uniform(-85, 85, 1 << 16)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(jax.jit(reciprocal_sqrt)(x), np.float64), x.astype(np.float64) ** -0.5, rtol=2.0**-22)
    assert np.isnan(jax.jit(reciprocal_sqrt)(jnp.asarray([jnp.inf, jnp.nan], jnp.float32))).all()


def test_exponential_has_the_same_bits_in_another_program():
    x = np.random.default_rng(7).uniform(-30, 30, 4097).astype(np.float32)
    alone = [jax.jit(op)(x) for op in (exp, sigmoid, lambda x: reciprocal_sqrt(x * x))]

    @jax.jit
    def together(x):
        results = exp(x), sigmoid(x), reciprocal_sqrt(x * x)
        return results, sum(r * x + 1.0 for r in results)

    for a, b in zip(alone, together(x)[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_quotient_is_corrected_from_any_close_guess():
    """What `divide` does on a GPU, whose division is good to two units in the last place."""
    rng = np.random.default_rng(3)
    numerator, denominator = (
        (rng.standard_normal(200_000) * np.exp2(rng.integers(-50, 50, 200_000))).astype(np.float32) for _ in range(2)
    )
    denominator[:1000], numerator[1000:2000], denominator[2000:3000] = 6, 1, numerator[2000:3000]
    numerator[3000:3008] = [0, -0.0, np.inf, np.nan, 1, -1, 3e38, 1e-30]
    denominator[3000:3008] = [1, 1, 2, 2, np.inf, 0, 1e-30, 3e38]
    with np.errstate(all="ignore"):
        expected = numerator / denominator
    correct = jax.jit(_nearest_quotient)
    for ulps in (-2, -1, 0, 1, 2):
        guess = (expected.view(np.int32) + np.where(np.isfinite(expected) & (expected != 0), ulps, 0)).astype(np.int32)
        found = np.asarray(correct(numerator, denominator, guess.view(np.float32)))
        normal = (np.abs(expected) > 2.0**-125) & np.isfinite(expected)
        np.testing.assert_array_equal(found.view(np.int32)[normal], expected.view(np.int32)[normal])
        assert np.array_equal(found[~normal], guess.view(np.float32)[~normal], equal_nan=True)
