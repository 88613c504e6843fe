"""C2: a row's log-probs do not depend on what else is in the batch, on padding, or on its place."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

each_world = pytest.mark.worlds("moe_nvfp4", "dense_nvfp4", slow=("moe_bf16",))

ALONE_SLOTS = 40  # another length than the batch has


@pytest.mark.worlds("moe_nvfp4", slow=("dense_nvfp4", "moe_bf16"))
def test_a_row_alone_is_the_row_in_the_batch(world, assert_same_bits):
    tokens, _, _ = world.sequences
    together = world.score(tokens)
    for row in range(0, len(tokens), 4):  # one sample of each prompt length
        length = world.lengths[row]
        alone = np.full((1, ALONE_SLOTS), 77, np.int32)
        alone[0, :length] = tokens[row, :length]
        assert_same_bits(world.score(alone)[0, : length - 1], together[row, : length - 1])


@each_world
def test_garbage_in_the_padding_changes_nothing(world, assert_same_bits):
    tokens, _, _ = world.sequences
    padding = np.arange(tokens.shape[1])[None, :] >= world.lengths[:, None]
    garbage = np.random.default_rng(0).integers(0, world.config.vocab_size, tokens.shape)
    dirty = np.where(padding, garbage, tokens).astype(np.int32)
    assert (dirty != tokens).sum() > 100
    assert_same_bits(world.score(dirty)[~padding[:, 1:]], world.score(tokens)[~padding[:, 1:]])


@each_world
def test_the_place_in_the_batch_changes_nothing(world, assert_same_bits):
    tokens, _, _ = world.sequences
    order = np.random.default_rng(1).permutation(len(tokens))
    assert_same_bits(world.score(tokens[order]), world.score(tokens)[order])


def _with_embedding_row(policy, token, row):
    embed = policy.weights["embed"].at[token].set(row)
    return policy.replace(weights=policy.weights | {"embed": embed})


def _neighbours_of(tokens, kept, loud):
    """The batch with every row but `kept` filled with the token `loud`."""
    return np.where(kept[:, None], tokens, loud).astype(np.int32)


@pytest.mark.parametrize("factor", [1e4, float("nan")])
@pytest.mark.worlds("moe_nvfp4", slow=("moe_bf16", "moe_experts"))
def test_outlier_and_nan_neighbours_change_nothing(world, factor, assert_same_bits):
    tokens, _, _ = world.sequences
    loud = next(token for token in range(world.config.vocab_size) if token not in tokens)
    policy = _with_embedding_row(world.policy, loud, world.policy.weights["embed"][loud] * factor)
    kept = np.arange(len(tokens)) % 3 == 0
    beside_loud = world.score(_neighbours_of(tokens, kept, loud), policy)
    assert_same_bits(beside_loud[kept], world.score(tokens, policy)[kept])
    assert np.isfinite(beside_loud[kept]).all()
    assert np.isnan(beside_loud[~kept]).all() == np.isnan(factor)


@pytest.mark.worlds(slow=("dense_nvfp4",))
def test_outlier_neighbours_change_nothing_where_embeddings_are_tied(world, assert_same_bits):
    assert world.config.tie_word_embeddings
    tokens, _, _ = world.sequences
    loud = next(token for token in range(world.config.vocab_size) if token not in tokens)
    policy = _with_embedding_row(world.policy, loud, world.policy.weights["embed"][loud] * 1e4)
    kept = np.arange(len(tokens)) % 3 == 0
    assert_same_bits(world.score(_neighbours_of(tokens, kept, loud), policy)[kept], world.score(tokens, policy)[kept])


@pytest.mark.worlds("moe_nvfp4")
def test_an_infinite_weight_scale_is_seen_where_it_is_used_and_nowhere_else(world, assert_same_bits):
    """One expert's outer scale is infinite: tokens that were routed to it are NaN or infinite, and all others keep their bits."""
    tokens, _, _ = world.sequences
    layers = list(world.policy.weights["layers"])
    down = layers[-1]["down"]
    layers[-1] = layers[-1] | {"down": dataclasses.replace(down, outer_scale=down.outer_scale.at[3].set(jnp.inf))}
    policy = world.policy.replace(weights=world.policy.weights | {"layers": tuple(layers)})
    broken, whole = world.score(tokens, policy), world.score(tokens)
    finite = np.isfinite(broken)
    assert 0.3 < finite.mean() < 0.95  # 2 of 8 experts are chosen: about three quarters go by the broken one
    assert_same_bits(broken[finite], whole[finite])
