"""Pages and packed rows on a GPU: samples that end and give their pages to others, prompts in chunks, sequences side by side."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import same

import minite_jax as mt
from minite_jax.model import hidden_states, init_cache, scored_tokens, tiny_moe
from minite_jax.rollout import pack_sequences
from pallas_kernels.attention import key_block
from pallas_kernels.log_prob import Truncation

pytestmark = pytest.mark.gpu

VOCABULARY = 1024
# One token in 64 ends a sample: most of 200 tokens or fewer, and pages change hands all the time.
STOP_IDS = tuple(range(0, VOCABULARY, 64))


@functools.cache
def policy_of(head_dim):
    config = tiny_moe(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=head_dim, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
    )  # fmt: skip
    return mt.prepare(mt.init_params(config, jax.random.key(1)), config, mt.recipe("nvfp4"))


def prompts():
    size = key_block()
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in (1, size - 1, size, size + 1, 2 * size, 3 * size + 7)]


def draw(policy, **changes):
    params = mt.SamplingParams(n=8, max_tokens=200, stop_ids=STOP_IDS)
    return mt.sample(policy, prompts(), params, key=jax.random.key(0), **changes)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_samples_that_share_pages_and_take_over_those_of_others(head_dim):
    policy = policy_of(head_dim)
    rollouts = draw(policy)
    tokens, mask, log_probs = rollouts.sequences()
    mask = np.asarray(mask)
    lengths = np.asarray(rollouts.mask).sum(1)
    assert (lengths < 200).sum() > 20 and np.unique(lengths).size > 10
    assert same(np.asarray(mt.token_log_probs(policy, tokens))[mask], np.asarray(log_probs)[mask])
    for chunk in (50, key_block()):
        chunked = draw(policy, prefill_chunk=chunk)
        assert same(chunked.tokens, rollouts.tokens) and same(chunked.log_probs, rollouts.log_probs)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_are_the_sequences_in_rows_of_their_own(head_dim):
    policy = policy_of(head_dim)
    rollouts = draw(policy)
    tokens, mask, log_probs = (np.asarray(x) for x in rollouts.sequences())
    lengths = np.asarray(rollouts.prompt_length) + np.asarray(rollouts.mask).sum(1)
    row_length = -(-2 * tokens.shape[1] // key_block()) * key_block()
    packed = pack_sequences([row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)], row_length)
    assert packed.tokens.shape[0] <= len(tokens) / 2
    score = jax.jit(lambda policy, packed: scored_tokens(policy, packed.tokens, Truncation(), positions=packed.positions)[0])
    unpacked = np.asarray(packed.unpack(score(policy, packed), mask.shape[1]))
    assert same(unpacked[mask], log_probs[mask])
    real = np.arange(mask.shape[1])[None, :] < lengths[:, None] - 1
    assert same(unpacked[real], np.asarray(mt.token_log_probs(policy, jnp.asarray(tokens)))[real])


def test_page_numbers_and_what_pages_held_change_nothing():
    """Pages in no order, with NaN in all of them before."""
    policy = policy_of(128)
    length, chunk = 3 * key_block() - 5, 50
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (3, length)), jnp.int32)
    wanted = np.asarray(jax.jit(hidden_states)(policy, tokens)[0].astype(jnp.float32))
    cache = init_cache(policy.config, policy.recipe, 3, length, num_pages=20)
    poison = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan))
    free = jnp.asarray(np.random.default_rng(2).permutation(20), jnp.int32)
    cache = cache.replace(keys=poison(cache.keys), values=poison(cache.values), pool=cache.pool.replace(free=free))
    advance = jax.jit(lambda policy, tokens, cache: hidden_states(policy, tokens, cache))
    for start in range(0, length, chunk):
        here = slice(start, min(start + chunk, length))
        hidden, cache = advance(policy, tokens[:, here], cache)
        assert same(hidden.astype(jnp.float32), wanted[:, here])
