import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import router

_router = jax.jit(router, static_argnames=("top_k", "normalize"))


def _of_logits(logits, **options):
    """Routes rows whose logits are given: the width is one per expert, and the weight the identity."""
    logits = np.asarray(logits, np.float32)
    return _router(logits, np.eye(logits.shape[1], dtype=np.float32), **options)


def _inputs(seed=0, num_rows=130, experts=8, width=48):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, width)).astype(np.float32), rng.standard_normal((experts, width)).astype(np.float32)


@pytest.mark.parametrize("normalize, expected", [(True, [0.731059, 0.268941]), (False, [0.643914, 0.236883])])
def test_normalisation_over_the_chosen(normalize, expected):
    weights, experts = _of_logits([[2, 1, 0, -1]], top_k=2, normalize=normalize)
    np.testing.assert_allclose(weights[0], expected, atol=1e-6)
    np.testing.assert_array_equal(experts[0], [0, 1])


def test_logits_that_bfloat16_would_tie():
    weights, experts = _of_logits([[1.0, 1.0005, -3, -3]], top_k=1, normalize=False)
    np.testing.assert_array_equal(experts, [[1]])
    # ... and such as exp(logit - max) would tie in float32: the choice is made on the logits.
    _, experts = _of_logits([[20.0, np.nextafter(np.float32(20), np.float32(21)), 1e-9, 2e-9]], top_k=4, normalize=False)
    np.testing.assert_array_equal(experts, [[1, 0, 3, 2]])


def test_ties_go_to_the_lower_index_in_any_batch():
    row = np.float32([0.3, 0.4, 0.3, 0.3])
    for num_rows in (1, 130):
        weights, experts = _of_logits(np.tile(row, (num_rows, 1)), top_k=2, normalize=True)
        np.testing.assert_array_equal(experts, [[1, 0]] * num_rows)
        assert len({w.tobytes() for w in np.asarray(weights)}) == 1
    _, experts = _of_logits([[0, 0, 0, 0]], top_k=4, normalize=True)
    np.testing.assert_array_equal(experts, [[0, 1, 2, 3]])


def test_signs_of_zeros_and_of_nan_choose_nothing():
    x = np.float32([[-1], [np.inf], [np.nan], [-np.nan]])
    weights, experts = _router(x, np.float32([[0], [0], [-0.0], [1]]), top_k=4, normalize=True)
    # -0 is no less than 0, and infinity times zero is NaN, on an x86 a negative one.
    np.testing.assert_array_equal(experts, [[0, 1, 2, 3]] * 4)
    assert np.isfinite(weights[0]).all() and np.isnan(weights[1:]).all()
    x = np.float32([[1, 1]] * 2)
    for number in (np.nan, -np.nan):
        weights, experts = _router(x, np.float32([[1, 1], [3, 1], [number, 1], [2, 1]]), top_k=2, normalize=False)
        np.testing.assert_array_equal(experts, [[2, 1]] * 2)
        assert np.isnan(weights).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_values(normalize):
    x, weight = _inputs()
    weights, experts = _router(x, weight, top_k=3, normalize=normalize)
    assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
    logits = x.astype(np.float64) @ weight.T.astype(np.float64)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(experts, order)
    expected = np.take_along_axis(probs, order, axis=1)
    if normalize:
        expected /= expected.sum(axis=1, keepdims=True)
    # Logits reach 30: float32 holds them to 2^-20, which the exponential turns into a relative error.
    np.testing.assert_allclose(weights, expected, rtol=2e-5)


def test_rows(check_rows):
    x, weight = _inputs()
    check_rows(lambda x: router(x, jnp.asarray(weight), top_k=3, normalize=True), x.astype(jnp.bfloat16))


@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_with_the_choice_held_fixed(normalize):
    x, weight = _inputs(num_rows=5)
    g = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    _, experts = _router(x, weight, top_k=3, normalize=normalize)

    def plain(x, weight):
        probs = jax.nn.softmax(x @ weight.T, axis=-1)
        chosen = jnp.take_along_axis(probs, experts, axis=-1)
        return chosen / jnp.sum(chosen, axis=-1, keepdims=True) if normalize else chosen

    ours = lambda x, weight: router(x, weight, top_k=3, normalize=normalize)[0]  # noqa: E731
    gradients = lambda op: jax.jit(lambda x, weight, g: jax.vjp(op, x, weight)[1](g))(x, weight, g)  # noqa: E731
    for actual, expected in zip(gradients(ours), gradients(plain), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)  # float32 rounding of logits near 20


@pytest.mark.parametrize("top_k", [0, 9])
def test_an_impossible_number_of_experts_is_refused(top_k):
    x, weight = map(jnp.asarray, _inputs(num_rows=2))
    with pytest.raises(ValueError, match=f"top_k={top_k} must lie between 1 and the number of experts, 8"):
        router(x, weight, top_k=top_k, normalize=True)
