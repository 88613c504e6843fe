"""Zeros, tiny and huge numbers, NaN, and shapes that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4

FP8_EXACT = nvfp4.ScaleRule.fp8_exact()
TE_MATRIX = nvfp4.ScaleRule.te("matrix")
TE_ROW = nvfp4.ScaleRule.te("row")
each_rule = pytest.mark.parametrize("rule", [FP8_EXACT, TE_ROW], ids=["fp8_exact", "te"])


def scale_bytes(q):
    return np.asarray(q.block_scale).view(np.uint8)


@each_rule
def test_zeros_stay_zero(shared, rule):
    # All zero; the smallest subnormal; a zero block beside a small one; a zero row is not touched by its neighbours.
    x = np.zeros((4, 32), np.float32)
    x[1, 0] = 1e-45
    x[2, 16:] = 1e-3
    x[3] = 1.0
    q = shared.quantize(x, rule)
    y = shared.dequantize(q)
    assert not np.isin(scale_bytes(q), [0x7F, 0xFF]).any()
    np.testing.assert_array_equal(y[:2], 0.0)
    np.testing.assert_array_equal(y[2, :16], 0.0)
    np.testing.assert_array_equal(np.asarray(q.outer_scale)[:2], 1.0)
    np.testing.assert_allclose(y[2, 16:], 1e-3, rtol=0.1)


def test_small_block_under_the_te_rule(shared):
    x = jnp.zeros((2, 16), jnp.float32).at[1].set(1e-3)
    q = shared.quantize(x, TE_MATRIX)
    np.testing.assert_array_equal(scale_bytes(q), [[0], [0x7E]])
    np.testing.assert_allclose(shared.dequantize(q)[1], 1e-3, rtol=1e-6)


def test_tiny_blocks_under_the_te_rule(shared):
    amax = np.array([2688.0, 6 * 2.0**-9, 0.9 * 6 * 2.0**-10], np.float32)
    x = np.zeros((1, 48), np.float32)
    x[0, ::16] = amax
    q = shared.quantize(x, TE_MATRIX)
    assert float(q.outer_scale) == 1.0
    np.testing.assert_array_equal(scale_bytes(q), [[0x7E, 0x01, 0x00]])
    np.testing.assert_array_equal(shared.dequantize(q)[0, ::16], [2688.0, 0.01171875, 0.0])


def test_tiny_blocks_have_the_smallest_scale_under_fp8_exact(shared):
    x = jnp.asarray(np.float32([[384.0] + [0.0] * 15 + [1e-6] * 16]))
    q = shared.quantize(x, FP8_EXACT)
    np.testing.assert_array_equal(np.asarray(q.block_scale, np.float32), [[64.0, 2.0**-5]])
    assert nvfp4.is_fp8_exact(q)


def lattice(shape, seed=0):
    values = np.array(nvfp4.E2M1_VALUES[:8], np.float32)
    rng = np.random.default_rng(seed)
    x = rng.choice(values, shape) * rng.choice(np.float32([-1, 1]), shape)
    x[..., ::16] = 6.0
    return x


@pytest.mark.parametrize("rule", [FP8_EXACT, TE_MATRIX, nvfp4.ScaleRule.fp8_exact("matrix")])
def test_lattice_is_lossless(shared, rule):
    x = lattice((7, 80))
    q = shared.quantize(x, rule)
    np.testing.assert_array_equal(shared.dequantize(q), x)
    np.testing.assert_array_equal(np.asarray(nvfp4.dequantize(q, jnp.bfloat16), np.float32), x)
    if rule.family == "te":
        np.testing.assert_array_equal(scale_bytes(q), 0x7E)
        np.testing.assert_array_equal(np.asarray(nvfp4.block_values(q)), 448 * x)


@each_rule
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_number_is_seen_in_its_row_only(shared, rule, bad):
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    good = shared.quantize(x, rule)
    x[1, 5] = bad
    q = shared.quantize(x, rule)
    y = shared.dequantize(q)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], shared.dequantize(good)[[0, 2]])


def test_a_bad_number_is_seen_in_its_matrix_only(shared):
    x = np.ones((2, 2, 16), np.float32)
    x[1, 0, 0] = np.nan
    for rule in (TE_MATRIX, nvfp4.ScaleRule.fp8_exact("matrix")):
        y = shared.dequantize(shared.quantize(x, rule))
        assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@each_rule
def test_huge_numbers_stay_finite(shared, rule):
    x = jnp.asarray(np.float32([[3.4e38, -3.4e38] + [1e38] * 14, [1.0] * 16]))
    y = shared.dequantize(shared.quantize(x, rule))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, np.asarray(x), rtol=0.17)


def test_a_stale_amax_saturates():
    @jax.jit
    def stale(bad):
        x = jnp.full((1, 16), 0.5, jnp.float32).at[0, 3].set(1.2).at[0, 5].set(bad)
        return nvfp4.dequantize(nvfp4.quantize(x, TE_MATRIX, amax=jnp.float32(1.0)))

    np.testing.assert_allclose(np.asarray(stale(0.5)).max(), 1.0, rtol=1e-6)
    assert np.isnan(np.asarray(stale(np.inf))).all()


def test_sign_of_zero(shared):
    x = jnp.asarray(np.float32([[-0.0, 0.0, 1.0, -1e-9] + [0.0] * 12, [-0.0] * 16]))
    codes = np.asarray(nvfp4.unpack_codes(shared.quantize(x, FP8_EXACT).codes))
    np.testing.assert_array_equal(codes[:, :4], [[8, 0, codes[0, 2], 8], [0, 0, 0, 0]])


@pytest.mark.parametrize(("shape", "rule", "message"), [
    ((2, 24), FP8_EXACT, r"multiple of 16, got \(2, 24\)"),
    ((16,), FP8_EXACT, r"got \(16,\)"),
    ((0, 16), FP8_EXACT, r"no numbers: shape \(0, 16\)"),
    ((24, 32), nvfp4.ScaleRule.te(block=(16, 16)), r"M to be a multiple of 16, got \(24, 32\)"),
])  # fmt: skip
def test_shapes_that_do_not_fit(shape, rule, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize(jnp.zeros(shape), rule)


def test_arguments_that_do_not_fit(shared):
    x = jnp.ones((2, 16))
    with pytest.raises(ValueError, match="float16; cast it first"):
        nvfp4.quantize(x.astype(jnp.float16), FP8_EXACT)
    with pytest.raises(ValueError, match="leave it or the key out"):
        nvfp4.quantize(x, nvfp4.ScaleRule.te(four_over_six="mae"), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"it needs \(2,\)|needs \(2,\)"):
        nvfp4.quantize(x, FP8_EXACT, amax=jnp.ones(()))
    with pytest.raises(ValueError, match="gives float32 or bfloat16"):
        nvfp4.dequantize(shared.quantize(x, FP8_EXACT), jnp.float16)


@pytest.mark.parametrize("settings", [
    dict(family="mx"), dict(family="te", outer="column"), dict(family="te", block=(1, 32)),
    dict(family="fp8_exact", outer="row", block=(16, 16)), dict(family="te", outer="row", four_over_six="max"),
    dict(family="te", bound=300), dict(family="te", bound=256), dict(family="fp8_exact", four_over_six="mae"),
])  # fmt: skip
def test_rules_that_do_not_exist(settings):
    with pytest.raises(ValueError) as error:
        nvfp4.ScaleRule(**settings)
    assert "\n" not in str(error.value)


def test_array_is_a_tree_of_its_parts(shared):
    stack = shared.quantize(lattice((2, 2, 16)), FP8_EXACT)
    assert stack.shape == (2, 2, 16) and stack.outer_per_row
    assert stack[1].shape == (2, 16) and stack[1:].shape == (1, 2, 16)
    np.testing.assert_array_equal(np.asarray(stack[1].codes), np.asarray(stack.codes)[1])
    assert jax.eval_shape(lambda q: q, stack).shape == (2, 2, 16)
    per_matrix = shared.quantize(lattice((2, 2, 16)), TE_MATRIX)
    assert not per_matrix.outer_per_row and not per_matrix[0].outer_per_row
    for index in (0, (0, 1), Ellipsis, None):
        with pytest.raises(IndexError, match="only the axes before the last two"):
            stack[0][index]
