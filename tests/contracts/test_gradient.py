"""C4: the forward inside the gradient is the forward outside; gradients repeat; and they are gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.learner import Batch
from minite_jax.model import hidden_states

BATCH_SHAPE = (20, 32)  # that of the worlds' rollouts, so that the compiled programs fit
GAP = "train_rollout_logprob_abs_diff"


@pytest.mark.worlds("moe_nvfp4", slow=("dense_nvfp4", "moe_bf16", "moe_experts"))
def test_the_gap_of_the_first_update_is_exactly_zero(world):
    """Log-probs of cached one-token decode against those of the `value_and_grad` call of the update."""
    _, metrics = world.gradients()
    assert metrics[f"{GAP}/max"] == metrics[f"{GAP}/mean"] == metrics["gen_kl_error"] == 0
    assert metrics[f"{GAP}/exact_fraction"] == 1
    assert metrics["tokens_compared"] == np.asarray(world.rollouts.mask).sum()
    # Ratios of exactly 1 leave the mean advantage: a float32 sum of 100 terms near 1.
    batch = world.batch()
    mean_advantage = np.average(np.broadcast_to(batch.advantages[:, None], batch.mask.shape), weights=batch.mask)
    assert metrics["loss"] == pytest.approx(-mean_advantage, abs=1e-5)
    assert metrics["update_applied"] == 1 and 0 < metrics["grad_norm"] < np.inf


def _assert_no_gap_anywhere(world, micro_batches, remat):
    """All log-probs, also those of prompts and padding, in the update's own program."""
    tokens, mask, _ = world.sequences
    batch = world.batch(sampler_log_probs=jnp.asarray(world.score(tokens)), mask=jnp.ones(mask.shape, bool))
    _, metrics = world.gradients(batch, micro_batches=micro_batches, remat=remat)
    assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1
    assert metrics["tokens_compared"] == mask.size


@pytest.mark.parametrize(
    ("micro_batches", "remat"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 4))]
)
@pytest.mark.worlds("dense_nvfp4")
def test_log_probs_inside_the_gradient_are_those_outside(world, micro_batches, remat):
    _assert_no_gap_anywhere(world, micro_batches, remat)


@pytest.mark.worlds("moe_nvfp4")
def test_log_probs_inside_the_gradient_are_those_outside_with_experts(world):
    _assert_no_gap_anywhere(world, micro_batches=1, remat=False)


@pytest.mark.slow
@pytest.mark.worlds("moe_bf16")
def test_log_probs_inside_remat_and_micro_batches_are_those_outside_with_experts(world):
    _assert_no_gap_anywhere(world, micro_batches=2, remat=True)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, True), (2, False), (2, True), (4, False), (4, True)])
@pytest.mark.worlds("moe_nvfp4", "moe_experts")
def test_every_split_with_and_without_remat(world, micro_batches, remat):
    _assert_no_gap_anywhere(world, micro_batches, remat)


@pytest.mark.worlds("moe_nvfp4")
def test_gradients_repeat_bit_for_bit(world, assert_same_bits):
    """H13: one distinct result, forward and backward."""
    first, metrics = world.gradients()
    for _ in range(4):
        again, metrics_again = world.gradients()
        assert_same_bits(again, first)
        assert metrics_again == metrics


@pytest.mark.slow
@pytest.mark.worlds("moe_nvfp4")
def test_gradients_of_layers_in_a_loop_and_one_after_another(world, assert_same_bits):
    """The residual stream goes from layer to layer as one array or as two: the gradient is the same."""
    tokens_BT = jnp.asarray(world.sequences[0][:5, :20])

    def gradients(scan_layers):
        def spread(params, policy):
            hidden_BTD, _ = hidden_states(policy.with_masters(params), tokens_BT, scan_layers=scan_layers)
            return jnp.std(hidden_BTD.astype(jnp.float32))

        return jax.jit(jax.grad(spread))(world.params, world.policy)

    assert_same_bits(gradients(False), gradients(True))


each_split = pytest.mark.parametrize(("micro_batches", "remat"), [(2, True), pytest.param(4, False, marks=pytest.mark.slow)])


@pytest.mark.parametrize(("micro_batches", "remat"), [(2, True), (4, False)])
@pytest.mark.worlds(slow=("dense_nvfp4",))
def test_micro_batches_and_remat_give_the_same_gradient_up_to_rounding(world, micro_batches, remat):
    whole, _ = world.gradients()
    parts, _ = world.gradients(micro_batches=micro_batches, remat=remat)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        # Sums of another shape differ in their last bits, and where a gradient is then rounded to bfloat16 a few fall on the
        # other side: one unit in the last place, at most 2^-7 of the number.
        np.testing.assert_allclose(a, b, atol=2**-7 * float(jnp.abs(a).max()), rtol=0)


