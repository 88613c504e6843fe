"""C3: a full forward, chunks of a prefill and single tokens through a cache give the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.model import hidden_states, init_cache
from minite_jax.model.forward import output_head
from pallas_kernels.attention import key_block
from pallas_kernels.log_prob import Truncation, token_log_prob

full_forward = jax.jit(hidden_states)
advance = jax.jit(lambda policy, tokens, cache, num_new: hidden_states(policy, tokens, cache, num_new=num_new))


@jax.jit
def log_probs_of_hidden(policy, hidden_BTD, tokens_BT):
    """Log-probs of tokens 1..T-1 from hidden states, however those were made."""
    rows_MD = hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1])
    log_prob_M, _ = token_log_prob(rows_MD, output_head(policy).stored, tokens_BT[:, 1:].reshape(-1), Truncation())
    return log_prob_M.reshape(tokens_BT.shape[0], -1)


def poisoned_cache(world, batch, capacity, num_pages=None):
    """A cache whose slots hold NaN, and whose pool gives out its pages in no order."""
    cache = init_cache(world.config, world.recipe, batch, capacity, num_pages=num_pages)
    poison = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan))
    free = jnp.asarray(np.random.default_rng(8).permutation(cache.pool.num_pages), jnp.int32)
    return cache.replace(keys=poison(cache.keys), values=poison(cache.values), pool=cache.pool.replace(free=free))


def through_cache(world, tokens_BT, lengths_B, chunk):
    """Hidden states [B, T, D] of rows of unequal length, `chunk` tokens at a time, and the cache at the end."""
    batch, slots = tokens_BT.shape
    cache = poisoned_cache(world, batch, slots)
    padded_BT = np.pad(tokens_BT, [(0, 0), (0, -slots % chunk)], constant_values=9)
    hidden = []
    for start in range(0, slots, chunk):
        num_new_B = jnp.asarray(np.clip(lengths_B - start, 0, chunk), jnp.int32)
        hidden_BTD, cache = advance(world.policy, jnp.asarray(padded_BT[:, start : start + chunk]), cache, num_new_B)
        hidden.append(hidden_BTD)
    return jnp.concatenate(hidden, axis=1)[:, :slots], cache


@pytest.fixture(scope="module")
def rows(request):
    """Five rows of a world's batch: one has 32 tokens, so that the cache of 32 slots is exactly full; the others end before."""

    def make(world):
        tokens_BT = np.array(world.sequences[0][::4])
        rng = np.random.default_rng(3)
        lengths_B = np.array([1, 9, 16, 17, tokens_BT.shape[1]])
        tokens_BT[-1] = rng.integers(0, world.config.vocab_size, tokens_BT.shape[1])
        return tokens_BT, lengths_B

    return make


def _assert_as_full_forward(world, rows, chunk, assert_same_bits):
    tokens_BT, lengths_B = rows(world)
    hidden_BTD, cache = through_cache(world, tokens_BT, lengths_B, chunk)
    wanted_BTD, _ = full_forward(world.policy, jnp.asarray(tokens_BT))
    real_BT = np.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None]
    assert_same_bits(np.asarray(hidden_BTD)[real_BT], np.asarray(wanted_BTD)[real_BT])
    np.testing.assert_array_equal(cache.length, lengths_B)
    assert cache.capacity - cache.length[-1] < cache.page_size  # no page to spare; with pages of 16 exactly full

    scored_BT = world.score(world.sequences[0])  # the compiled batch shape
    assert np.isfinite(scored_BT).all()
    filled = np.asarray(world.sequences[0]).copy()
    filled[: len(tokens_BT)] = tokens_BT
    log_probs_BT = np.asarray(log_probs_of_hidden(world.policy, hidden_BTD, jnp.asarray(tokens_BT)))
    assert_same_bits(log_probs_BT[real_BT[:, 1:]], world.score(filled)[: len(tokens_BT)][real_BT[:, 1:]])


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.worlds(slow=("moe_bf16",))
def test_prefill_in_chunks_and_single_tokens_are_the_full_forward(world, chunk, rows, assert_same_bits):
    _assert_as_full_forward(world, rows, chunk, assert_same_bits)


@pytest.mark.worlds("dense_nvfp4", slow=("moe_nvfp4",))
def test_chunks_of_five_are_the_full_forward_in_nvfp4(world, rows, assert_same_bits):
    """Single tokens are what the sampler runs, see `test_sampling`."""
    _assert_as_full_forward(world, rows, 5, assert_same_bits)


