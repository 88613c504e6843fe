"""The key/value cache: one slot per position, counted from each sequence's own start."""

from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minite_jax.model.config import ModelConfig
from minite_jax.precision.recipe import Recipe


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class KVCache:
    """Keys and values of B sequences, S slots each.

    Slot s of a sequence holds position s. Slots at and behind `length` may hold anything (NaN included): no query reads them.

    Attributes:
      keys: per layer [B, S, N, K], after norm and rotation.
      values: per layer [B, S, N, K].
      length: [B] int32, slots in use.
    """

    keys: tuple[Float[Array, "B S N K"], ...]
    values: tuple[Float[Array, "B S N K"], ...]
    length: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    def repeat(self, n: int) -> "KVCache":
        """Each sequence n times in a row: n samples from one prefill."""
        return jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), self)


def init_cache(config: ModelConfig, recipe: Recipe, batch: int, capacity: int) -> KVCache:
    """An empty cache for `batch` sequences of at most `capacity` tokens."""
    shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
    blank = tuple(jnp.zeros(shape, recipe.compute_dtype) for _ in range(config.num_hidden_layers))
    return KVCache(keys=blank, values=blank, length=jnp.zeros((batch,), jnp.int32))


def write(
    cache_BSNK: Float[Array, "B S N K"], new_BTNK: Float[Array, "B T N K"], slots_BT: Int[Array, "B T"]
) -> Float[Array, "B S N K"]:
    """Puts T new entries into their slots; entries whose slot lies behind the capacity (padding) are dropped."""
    sequence_B1 = jnp.arange(cache_BSNK.shape[0])[:, None]
    return cache_BSNK.at[sequence_B1, slots_BT].set(new_BTNK, mode="drop")
