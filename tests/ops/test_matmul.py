"""Dense matmul and its gradients: exact on the lossless lattice, row-independent on everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.precision import MatmulFormat, linear
from pallas_kernels import nvfp4
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad

_ROW = nvfp4.ScaleRule.fp8_exact("row")
_MATRIX = nvfp4.ScaleRule.fp8_exact("matrix")
_quantize = jax.jit(nvfp4.quantize, static_argnums=1)
_matmul = jax.jit(matmul, static_argnames="out_dtype")


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


_SHAPES = [(m, 48, 80) for m in (1, 2, 7, 16, 17, 127, 128, 129, 130)] + [
    (17, 8, 16), (17, 130, 16), (17, 130, 144), (17, 8, 2048), (129, 130, 2048),
]  # fmt: skip


@pytest.mark.parametrize("m, n, k", _SHAPES)
def test_nvfp4_product_on_the_lattice_is_exact(lattice, lattice_nvfp4, m, n, k):
    x, w = lattice(1, m, k), lattice(2, n, k)
    actual = _matmul(lattice_nvfp4(x, (m,)), lattice_nvfp4(w, ()), out_dtype=jnp.float32)
    assert actual.shape == (m, n)
    np.testing.assert_array_equal(np.asarray(actual), x.astype(np.float64) @ w.T.astype(np.float64))


def test_plain_product_on_the_lattice_is_exact(lattice):
    x, w = lattice(1, 33, 2048), lattice(2, 48, 2048)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    for dtype in (jnp.bfloat16, jnp.float32):
        actual = _matmul(x.astype(dtype), w.astype(dtype), out_dtype=jnp.float32)
        np.testing.assert_array_equal(np.asarray(actual), expected)
    rounded = _matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rounded), expected.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.slow
def test_scales_of_the_other_rule_cost_one_rounding_each(lattice):
    # The outer scales are 1/448 here: the sum is exact, two multiplications are not. The lattice is recovered by rounding.
    rule = nvfp4.ScaleRule.te("matrix")
    x, w = lattice(1, 17, 80), lattice(2, 48, 80)
    actual = np.asarray(_matmul(_quantize(x, rule), _quantize(w, rule), out_dtype=jnp.float32), np.float64)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=4 * 2.0**-24)
    np.testing.assert_array_equal(np.round(4 * actual) / 4, expected)


def test_a_summed_axis_of_24_is_not_cut():
    for dtype in (jnp.bfloat16, jnp.float32):
        assert float(_matmul(jnp.ones((1, 24), dtype), jnp.ones((1, 24), dtype))[0, 0]) == 24.0
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantize(jnp.ones((1, 24)), _ROW)


def test_different_summed_axes_are_refused():
    with pytest.raises(ValueError, match=r"matmul: x \(2, 16\) and w \(3, 32\) must agree in their last axis, K"):
        matmul(jnp.ones((2, 16)), jnp.ones((3, 32)))


def test_values(random_nvfp4):
    x, w = _normal(3, 33, 96), _normal(4, 40, 96)
    q_x, deq_x = random_nvfp4(3, (33, 96), (33,))
    q_w, deq_w = random_nvfp4(4, (40, 96), ())
    for operands, numbers in (((x, w), (x.astype(np.float64), w.astype(np.float64))), ((q_x, q_w), (deq_x, deq_w))):
        actual = np.asarray(_matmul(*operands, out_dtype=jnp.float32), np.float64)
        # Each of 96 float32 additions is off by at most 2^-24 of the sum of magnitudes.
        bound = 96 * 2.0**-24 * (np.abs(numbers[0]) @ np.abs(numbers[1]).T)
        assert (np.abs(actual - numbers[0] @ numbers[1].T) <= bound).all()


def test_one_outer_scale_for_all_rows(random_nvfp4):
    q_x, _ = random_nvfp4(3, (33, 96), ())
    q_w, _ = random_nvfp4(4, (40, 96), ())
    per_row = nvfp4.Nvfp4Array(q_x.codes, q_x.block_scale, np.repeat(q_x.outer_scale, 33))
    np.testing.assert_array_equal(np.asarray(_matmul(q_x, q_w)), np.asarray(_matmul(per_row, q_w)))


@pytest.mark.slow
def test_rows_through_the_quantiser(check_rows, random_nvfp4):
    w = jax.tree.map(jnp.asarray, random_nvfp4(5, (40, 96), ())[0])
    check_rows(lambda x: linear(MatmulFormat(_ROW, _MATRIX), x, w, None), _normal(6, 130, 96).astype(jnp.bfloat16))


def test_rows_of_plain_operands(check_rows):
    w = jnp.asarray(_normal(7, 40, 96))
    check_rows(lambda x: matmul(x, w, out_dtype=jnp.float32), _normal(8, 130, 96))


@pytest.mark.slow
@pytest.mark.parametrize("num_features", [1, 5, 130])
def test_rows_of_bfloat16_operands(check_rows, num_features):
    w = jnp.asarray(_normal(9, num_features, 200), jnp.bfloat16)
    check_rows(lambda x: matmul(x, w), _normal(10, 130, 200).astype(jnp.bfloat16))


def test_a_row_that_is_not_finite_spoils_no_other():
    x, w = _normal(6, 33, 96), _normal(5, 40, 96)
    expected = np.asarray(_matmul(x, w, out_dtype=jnp.float32))
    x[2, 7] = np.nan
    spoiled = np.asarray(_matmul(x, w, out_dtype=jnp.float32))
    np.testing.assert_array_equal(np.delete(spoiled, 2, axis=0), np.delete(expected, 2, axis=0))
    assert np.isnan(spoiled[2]).all()


def test_zeros_give_zeros(lattice, lattice_nvfp4):
    zeros = lattice_nvfp4(np.zeros((48, 80), np.float32), ())
    assert not np.asarray(_matmul(lattice_nvfp4(lattice(1, 17, 80), (17,)), zeros, out_dtype=jnp.float32)).any()


def test_gradients_on_the_lattice_are_those_of_the_operands_that_ran(lattice, lattice_nvfp4):
    x, w = lattice(1, 17, 80), lattice(2, 48, 80)
    g = np.random.default_rng(3).integers(-1, 2, (17, 48)).astype(np.float32)
    for operand_x, operand_w in ((lattice_nvfp4(x, (17,)), lattice_nvfp4(w, ())), (x, w)):
        np.testing.assert_array_equal(jax.jit(matmul_dgrad)(g, operand_w), g @ w)
        np.testing.assert_array_equal(jax.jit(matmul_wgrad)(operand_x, g), g.T @ x)


def _linear_and_gradients(format, x, stored, master, g):
    y, pullback = jax.vjp(lambda x, master: linear(format, x, stored, master), x, master)
    return y, *pullback(g)


_linear_and_gradients = jax.jit(_linear_and_gradients, static_argnums=0)


def test_linear_hands_the_exact_gradient_to_the_master(lattice, lattice_nvfp4):
    x, w = lattice(1, 17, 80), lattice(2, 48, 80)
    g = np.random.default_rng(3).integers(-1, 2, (17, 48)).astype(np.float32)
    unread = np.full_like(w, np.nan)  # a backward that quantised the master again would show it
    for format, stored in ((MatmulFormat(_ROW, _MATRIX), lattice_nvfp4(w, ())), (MatmulFormat(), w)):
        y, dx, dw = _linear_and_gradients(format, x, stored, unread, g)
        np.testing.assert_array_equal(y, x @ w.T)
        np.testing.assert_array_equal(dx, g @ w)
        np.testing.assert_array_equal(dw, g.T @ x)


def test_linear_differentiates_the_quantised_operands(random_nvfp4):
    # Off the lattice, a backward that reads other operands than the forward is wrong by about 18 %; this is float32's rounding.
    x, g = _normal(11, 17, 80), _normal(13, 17, 48)
    stored, deq_w = random_nvfp4(12, (48, 80), ())
    y, dx, dw = _linear_and_gradients(MatmulFormat(_ROW, _MATRIX), x, stored, np.zeros((48, 80), np.float32), g)
    deq_x = np.asarray(nvfp4.dequantize(_quantize(x, _ROW)), np.float64)
    for actual, expected in ((y, deq_x @ deq_w.T), (dx, g @ deq_w), (dw, g.T @ deq_x)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_forty_runs_give_one_result(random_nvfp4):
    x, g = _normal(11, 17, 80), _normal(13, 17, 48)
    stored, _ = random_nvfp4(12, (48, 80), ())
    run = lambda: _linear_and_gradients(MatmulFormat(_ROW, _MATRIX), x, stored, np.zeros((48, 80), np.float32), g)  # noqa: E731
    assert len({b"".join(np.asarray(a).tobytes() for a in run()) for _ in range(40)}) == 1