@pytest.mark.worlds(slow=("dense_nvfp4",))
def test_chunks_of_a_prefill_and_samples_from_one_prefill(world, assert_same_bits):
    """One sample from a prefill of its own, in chunks of 5, is sample 0 of the four that share a prefill."""
    sampling = mt.SamplingParams(n=1, max_tokens=world.sampling.max_tokens, stop_ids=world.sampling.stop_ids)
    alone = mt.sample(world.policy, world.prompts, sampling, key=jax.random.key(0), prefill_chunk=5)
    first = jax.tree.map(lambda x: x[:: world.sampling.n], world.rollouts)
    assert_same_bits((alone.tokens, alone.log_probs, alone.mask), (first.tokens, first.log_probs, first.mask))


@pytest.mark.worlds(slow=("dense_nvfp4", "moe_bf16"))
def test_samples_share_pages_and_take_those_of_finished_ones(world, assert_same_bits):
    """Two prompts, two samples of each, a pool that has room for all only after two of them have finished."""
    size = key_block()
    prompt, last, capacity = size + 3, 2 * size + 2, 4 * size
    rng = np.random.default_rng(9)
    tokens_BT = np.repeat(rng.integers(0, world.config.vocab_size, (2, capacity)), 2, axis=0).astype(np.int32)
    tokens_BT[:, prompt:] = rng.integers(0, world.config.vocab_size, (4, capacity - prompt))
    wanted_BTD, _ = full_forward(world.policy, jnp.asarray(tokens_BT))

    cache = poisoned_cache(world, 2, capacity, num_pages=2 * (1 + 2 * 2))
    _, cache = advance(world.policy, jnp.asarray(tokens_BT[::2, :prompt]), cache, jnp.full(2, prompt, jnp.int32))
    cache = jax.jit(lambda cache: cache.fork(2))(cache)
    tables = np.asarray(cache.tables)
    assert (tables[::2, 0] == tables[1::2, 0]).all() and len(set(tables[:, :2].reshape(-1).tolist())) == 6

    finished_B = np.zeros(4, bool)
    had = set()
    for start in range(prompt, capacity, size):
        if start > last:
            finished_B = np.array([True, False, False, True])
            had = had or set(np.asarray(cache.tables)[finished_B, 1:3].reshape(-1).tolist())
            cache = jax.jit(lambda cache, done: cache.release(done))(cache, jnp.asarray(finished_B))
        here = slice(start, start + size)
        new_BT = np.pad(tokens_BT[:, here], [(0, 0), (0, size - tokens_BT[:, here].shape[1])])
        num_new_B = np.where(finished_B, 0, min(size, capacity - start)).astype(np.int32)
        hidden_BTD, cache = advance(world.policy, jnp.asarray(new_BT), cache, jnp.asarray(num_new_B))
        hidden_BTD = np.asarray(hidden_BTD)[:, : num_new_B.max()]
        assert_same_bits(hidden_BTD[~finished_B], np.asarray(wanted_BTD)[~finished_B, here])
    assert had & set(np.asarray(cache.tables)[~finished_B, 3].tolist()) and not cache.overdrawn()
    # The prompts' full pages still have a user each.
    assert (np.asarray(cache.pool.users)[tables[::2, 0]] == 1).all()


@pytest.mark.worlds(slow=("moe_nvfp4",))
def test_layers_in_a_loop_and_one_after_another(world, assert_same_bits):
    """The first is the default on a CPU, the second on a GPU."""
    tokens_BT = jnp.asarray(world.sequences[0][:5, :20])
    run = jax.jit(functools.partial(hidden_states, scan_layers=False))
    assert_same_bits(run(world.policy, tokens_BT)[0], full_forward(world.policy, tokens_BT)[0])
    hidden, cache = run(world.policy, tokens_BT, init_cache(world.config, world.recipe, 5, 20))
    again, looped = jax.jit(hidden_states)(world.policy, tokens_BT, init_cache(world.config, world.recipe, 5, 20))
    assert_same_bits((hidden, cache), (again, looped))


@pytest.mark.worlds("dense_nvfp4")
def test_a_cache_with_too_few_pages_answers_nan(world):
    # Shapes of the chunks of 5, which another test has compiled. One page is left.
    cache = poisoned_cache(world, 5, world.sequences[0].shape[1])
    cache = cache.replace(pool=cache.pool.replace(num_free=jnp.int32(1)))
    tokens, counts = jnp.zeros((5, 5), jnp.int32), jnp.full(5, 5, jnp.int32)
    hidden_BTD, cache = advance(world.policy, tokens, cache, counts)
    assert cache.overdrawn() and np.isnan(np.asarray(hidden_BTD, np.float32)).all()


@pytest.mark.worlds("dense_nvfp4")
def test_tokens_that_a_cache_cannot_hold_are_refused(world):
    size = key_block()
    cache = init_cache(world.config, world.recipe, 1, size)
    wanted = f"{size + 1} tokens do not fit a cache of {size} slots; make the cache larger or the prompt shorter"
    with pytest.raises(ValueError, match=wanted):
        hidden_states(world.policy, jnp.zeros((1, size + 1), jnp.int32), cache)
