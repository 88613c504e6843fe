"""The key/value cache: pages of one key block each, tables that say which sequence has which page, and the pool of free ones.

    cache = init_cache(config, recipe, batch=2, capacity=512)
    _, cache = hidden_states(policy, prompts, cache)    # takes pages as the sequences grow
    cache = cache.fork(8)                               # 8 samples of each: full pages are shared
    cache = cache.release(done)                         # pages that nobody has any more are free for others

Everything is arrays of fixed shape and pure functions, for use inside jit and `lax.while_loop`; nothing asks the host. Let B be
sequences, J pages of a sequence at most, P pages of the pool, S slots of a page, N key/value heads, K the head dimension.
"""

from typing import no_type_check

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from minite_jax.model.config import ModelConfig
from minite_jax.precision.recipe import Recipe
from pallas_kernels.attention import key_block

# No sum of pages that come back makes this positive again.
_OVERDRAWN = -(2**30)


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class PagePool:
    """Which pages are free, and how many sequences have each of the others.

    Attributes:
      free: [P] int32, a stack: its first `num_free` numbers are the free pages.
      num_free: [] int32. Below zero for good once more pages were asked for than there were.
      users: [P] int32, sequences that have the page in their table; 0 for a free page.
    """

    free: Int[Array, "P"]
    num_free: Int[Array, ""]
    users: Int[Array, "P"]

    @property
    def num_pages(self) -> int:
        return self.free.shape[0]

    def take(self, wanted: Bool[Array, "..."]) -> tuple[Int[Array, "..."], "PagePool"]:
        """A page, with one user, for every True; P, which is no page, for every False."""
        taken = jnp.cumsum(wanted.reshape(-1), dtype=jnp.int32).reshape(wanted.shape)
        page = jnp.where(wanted, self.free[jnp.maximum(self.num_free - taken, 0)], self.num_pages)
        left = self.num_free - jnp.sum(wanted, dtype=jnp.int32)
        pool = self.replace(num_free=jnp.where(left < 0, _OVERDRAWN, left), users=self.users.at[page].set(1, mode="drop"))
        return page, pool

    def share(self, pages: Int[Array, "..."], count: int) -> "PagePool":
        """`count` more users of every page in `pages`; P is no page."""
        return self.replace(users=self.users.at[pages].add(count, mode="drop"))

    def give_back(self, pages: Int[Array, "..."]) -> "PagePool":
        """One user less of every page, as often as `pages` names it; P is no page. Pages without users are free."""
        users = self.users.at[pages].add(-1, mode="drop")
        freed_P = (self.users > 0) & (users == 0)
        freed = jnp.cumsum(freed_P, dtype=jnp.int32)
        place_P = jnp.where(freed_P, jnp.maximum(self.num_free, 0) + freed - 1, self.num_pages)
        free = self.free.at[place_P].set(jnp.arange(self.num_pages, dtype=jnp.int32), mode="drop")
        return PagePool(free=free, num_free=self.num_free + freed[-1], users=users)


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class PagedCache:
    """Keys and values of B sequences in pages.

    Slot s of a sequence holds position s and lies in page ``tables[b, s // S]`` at place ``s % S``. Free pages, and slots at and
    behind `length`, may hold anything (NaN included): no query reads them. Full pages may belong to several sequences; a page
    that is written has one user.

    Attributes:
      keys: per layer [P, S, N, K], after norm and rotation.
      values: per layer [P, S, N, K].
      tables: [B, J] int32, always numbers of pages; those behind a sequence's last page mean nothing.
      length: [B] int32, slots in use.
      pool: the free pages.
    """

    keys: tuple[Float[Array, "P S N K"], ...]
    values: tuple[Float[Array, "P S N K"], ...]
    tables: Int[Array, "B J"]
    length: Int[Array, "B"]
    pool: PagePool

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence."""
        return self.tables.shape[1] * self.page_size

    def _pages_of(self, length_B):
        return jnp.minimum(-(-length_B // self.page_size), self.tables.shape[1])

    def _used(self, length_B):
        """The table with P, which is no page, in place of entries that mean nothing."""
        used_BJ = jnp.arange(self.tables.shape[1])[None, :] < self._pages_of(length_B)[:, None]
        return jnp.where(used_BJ, self.tables, self.pool.num_pages)

    def extend(self, num_new: Int[Array, "B"], most: int) -> "PagedCache":
        """Makes room for `num_new` more tokens of each sequence, at most `most`, and counts them as in use.

        Tokens behind the capacity have no slot. Where the pool has too few pages, `overdrawn` says so from here on.
        """
        length_B = self.length + num_new
        first_B1 = self._pages_of(self.length)[:, None]
        # So many pages can `most` tokens need, wherever the first of them stands.
        column_BW = first_B1 + jnp.arange(-(-most // self.page_size))[None, :]
        page_BW, pool = self.pool.take(column_BW < self._pages_of(length_B)[:, None])
        column_BW = jnp.where(page_BW < pool.num_pages, column_BW, self.tables.shape[1])
        tables_BJ = self.tables.at[jnp.arange(self.tables.shape[0])[:, None], column_BW].set(page_BW, mode="drop")
        return self.replace(tables=tables_BJ, length=length_B, pool=pool)

    def slots(self, positions: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Page and place of each position; page P, which is none, for positions that are not in use."""
        page_BT = jnp.take_along_axis(self.tables, jnp.minimum(positions // self.page_size, self.tables.shape[1] - 1), axis=1)
        in_use_BT = positions < jnp.minimum(self.length, self.capacity)[:, None]
        return jnp.where(in_use_BT, page_BT, self.pool.num_pages), positions % self.page_size

    def overdrawn(self) -> Bool[Array, ""]:
        """Whether more pages were asked for than the pool had: contents are worthless then."""
        return self.pool.num_free < 0

    def fork(self, n: int) -> "PagedCache":
        """Each sequence n times in a row: n samples of one prompt.

        All have the prompt's full pages. The last page, if it is partly filled, will be written: the first sample keeps it and
        the others get copies.
        """
        batch = self.tables.shape[0]
        pool = self.pool.share(self._used(self.length // self.page_size * self.page_size), n - 1)
        column_B1 = (self.length // self.page_size)[:, None]
        partial_B1 = (self.length % self.page_size != 0)[:, None] & (column_B1 < self.tables.shape[1])
        old_B1 = jnp.take_along_axis(self.tables, jnp.minimum(column_B1, self.tables.shape[1] - 1), axis=1)
        copied_BG = jnp.broadcast_to(partial_B1, (batch, n)) & (jnp.arange(n) > 0)[None, :]
        page_BG, pool = pool.take(copied_BG)
        source_C = jnp.broadcast_to(old_B1, (batch, n)).reshape(-1)
        copy = lambda pages: pages.at[page_BG.reshape(-1)].set(pages[source_C], mode="drop")  # noqa: E731

        column_C1 = jnp.where(copied_BG, column_B1, self.tables.shape[1]).reshape(-1, 1)
        tables_CJ = jnp.repeat(self.tables, n, axis=0)
        tables_CJ = tables_CJ.at[jnp.arange(batch * n)[:, None], column_C1].set(page_BG.reshape(-1, 1), mode="drop")
        return PagedCache(
            keys=tuple(map(copy, self.keys)) if n > 1 else self.keys,
            values=tuple(map(copy, self.values)) if n > 1 else self.values,
            tables=tables_CJ,
            length=jnp.repeat(self.length, n),
            pool=pool,
        )

    def release(self, done: Bool[Array, "B"]) -> "PagedCache":
        """Empties the sequences that are done. A page goes back to the pool with the last sequence that had it."""
        pages_BJ = jnp.where(done[:, None], self._used(self.length), self.pool.num_pages)
        return self.replace(length=jnp.where(done, 0, self.length), pool=self.pool.give_back(pages_BJ))


def init_cache(config: ModelConfig, recipe: Recipe, batch: int, capacity: int, *, num_pages: int | None = None) -> PagedCache:
    """An empty cache for `batch` sequences of at most `capacity` tokens (rounded up to whole pages).

    Args:
      config: model shape.
      recipe: gives the type of keys and values.
      batch: sequences before `PagedCache.fork`.
      capacity: tokens.
      num_pages: pages of the pool; None: as many as `batch` sequences of full length need. A pool for forked sequences is sized
        by `pages_for_samples`.
    """
    page_size = key_block()
    columns = -(-capacity // page_size)
    num_pages = batch * columns if num_pages is None else num_pages
    shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
    blank = tuple(jnp.zeros(shape, recipe.compute_dtype) for _ in range(config.num_hidden_layers))
    pool = PagePool(
        free=jnp.arange(num_pages, dtype=jnp.int32)[::-1],
        num_free=jnp.int32(num_pages),
        users=jnp.zeros((num_pages,), jnp.int32),
    )
    return PagedCache(
        keys=blank,
        values=blank,
        tables=jnp.zeros((batch, columns), jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
        pool=pool,
    )


def pages_for_samples(num_prompts: int, n: int, prompt_tokens: int, new_tokens: int) -> int:
    """The most pages that `n` samples of each prompt can have at once: enough whatever the lengths turn out to be.

    Args:
      num_prompts: prompts, each of at most `prompt_tokens` tokens.
      n: samples of each prompt, from one prefill.
      prompt_tokens: at most in a prompt.
      new_tokens: at most in a sample.
    """
    page_size = key_block()
    shared = prompt_tokens // page_size
    # Behind the prompt's full pages: a page that the prompt has begun with all but one of its slots, and the sample's own.
    own = -(-(page_size - 1 + new_tokens) // page_size)
    unshared = -(-(prompt_tokens + new_tokens) // page_size)
    return num_prompts * min(shared + n * own, n * unshared)


def write(
    pages_PSNK: Float[Array, "P S N K"],
    new_BTNK: Float[Array, "B T N K"],
    slots: tuple[Int[Array, "B T"], Int[Array, "B T"]],
) -> Float[Array, "P S N K"]:
    """Puts entries into their slots, see `PagedCache.slots`; those that have none (padding) are dropped."""
    return pages_PSNK.at[slots].set(new_BTNK, mode="drop")
