"""Hand-computed losses and gradients of single tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.learner import grpo_loss, kl_k3, negative_log_likelihood


@functools.partial(jax.jit, static_argnames=("clip_low", "clip_high"))
def _loss_and_gradient(log_probs, sampler_log_probs, advantages, **clips):
    """[B, 1] losses and their derivatives with respect to the log-probs."""

    def total(log_probs):
        loss = grpo_loss(log_probs, sampler_log_probs, advantages, **clips)
        return jnp.sum(loss), loss

    gradient, loss = jax.grad(total, has_aux=True)(log_probs)
    return loss[:, 0], gradient[:, 0]


def _of_ratios(ratios, advantages, **clips):
    sampler = np.full((len(ratios), 1), -2.0, np.float32)
    return _loss_and_gradient(sampler + np.log(np.float32(ratios))[:, None], sampler, np.float32(advantages), **clips)


def test_clipped_surrogate():
    loss, gradient = _of_ratios([1.5, 1.5, 0.5, 0.5, 10], [1, -1, 1, -1, -1], clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(loss, [-1.28, 1.5, -0.5, 0.8, 10], rtol=1e-5)  # no dual clip: 10 stays 10
    np.testing.assert_allclose(gradient, [0, 1.5, -0.5, 0, 10], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(gradient)[[0, 3]], 0)


def test_each_bound_clips_its_own_side():
    loss, _ = _of_ratios([1.5, 0.5], [1, -1], clip_low=0.1, clip_high=0.4)
    np.testing.assert_allclose(loss, [-1.4, 0.9], rtol=1e-6)


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_minus_the_advantage():
    loss, gradient = _of_ratios([1, 1, 1], [0.7, -1.3, 0])
    np.testing.assert_array_equal(loss, np.float32([-0.7, 1.3, 0]))
    np.testing.assert_array_equal(gradient, np.float32([-0.7, 1.3, 0]))


def test_the_importance_weight_is_that_of_the_old_log_probs():
    # Bounds wide open: the gradient of -r A is -r A, with r = e^0.2.
    _, gradient = _loss_and_gradient(np.float32([[-1]]), np.float32([[-1.2]]), np.float32([1]), clip_high=1.0)
    np.testing.assert_allclose(gradient, [-1.221403], rtol=1e-6)


@pytest.mark.parametrize("reference, expected", [(-1.5, 0.106531), (-0.5, 0.148721), (-1.0, 0.0)])
def test_k3(reference, expected):
    value = kl_k3(jnp.full((1, 1), -1.0), jnp.full((1, 1), reference))
    np.testing.assert_allclose(value, [[expected]], atol=1e-6)


def test_k3_estimates_the_divergence_from_the_reference():
    # Over all tokens of a small vocabulary, weighted by the policy, the estimate is KL(policy || reference) itself.
    policy, reference = np.float32([0.5, 0.3, 0.2]), np.float32([0.2, 0.2, 0.6])
    estimate = policy @ np.asarray(kl_k3(jnp.log(policy)[None], jnp.log(reference)[None]))[0]
    np.testing.assert_allclose(estimate, policy @ np.log(policy / reference), rtol=1e-5)


def test_negative_log_likelihood():
    np.testing.assert_array_equal(negative_log_likelihood(jnp.float32([[-1.5, -0.25]])), [[1.5, 0.25]])
