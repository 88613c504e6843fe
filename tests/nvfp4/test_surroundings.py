"""Bits do not depend on what is around: neighbours, jit, scan, vmap, gradients, remat, a larger program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4
from pallas_kernels.numerics import divide

RULES = {
    "fp8_exact": nvfp4.ScaleRule.fp8_exact(),
    "te": nvfp4.ScaleRule.te("row"),
    "te_46_mse": nvfp4.ScaleRule.te("row", four_over_six="mse"),
}
each_rule = pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, id=name, marks=[] if name == "fp8_exact" else pytest.mark.slow) for name, rule in RULES.items()],
)

_jitted = jax.jit(nvfp4.quantize, static_argnums=1)


def rows_of_many_kinds(num_rows=24, k=48):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((num_rows, k)) * 10.0 ** rng.integers(-3, 4, (num_rows, 1))
    x[::5, rng.integers(0, k, 3)] *= 30
    return jnp.asarray(x, jnp.float32)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@each_rule
def test_a_row_alone_is_the_row_in_the_batch(rule):
    x = rows_of_many_kinds()
    together = _jitted(x, rule)
    for i in (0, 11):
        assert_same_bits(_jitted(x[i : i + 1], rule), jax.tree.map(lambda a, i=i: a[i : i + 1], together))


@each_rule
def test_inside_a_gradient_with_remat_and_a_larger_program(rule):
    x = rows_of_many_kinds()
    expected = _jitted(x, rule)

    @jax.custom_vjp
    def straight_through(x):
        q = nvfp4.quantize(x, rule)
        return nvfp4.dequantize(q), q

    straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, cotangents: (cotangents[0],))

    def loss(x):
        # Work on both sides that XLA would like to fuse into the quantiser.
        y, q = jax.checkpoint(straight_through)(jnp.where(x == x, x, 0.0) * 2.0 * 0.5)
        return (jnp.tanh(y + 1.0) ** 2).sum(), (q, y)

    gradient, (q, y) = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert_same_bits(q, expected)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(nvfp4.dequantize(expected)))
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@each_rule
def test_in_scan_and_vmap(rule):
    x = rows_of_many_kinds()
    expected = _jitted(x, rule)
    parts = x.reshape(3, 8, -1)
    _, scanned = jax.lax.scan(lambda carry, part: (carry, nvfp4.quantize(part, rule)), None, parts)
    mapped = jax.jit(jax.vmap(lambda part: nvfp4.quantize(part, rule)))(parts)
    for q in (scanned, mapped):
        assert_same_bits(jax.tree.map(lambda a: a.reshape(24, *a.shape[2:]), q), expected)


def test_matrices_of_a_stack_are_quantised_apart():
    x = rows_of_many_kinds(32).reshape(2, 16, 48)
    for rule in (nvfp4.ScaleRule.fp8_exact("matrix"), nvfp4.ScaleRule.te("matrix")):
        stack = _jitted(x, rule)
        for i in range(2):
            assert_same_bits(_jitted(x[i], rule), stack[i])


def test_a_tile_and_its_transpose_are_the_same_numbers(shared):
    x = np.asarray(rows_of_many_kinds(32, 48))
    rule = nvfp4.ScaleRule.fp8_exact("matrix", (16, 16))
    q, q_t = shared.quantize(x, rule), shared.quantize(x.T, rule)
    np.testing.assert_array_equal(shared.dequantize(q).T, shared.dequantize(q_t))


def test_scale_of_a_larger_tensor_can_be_given():
    x = rows_of_many_kinds()
    amax = jnp.abs(x).max(axis=1)
    for rule in (RULES["fp8_exact"], RULES["te"]):
        whole = _jitted(x, rule)
        part = jax.jit(lambda x, amax, rule=rule: nvfp4.quantize(x, rule, amax=amax))
        left, right = part(x[:, :16], amax), part(x[:, 16:], amax)
        np.testing.assert_array_equal(np.asarray(left.outer_scale), np.asarray(whole.outer_scale))
        codes = jnp.concatenate([left.codes, right.codes], axis=1)
        np.testing.assert_array_equal(np.asarray(codes), np.asarray(whole.codes))


def test_division_stays_a_division_under_vmap():
    x = jnp.asarray(np.random.default_rng(3).uniform(0.1, 9, 512), jnp.float32)
    expected = np.asarray(x) / np.float32(6)
    sixth = lambda v: divide(v, jnp.float32(6))  # noqa: E731
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(sixth))(x)), expected)
    np.testing.assert_array_equal(np.asarray(jax.jit(sixth)(x)), expected)
