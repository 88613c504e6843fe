"""Which rows belong to which token, in chunks of one size: integers, made once for the gradient of an embedding.

The rows of one token, in the order in which they come, are cut into chunks of CHUNK from the token's first row on. A chunk's
rows are added one after another, then a token's chunks one after another. So the order of a token's sum depends on how many rows
it has, and on nothing else; and a token with 100,000 rows has a chain of CHUNK + 100,000 / CHUNK additions, not of 100,000.
"""

from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp

CHUNK = 128


@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
@flax.struct.dataclass
class Segments:
    """Let M be rows, V the vocabulary, C the most chunks that M rows can have.

    Attributes:
      order: [M] int32, the rows sorted by token, and for one token in the order in which they come.
      chunk_start: [C] int32, where in `order` each chunk begins.
      chunk_size: [C] int32, its number of rows; 0 for chunks that do not exist.
      token_start: [V + 1] int32, number of the first chunk of each token; a token's chunks end where the next token's begin.
    """

    order: jax.Array
    chunk_start: jax.Array
    chunk_size: jax.Array
    token_start: jax.Array


def make_segments(tokens_M: jax.Array, vocab_size: int) -> Segments:
    """Sorts and counts. Tokens must lie in 0..V - 1."""
    num_rows = tokens_M.shape[0]
    order_M = jnp.argsort(tokens_M, stable=True).astype(jnp.int32)
    # Row numbers where each token's rows begin, and the end of the last.
    first_V = jnp.searchsorted(tokens_M[order_M], jnp.arange(vocab_size + 1, dtype=tokens_M.dtype)).astype(jnp.int32)
    chunks_V = -(-(first_V[1:] - first_V[:-1]) // CHUNK)
    token_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks_V, dtype=jnp.int32)])
    chunk_C = jnp.arange(max_chunks(num_rows, vocab_size), dtype=jnp.int32)
    token_C = jnp.minimum(jnp.searchsorted(token_start, chunk_C, side="right").astype(jnp.int32) - 1, vocab_size - 1)
    start_C = first_V[token_C] + (chunk_C - token_start[token_C]) * CHUNK
    size_C = jnp.clip(first_V[token_C + 1] - start_C, 0, CHUNK)
    return Segments(order=order_M, chunk_start=start_C, chunk_size=size_C, token_start=token_start)


def max_chunks(num_rows: int, vocab_size: int) -> int:
    """No token has more than one chunk that is not full."""
    return min(num_rows, vocab_size) + num_rows // CHUNK
