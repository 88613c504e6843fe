"""C6: after an update the sampler's next token comes from the new weights, and nothing of the old ones is left anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minite_jax as mt
from minite_jax.learner import OptimizerConfig, make_optimizer
from pallas_kernels.nvfp4 import Nvfp4Array

GAP = "train_rollout_logprob_abs_diff"


@pytest.mark.worlds("moe_nvfp4")
def test_ten_large_updates_in_a_row(world, assert_same_bits):
    """H08. Each step samples, is scored by old and new weights, and is trained on; at the end the first weights come back."""
    update, state, policy, before = world.update(), world.fresh_state(), world.policy, None
    for step in range(10):
        rollouts = world.sample(policy, seed=step)
        tokens, mask, log_probs = (np.asarray(x) for x in rollouts.sequences())
        assert_same_bits(world.score(tokens, policy)[mask], log_probs[mask])
        if before is not None:
            assert (world.score(tokens, before)[mask] != log_probs[mask]).mean() > 0.9
        before = policy
        state, policy, metrics = update(state, policy, world.batch(rollouts))
        assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1
        assert metrics["tokens_compared"] == mask.sum() > 0
        assert metrics["update_applied"] == 1
        # The policy is the packed masters: one set of weights.
        assert_same_bits(policy, mt.prepare(state.params, world.config, world.recipe))
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), state.params, world.params)
    assert all(x > 0.1 for x in jax.tree.leaves(moved))

    restored = world.sample(mt.prepare(world.params, world.config, world.recipe))
    assert_same_bits(restored, world.rollouts)


@pytest.mark.worlds("moe_nvfp4")
def test_a_batch_without_tokens_changes_nothing(world, assert_same_bits):
    """S04."""
    before = world.fresh_state()
    state, policy, metrics = world.update()(
        world.fresh_state(), world.policy, world.batch(mask=jnp.zeros_like(world.batch().mask))
    )
    assert metrics["loss"] == metrics["entropy"] == metrics["grad_norm"] == metrics["update_applied"] == 0
    assert metrics["tokens_compared"] == 0
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert_same_bits(policy, world.policy)


@pytest.mark.worlds("moe_nvfp4")
def test_a_gradient_that_is_not_finite_changes_nothing(world, assert_same_bits):
    before = world.fresh_state()
    batch = world.batch()
    batch = batch.replace(advantages=batch.advantages.at[2].set(jnp.nan))
    state, policy, metrics = world.update()(world.fresh_state(), world.policy, batch)
    assert metrics["update_applied"] == 0 and np.isnan(metrics["loss"])
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert_same_bits(policy, world.policy)


@pytest.mark.worlds("moe_nvfp4")
def test_masters_stay_float32_and_small_steps_add_up(world):
    """S05: a thousand steps of 1e-6 from 1.0. A bfloat16 master would stay at 1.0."""
    state, policy, _ = world.update()(world.fresh_state(), world.policy, world.batch())
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert isinstance(policy.weights["layers"][0]["qkv"], Nvfp4Array)

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6, max_grad_norm=0.0))

    def step(carry, _):
        w, opt_state = carry
        change, opt_state = optimizer.update(jnp.float32(1), opt_state, w)
        return (optax.apply_updates(w, change), opt_state), None

    w = jnp.float32(1)
    (w, _), _ = jax.lax.scan(step, (w, optimizer.init(w)), length=1000)
    # Each step is 1e-6 rounded to 17 units of 2^-24.
    assert float(w) == pytest.approx(1 - 1000 * 17 * 2.0**-24, abs=1e-7)
