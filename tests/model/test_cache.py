"""The cache's bookkeeping: random sequences of growing, forking and finishing against a plain model of it."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.model import init_cache, pages_for_samples, tiny_dense
from minite_jax.model.cache import write
from pallas_kernels.attention import key_block

CONFIG = tiny_dense(num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
RECIPE = mt.recipe("fp32")
SIZE = key_block()
CAPACITY = 5 * SIZE


@functools.partial(jax.jit, static_argnames="most")
def _grow(cache, values_BT, num_new_B, most):
    """Each sequence gets `num_new` more tokens, whose keys and values are the numbers given."""
    positions_BT = cache.length[:, None] + jnp.arange(most)[None, :]
    cache = cache.extend(num_new_B, most)
    new_BTNK = jnp.broadcast_to(values_BT[:, :, None, None], (*values_BT.shape, 1, 16))
    put = lambda pages: write(pages, new_BTNK, cache.slots(positions_BT))  # noqa: E731
    return cache.replace(keys=tuple(map(put, cache.keys)), values=tuple(map(put, cache.values)))


_fork = jax.jit(lambda cache, n: cache.fork(n), static_argnames="n")
_release = jax.jit(lambda cache, done_B: cache.release(done_B))


def _poisoned(cache):
    poison = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan))
    return cache.replace(keys=poison(cache.keys), values=poison(cache.values))


def _check(cache, sequences):
    """The cache holds exactly these sequences (lists of numbers), and every page is accounted for."""
    pool = cache.pool
    tables, num_free = np.asarray(cache.tables), int(pool.num_free)
    assert not cache.overdrawn()
    np.testing.assert_array_equal(cache.length, [len(s) for s in sequences])
    assert tables.min() >= 0 and tables.max() < pool.num_pages

    users = collections.Counter()
    writers = collections.Counter()
    for row, sequence in enumerate(sequences):
        pages = tables[row, : -(-len(sequence) // SIZE)]
        assert len(set(pages.tolist())) == len(pages)
        users.update(pages.tolist())
        if len(sequence) % SIZE:
            writers[int(pages[-1])] += 1
        for held in (*cache.keys, *cache.values):
            slots = np.asarray(held)[pages].reshape(-1, 16)[: len(sequence)]
            np.testing.assert_array_equal(slots, np.repeat(np.float32(sequence), 16).reshape(-1, 16))
    assert all(users[page] == 1 for page in writers)  # a page that will be written has one user
    np.testing.assert_array_equal(pool.users, [users[page] for page in range(pool.num_pages)])
    free = np.asarray(pool.free)[:num_free].tolist()
    assert sorted([*free, *users]) == list(range(pool.num_pages))  # each page once: free, or somebody's


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_accounted_for(seed):
    """Prompts in chunks, a fork, samples that grow and finish at random, new ones in their rows."""
    rng = np.random.default_rng(seed)
    prompts, n, most = 3, 4, SIZE + 3
    num_pages = prompts * n * CAPACITY // SIZE
    cache = _poisoned(init_cache(CONFIG, RECIPE, prompts, CAPACITY, num_pages=num_pages))
    sequences = [[] for _ in range(prompts)]
    number = iter(range(1, 10**6))

    def grow(cache, longest):
        room = [min(most, longest - len(s)) for s in sequences]
        num_new = np.array([rng.choice([0, 1, SIZE, rng.integers(0, most + 1)]) for _ in sequences]).clip(max=room)
        values = np.array([[next(number) for _ in range(most)] for _ in sequences], np.float32)
        for sequence, row, count in zip(sequences, values, num_new, strict=True):
            sequence.extend(row[:count].tolist())
        cache = _grow(cache, values, num_new.astype(np.int32), most)
        _check(cache, sequences)
        return cache

    for _ in range(3):
        cache = grow(cache, 2 * SIZE + most)
    cache = _fork(cache, n)
    sequences = [list(s) for s in sequences for _ in range(n)]
    _check(cache, sequences)
    for _ in range(12):
        cache = grow(cache, CAPACITY)
        done = rng.random(len(sequences)) < 0.25
        sequences = [[] if d else s for d, s in zip(done, sequences, strict=True)]
        cache = _release(cache, done)
        _check(cache, sequences)
    cache = _release(cache, np.ones(len(sequences), bool))
    assert cache.pool.num_free == num_pages


def test_full_pages_of_a_prompt_are_shared_and_the_last_one_is_copied():
    cache = _poisoned(init_cache(CONFIG, RECIPE, 2, CAPACITY, num_pages=pages_for_samples(2, 3, 2 * SIZE + 1, SIZE)))
    lengths = np.array([2 * SIZE + 1, SIZE], np.int32)  # a partly filled page, and none
    values = np.arange(2 * (2 * SIZE + 1), dtype=np.float32).reshape(2, -1)
    cache = _fork(_grow(cache, values, lengths, 2 * SIZE + 1), 3)
    tables = np.asarray(cache.tables)
    assert (tables[:3, :2] == tables[0, :2]).all() and len(set(tables[:3, 2].tolist())) == 3
    assert (tables[3:, :1] == tables[3, :1]).all()
    assert int(cache.pool.num_pages - cache.pool.num_free) == 2 + 3 + 1
    _check(cache, [values[row, :length].tolist() for row, length in enumerate(lengths) for _ in range(3)])


def test_the_pool_of_samples_is_as_large_as_they_can_need_and_no_larger():
    """Every length of prompt and sample, all samples at their longest: never overdrawn, and the bound is reached."""
    n, prompt_tokens, new_tokens = 3, 2 * SIZE - 1, SIZE + 2
    num_pages = pages_for_samples(1, n, prompt_tokens, new_tokens)
    needed = [length // SIZE + n * (-(-(length + new_tokens) // SIZE) - length // SIZE) for length in range(1, prompt_tokens + 1)]
    assert max(needed) == num_pages
    # The longest of them, in fact.
    length = 1 + int(np.argmax(needed))
    cache = init_cache(CONFIG, RECIPE, 1, prompt_tokens + new_tokens, num_pages=num_pages)
    cache = _grow(cache, np.ones((1, prompt_tokens), np.float32), np.array([length], np.int32), prompt_tokens)
    cache = _grow(_fork(cache, n), np.ones((n, new_tokens), np.float32), np.full(n, new_tokens, np.int32), new_tokens)
    assert cache.pool.num_free == 0 and not cache.overdrawn()


def test_a_pool_that_ran_out_says_so_for_good():
    cache = init_cache(CONFIG, RECIPE, 2, CAPACITY, num_pages=3)
    values, counts = np.ones((2, SIZE), np.float32), np.full(2, SIZE, np.int32)
    cache = _grow(cache, values, counts, SIZE)
    assert not cache.overdrawn()
    cache = _grow(cache, values, counts, SIZE)
    assert cache.overdrawn()
    assert _release(cache, np.ones(2, bool)).overdrawn()
    assert 0 <= int(cache.tables.min()) and int(cache.tables.max()) < 3