@each_split
@pytest.mark.worlds("dense_nvfp4")
def test_a_masked_micro_batch_does_not_change_the_others(world, micro_batches, remat, assert_same_bits):
    """S04: the second micro-batch is masked; what it holds is nothing to the gradient."""
    batch = world.batch()
    size = len(batch.tokens) // micro_batches
    masked = slice(size, 2 * size)
    batch = batch.replace(mask=batch.mask.at[masked].set(False))
    gradients, metrics = world.gradients(batch, micro_batches=micro_batches, remat=remat)
    other = batch.replace(tokens=batch.tokens.at[masked].set(jnp.flip(batch.tokens[masked], axis=1)))
    other_gradients, other_metrics = world.gradients(other, micro_batches=micro_batches, remat=remat)
    assert_same_bits(other_gradients, gradients)
    assert other_metrics == metrics
    assert metrics["tokens_compared"] == np.asarray(batch.mask).sum() and metrics[f"{GAP}/exact_fraction"] == 1


def _named_leaves(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def made_up_batch(world) -> Batch:
    """Random tokens with the log-probs that the world gives them; a fifth of them is trained on."""
    rng = np.random.default_rng(8)
    tokens = jnp.asarray(rng.integers(0, world.config.vocab_size, BATCH_SHAPE), jnp.int32)
    log_probs = jnp.asarray(world.score(tokens))
    advantages = jnp.asarray(rng.standard_normal(len(tokens)), jnp.float32)
    return Batch(tokens, jnp.asarray(rng.random(log_probs.shape) < 0.2), log_probs, advantages)


@pytest.mark.worlds(slow=("dense_fp32", "moe_fp32"))
def test_gradients_are_slopes_of_the_loss(world):
    """Central differences of the loss, along the gradient of each parameter alone.

    The loss is a mean of about 100 log-probs near -5.5, each with an error of about 1e-6 that does not repeat between two
    points, so the loss has about 1e-7 and the slope 1e-7 / step. The step moves each loss by 2e-3, so the slope is known to
    1e-4; the third derivative adds less. An error in one term of a derivative is far larger than the 1 % allowed.
    """
    batch = made_up_batch(world)
    mask, advantages = np.asarray(batch.mask), np.asarray(batch.advantages, np.float64)[:, None]
    on_policy = np.asarray(batch.sampler_log_probs, np.float64)
    pack = jax.jit(lambda params: mt.model.pack(params, world.config, world.recipe))

    def loss(params):
        log_probs = world.score(batch.tokens, pack(params)).astype(np.float64)
        return -np.sum(np.where(mask, np.exp(log_probs - on_policy) * advantages, 0)) / mask.sum()

    gradients, _ = world.gradients(batch)
    leaves, treedef = jax.tree.flatten(world.params)
    for i, (name, gradient) in enumerate(_named_leaves(gradients).items()):
        norm = float(jnp.linalg.norm(gradient))
        assert norm > 0, f"{name} gets no gradient"
        step = 2e-3 / norm

        def moved(sign, i=i, gradient=gradient, step=step, norm=norm):
            return treedef.unflatten([x + sign * step / norm * gradient if j == i else x for j, x in enumerate(leaves)])

        slope = (loss(moved(+1)) - loss(moved(-1))) / (2 * step)
        assert slope == pytest.approx(norm, rel=0.01), name


@pytest.mark.parametrize(("name", "bound"), [pytest.param("dense_bf16", 0.999, marks=pytest.mark.slow), ("dense_nvfp4", 0.75)])
@pytest.mark.worlds("dense_fp32")
def test_low_precision_gradients_point_where_float32_ones_do(world, world_named, name, bound):
    """Every parameter's gradient, on one batch: float32's whole, the other's in two micro-batches with remat.

    Quantising changes an operand by 9 % (a relative squared error of 0.0085), bfloat16 by about 0.2 %. Forward and backward of a
    layer put some twenty such operands between a loss and a parameter: errors of about 40 % and 1 %, cosines near 0.92 and
    0.9999. The norms of queries and keys, whose gradients are small differences, come out lowest (seen: 0.85). Where a gradient
    misses its path (a residual stream cut by a rounding that has no derivative) nothing of it is left.
    """
    batch = made_up_batch(world)
    wanted = _named_leaves(world.gradients(batch)[0])
    other = world_named(name)
    batch = batch.replace(sampler_log_probs=jnp.asarray(other.score(batch.tokens)))  # ratios of 1: nothing is clipped
    for leaf, gradient in _named_leaves(other.gradients(batch, micro_batches=2, remat=True)[0]).items():
        cosine = jnp.vdot(gradient, wanted[leaf]) / (jnp.linalg.norm(gradient) * jnp.linalg.norm(wanted[leaf]))
        assert cosine > bound, leaf
