"""C2: sequences packed into rows give the bits that each has alone in a row, and the same gradient up to its sums' order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.model import hidden_states, init_cache, scored_tokens
from minite_jax.rollout import pack_sequences
from pallas_kernels.attention import key_block
from pallas_kernels.log_prob import Truncation

score = jax.jit(lambda policy, tokens, positions: scored_tokens(policy, tokens, Truncation(), positions=positions))


def _packed(world):
    """The world's 20 sequences of 2 to 25 tokens, packed, and the mask of their log-probs in rows of their own [20, 31]."""
    tokens_BT, _, _ = world.sequences
    sequences = [row[:length].tolist() for row, length in zip(tokens_BT, world.lengths, strict=True)]
    packed = pack_sequences(sequences, 4 * key_block())
    assert packed.tokens.shape[0] <= 10 and (np.asarray(packed.start) > 0).sum() >= 10
    return packed, np.arange(tokens_BT.shape[1] - 1)[None, :] < world.lengths[:, None] - 1


@pytest.mark.worlds("dense_nvfp4", slow=("moe_nvfp4", "moe_bf16", "moe_experts"))
def test_packed_sequences_have_the_bits_of_rows_of_their_own(world, assert_same_bits):
    packed, real_BT = _packed(world)
    log_probs_RT, _ = score(world.policy, packed.tokens, packed.positions)
    unpacked_BT = np.asarray(packed.unpack(log_probs_RT, real_BT.shape[1]))
    assert_same_bits(unpacked_BT[real_BT], world.score(world.sequences[0])[real_BT])
    assert not unpacked_BT[~real_BT].any()
    assert (unpacked_BT[real_BT] < 0).all()


@pytest.mark.worlds(slow=("dense_fp32",))
def test_gradients_of_packed_sequences(world):
    packed, real_BT = _packed(world)
    weight_BT = jnp.where(real_BT, jnp.asarray(np.random.default_rng(7).standard_normal(real_BT.shape), jnp.float32), 0.0)

    @jax.jit
    def gradients(params, tokens, positions, place):
        def loss(params):
            log_probs, _ = scored_tokens(world.policy.with_masters(params), tokens, Truncation(), positions=positions)
            return jnp.sum(place(log_probs) * weight_BT)

        return jax.grad(loss)(params)

    alone = gradients(world.params, jnp.asarray(world.sequences[0]), None, jax.tree_util.Partial(lambda x: x))
    unpack = jax.tree_util.Partial(lambda packed, x: packed.unpack(x, real_BT.shape[1]), packed)
    together = gradients(world.params, packed.tokens, packed.positions, unpack)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        # Float32 sums over at most 640 tokens in another order; an error grows by a few layers' products.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(np.asarray(a)).max())


@pytest.mark.worlds("dense_nvfp4")
def test_positions_beside_a_cache_are_refused(world):
    cache = init_cache(world.config, world.recipe, 1, 16)
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="positions beside a cache: its tokens follow those that it holds; leave positions out"):
        hidden_states(world.policy, tokens, cache, positions=tokens)
