"""What the update refuses, what it leaves alone, and what it does not look at: on a table of bigrams in the transformer's place,
which compiles in a moment.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minite_jax as mt
from minite_jax.learner import Batch, grpo_loss, init_state, make_update, update
from minite_jax.model import tiny_dense

_CONFIG, _RECIPE = tiny_dense(), mt.recipe("fp32")
# The rate is part of the state: one compiled program for all rates.
_OPTIMIZER = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
_UPDATE = make_update(_OPTIMIZER, lambda log_probs, batch: grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages))


def _bigrams(policy, tokens, truncation, *, remat):
    log_probs = jax.nn.log_softmax(policy.masters["table"])[tokens[:, :-1]]
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=2)


@pytest.fixture(autouse=True)
def _bigrams_for_the_transformer(monkeypatch):
    monkeypatch.setattr(update, "scored_tokens", _bigrams)
    monkeypatch.setattr(update, "pack", mt.Policy)


def _params():
    return {"table": jax.random.normal(jax.random.key(0), (256, 256))}


@pytest.fixture
def policy():
    return mt.Policy(_params(), _CONFIG, _RECIPE)


def _state(learning_rate=0.1):
    state = init_state(_params(), _OPTIMIZER)
    state.opt_state.hyperparams["learning_rate"] = jnp.float32(learning_rate)
    return state


def _batch(**changes):
    mask = np.array([[True, True, False, True], [False, True, True, False], [False] * 4])
    tokens = np.random.default_rng(0).integers(0, 256, (3, 5)).astype(np.int32)
    batch = Batch(tokens, mask, np.where(mask, np.float32(-5.5), np.float32(0)), np.float32([1, -0.5, 0.25]))
    return jax.tree.map(jnp.asarray, batch).replace(**changes)


def _assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("learning_rate", [np.nan, np.inf])
def test_new_weights_that_are_not_finite_change_nothing(policy, learning_rate):
    before = _state(learning_rate)
    state, new_policy, metrics = _UPDATE(_state(learning_rate), policy, _batch())
    assert metrics["update_applied"] == 0 and np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    _assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    _assert_same(new_policy, policy)
    assert state.step == 1


@pytest.mark.parametrize("hidden", [np.nan, -np.inf, -200.0, 200.0])
def test_what_the_mask_hides_changes_nothing(policy, hidden):
    batch = _batch()
    log_probs = jnp.where(batch.mask, batch.sampler_log_probs, hidden)
    other = batch.replace(sampler_log_probs=log_probs, advantages=batch.advantages.at[2].set(hidden))  # row 2 is all hidden
    clean, dirty = (_UPDATE(_state(), policy, b) for b in (batch, other))
    assert clean[2]["update_applied"] == 1 and clean[2]["tokens_compared"] == 5
    assert np.abs(np.asarray(clean[0].params["table"]) - np.asarray(_params()["table"])).max() > 0.01
    _assert_same(dirty, clean)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (dict(tokens=jnp.zeros(5, jnp.int32)), "batch.tokens has shape (5,); the update wants [B, T]"),
        (dict(mask=jnp.ones((3, 1), bool)), "batch.mask has shape (3, 1); the update wants [B, T-1] = (3, 4)"),
        (dict(mask=jnp.ones((3, 5), bool)), "batch.mask has shape (3, 5); the update wants [B, T-1] = (3, 4)"),
        (dict(mask=jnp.ones((3, 4))), "batch.mask is float32; the update wants bool"),
        (dict(sampler_log_probs=jnp.ones(4)), "batch.sampler_log_probs has shape (4,); the update wants [B, T-1] = (3, 4)"),
        (dict(advantages=jnp.ones((3, 1))), "batch.advantages has shape (3, 1); the update wants [B] = (3,)"),
        (dict(advantages=jnp.ones(1)), "batch.advantages has shape (1,); the update wants [B] = (3,)"),
    ],
)
def test_shapes_of_the_batch(policy, changes, wanted):
    with pytest.raises(ValueError) as error:
        _UPDATE(_state(), policy, _batch(**changes))
    assert str(error.value) == wanted


@pytest.mark.parametrize(
    ("loss_fn", "shape"),
    [(lambda log_probs, _: log_probs.mean(), "()"), (lambda log_probs, _: log_probs.mean(1, keepdims=True), "(3, 1)")],
)
def test_shape_of_the_loss(policy, loss_fn, shape):
    with pytest.raises(ValueError) as error:
        jax.eval_shape(make_update(_OPTIMIZER, loss_fn), _state(), policy, _batch())
    assert str(error.value) == f"loss_fn returned shape {shape}; the update wants [B, T-1] = (3, 4)"
