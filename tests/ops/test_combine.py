import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import combine


def _inputs(dtype, num_rows=130, k=3, width=40):
    rng = np.random.default_rng(9)
    outputs = jnp.asarray(rng.standard_normal((num_rows, k, width)), dtype)
    return outputs, jnp.asarray(rng.dirichlet(np.ones(k), num_rows), jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_rank_order_sums_to_the_bit(dtype):
    outputs, weights = _inputs(dtype)
    products = np.asarray(outputs, np.float32) * np.asarray(weights)[..., None]
    expected = (products[:, 0] + products[:, 1]) + products[:, 2]
    np.testing.assert_array_equal(jax.jit(combine)(outputs, weights), expected.astype(outputs.dtype))


def test_the_order_of_the_adds_is_the_rank():
    # 2^24 + 0.25 is 2^24 in float32: the quarter is left only where the large numbers are added first.
    orders = list(itertools.permutations([2.0**24, -(2.0**24), 0.25]))
    result = jax.jit(combine)(jnp.asarray(orders)[..., None], jnp.ones((6, 3)))
    assert {order: float(x) for order, x in zip(orders, result[:, 0], strict=True)} == {
        order: 0.25 if order[2] == 0.25 else 0.0 for order in orders
    }


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_rows(check_rows, dtype):
    check_rows(lambda rows: combine(*rows), _inputs(dtype))


def test_gradient():
    outputs, weights = _inputs("float32", 5)
    g = jnp.asarray(np.random.default_rng(10).standard_normal((5, 40)), jnp.float32)
    plain = lambda outputs, weights: jnp.sum(outputs * weights[..., None], axis=1)  # noqa: E731
    gradients = lambda op: jax.jit(lambda o, w, g: jax.vjp(op, o, w)[1](g))(outputs, weights, g)  # noqa: E731
    for actual, expected in zip(gradients(combine), gradients(plain), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)  # a float32 sum over 40 columns


def test_forty_runs_give_one_result():
    outputs, weights = _inputs("bfloat16")

    @jax.jit
    def run(outputs, weights):
        value, pullback = jax.vjp(combine, outputs, weights)
        return value, pullback(value)

    runs = {b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(run(outputs, weights))) for _ in range(40)}
    assert len(runs) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_read_through_a_slot_give_the_bits_of_rows_gathered_before(dtype, assert_same_bits):
    outputs, weights = _inputs(dtype, 37)
    slot = jnp.asarray(np.random.default_rng(11).permutation(37 * 3).reshape(37, 3), jnp.int32)
    in_sorted_order = jnp.zeros((37 * 3, 40), outputs.dtype).at[slot].set(outputs)

    @jax.jit
    def through_slot(rows, weights):
        value, pullback = jax.vjp(lambda rows, weights: combine(rows, weights, slot), rows, weights)
        drows, dweights = pullback(value)
        return value, drows[slot], dweights

    @jax.jit
    def plain(outputs, weights):
        value, pullback = jax.vjp(combine, outputs, weights)
        return value, *pullback(value)

    assert_same_bits(through_slot(in_sorted_order, weights), plain(outputs, weights))


def test_outputs_of_another_shape_are_refused():
    outputs, weights = _inputs("float32", 5)
    slot = jnp.arange(15, dtype=jnp.int32).reshape(5, 3)
    message = r"combine: with weights \(5, 3\) and slot \(5, 3\), outputs must be \(15, 40\), not \(14, 40\)"
    with pytest.raises(ValueError, match=message):
        combine(outputs.reshape(15, 40)[:14], weights, slot)
