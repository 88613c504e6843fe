import jax
import numpy as np
import pytest

from minite_jax.learner import group_advantages

_advantages = jax.jit(group_advantages, static_argnames="normalize")
_REWARDS = np.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], [0, 0, 0, 0], [3, 1, -1, 1]])


def test_population_deviation():
    advantages = np.asarray(_advantages(_REWARDS))
    np.testing.assert_allclose(advantages[0], [1.7321, -0.5774, -0.5774, -0.5774], atol=1e-4)  # sample deviation: 1.5, -0.5
    np.testing.assert_allclose(advantages[4], [2**0.5, 0, -(2**0.5), 0], atol=1e-6)
    np.testing.assert_array_equal(advantages[1:4], 0)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)


def test_without_normalisation():
    advantages = np.asarray(_advantages(_REWARDS, normalize=False))
    np.testing.assert_allclose(advantages[[0, 4]], [[0.75, -0.25, -0.25, -0.25], [2, 0, -2, 0]], atol=1e-6)


def test_a_group_of_one_gets_zero():
    np.testing.assert_array_equal(_advantages(np.float32([[3], [0]])), [[0], [0]])


def test_a_sample_without_a_reward_is_left_out():
    rewards = np.float32([[1, 1, 0, np.nan], [5, 5, 5, 5]])
    valid = np.array([[True, True, True, False], [False, False, False, False]])
    advantages = np.asarray(_advantages(rewards, valid))
    np.testing.assert_allclose(advantages[0], [0.7071, 0.7071, -1.4142, 0], atol=1e-4)
    np.testing.assert_array_equal(advantages[1], 0)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_reward_that_is_not_a_number_shows_in_its_group_alone(normalize):
    rewards = np.float32([[1, np.nan, 0, 0], [1, 0, 0, 0]])
    advantages = np.asarray(_advantages(rewards, normalize=normalize))
    assert np.isnan(advantages[0]).all() and np.isfinite(advantages[1]).all()


def test_the_scale_and_the_offset_of_rewards_do_not_matter():
    rewards = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    np.testing.assert_allclose(_advantages(1e-3 * rewards + 0.25), _advantages(rewards), atol=2e-3)
