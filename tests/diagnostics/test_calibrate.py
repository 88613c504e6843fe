"""Calibrated outer scales of activations: from the plain activations of the policy's own weights."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics import calibrate
from minite_jax.model import tiny_dense
from minite_jax.model.policy import Policy

lib = sys.modules["minite_jax.diagnostics.calibrate"]


def test_scales_are_the_smallest_powers_of_two_that_reach():
    amax = np.array([2688, 2688.5, 2687, 1, 0, 3e-5], np.float32)
    scales = lib._scales("x", amax)
    np.testing.assert_array_equal(scales, np.exp2([0, 1, 0, -11, 1, -26]).astype(np.float32))
    live = amax > 0
    assert (amax[live] <= 2688 * scales[live]).all() and (amax[live] > 1344 * scales[live]).all()
    with pytest.raises(ValueError, match="activations of x are not finite"):
        lib._scales("x", np.array([1, np.nan], np.float32))


def test_experts_have_the_largest_of_their_own_rows():
    x = jnp.array([[1.0, -2.0], [3.0, 0.5], [-7.0, 1.0], [100.0, 1.0]], jnp.bfloat16)
    found = lib._amax(x, None, jnp.array([2, 0, 1], jnp.int32))  # the last row belongs to no expert
    np.testing.assert_array_equal(found, [3, 0, 7])
    assert lib._amax(x, None, None) == 100


@pytest.mark.slow
def test_the_norms_output_is_what_query_key_and_value_read():
    config = tiny_dense(num_hidden_layers=1)
    params = mt.init_params(config, jax.random.key(0))
    policy = mt.prepare(params, config, mt.recipe("nvfp4", matmuls=("attention",)))
    sequences = [[1, 2, 3, 4], [5, 6, 7, 250]]
    scales = calibrate(policy, sequences)
    assert set(scales) == {"layers.0.qkv", "layers.0.o"}  # the MLP is plain
    x = np.asarray(policy.weights["embed"], np.float64)[np.array(sequences)]
    amax = np.abs(x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)).max()
    assert scales["layers.0.qkv"] == 2.0 ** np.ceil(np.log2(amax / 2688))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [([], "one token each"), ([[1], []], "one token each"), ([[1, 256]], "256 is none"), ([[-1]], "-1 is none")],
)
def test_sequences_that_are_none(sequences, message):
    policy = Policy(weights={}, config=tiny_dense(), recipe=mt.recipe("nvfp4"))
    with pytest.raises(ValueError, match=message):
        calibrate(policy, sequences)
