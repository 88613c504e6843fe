"""Causal grouped-query attention in plain jnp: the specification of the kernels.

The unit of work is one query token with all its heads. A tile is 32 query tokens, each with the key block of its own sequence.
Scores, the softmax's sum and the weighted sum of values are explicit trees over arrays of fixed shape. The kernels cut a long
row of key blocks into chunks, so that several programs can share it, and merge those; here one loop runs over all blocks. So the
two agree up to rounding, not to the bit.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import ordered_sum, round_to
from pallas_kernels.rows import map_row_tiles

# Gradients in full float32: a GPU would otherwise multiply in TF32.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

# Keys per step of the online softmax, counted from the sequence's first token. Part of the definition: another value, other bits.
KEY_BLOCK = 16


def _attend(q_MHK, k_PSNK, v_PSNK, tables_BJ, sequence_M, first_M, position_M):
    """Each token's attention to the slots 0..position of its sequence; block j of token m is page tables[sequence, first + j].

    The one program of a packed pass and of a pass over the cache: only the tables differ.
    """
    num_heads, head_dim = q_MHK.shape[1:]
    num_kv_heads = k_PSNK.shape[2]
    heads_per_kv = num_heads // num_kv_heads
    scale = head_dim**-0.5
    dtype = q_MHK.dtype

    def body(tile):
        q_RHK, sequence_R, first_R, position_R = tile
        rows = q_RHK.shape[0]
        q_KRNG = jnp.moveaxis(q_RHK.astype(jnp.float32).reshape(rows, num_kv_heads, heads_per_kv, head_dim), -1, 0)

        def step(j, state):
            max_RNG, sum_RNG, acc_RNGK = state
            slot_S = j * KEY_BLOCK + jnp.arange(KEY_BLOCK)
            seen_RNGS = (slot_S[None, :] <= position_R[:, None])[:, None, None, :]
            seen_SRNK = (slot_S[:, None] <= position_R[None, :])[:, :, None, None]
            # A tile runs as long as its longest row: for the others, what lies behind their table is read and not seen.
            page_R = tables_BJ.at[sequence_R, first_R + j].get(mode="clip")
            k_KRNS = jnp.transpose(k_PSNK.at[page_R].get(mode="clip").astype(jnp.float32), (3, 0, 2, 1))
            v_SRNK = jnp.swapaxes(v_PSNK.at[page_R].get(mode="clip").astype(jnp.float32), 0, 1)
            v_SRNK = jnp.where(seen_SRNK, v_SRNK, 0.0)  # 0 x NaN is NaN, so a zero weight is not enough

            # The products of two bfloat16 numbers are exact in float32: contraction with the adds cannot change the sums.
            score_RNGS = ordered_sum(q_KRNG[..., None] * k_KRNS[:, :, :, None, :], axis=0) * scale
            score_RNGS = jnp.where(seen_RNGS, score_RNGS, -jnp.inf)
            new_max_RNG = jnp.maximum(max_RNG, jnp.max(score_RNGS, axis=-1))
            # A block without a visible key changes nothing, to the bit: rescale by exactly 1, add exactly 0.
            rescale_RNG = jnp.where(new_max_RNG == max_RNG, 1.0, jnp.exp(max_RNG - new_max_RNG))
            weight_RNGS = jnp.where(seen_RNGS, jnp.exp(score_RNGS - new_max_RNG[..., None]), 0.0)
            sum_RNG = sum_RNG * rescale_RNG + ordered_sum(weight_RNGS)
            weight_SRNG = jnp.moveaxis(round_to(weight_RNGS, dtype).astype(jnp.float32), -1, 0)
            value_RNGK = ordered_sum(weight_SRNG[..., None] * v_SRNK[:, :, :, None, :], axis=0)
            return new_max_RNG, sum_RNG, acc_RNGK * rescale_RNG[..., None] + value_RNGK

        state = (
            jnp.full(q_KRNG.shape[1:], -jnp.inf, jnp.float32),
            jnp.zeros(q_KRNG.shape[1:], jnp.float32),
            jnp.zeros((*q_KRNG.shape[1:], head_dim), jnp.float32),
        )
        num_blocks = jnp.max(position_R) // KEY_BLOCK + 1
        _, sum_RNG, acc_RNGK = lax.fori_loop(0, num_blocks, step, state)
        sum_RNG = jnp.where(sum_RNG == 0.0, 1.0, sum_RNG)  # of a token that attends nothing; one that does has 1 at least
        return round_to(acc_RNGK / sum_RNG[..., None], dtype).reshape(rows, num_heads, head_dim)

    return map_row_tiles(body, (q_MHK, sequence_M, first_M, position_M))


def _rows_of(q_BTHK):
    """Tokens as rows [B T, H, K], and the row of the batch that each lies in."""
    batch, length = q_BTHK.shape[:2]
    return q_BTHK.reshape(batch * length, *q_BTHK.shape[2:]), jnp.repeat(jnp.arange(batch), length)


def attention(q_BTHK, k_BTNK, v_BTNK, positions_BT):
    """See `api.attention`. Also returns None, for the log-sum-exp that this backward computes again."""
    batch, length = positions_BT.shape
    blocks = -(-length // KEY_BLOCK)

    def pages(x_BTNK):
        x = jnp.pad(x_BTNK, [(0, 0), (0, blocks * KEY_BLOCK - length), (0, 0), (0, 0)])
        return x.reshape(batch * blocks, KEY_BLOCK, *x.shape[2:])

    tables_BJ = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    first_BT = (jnp.arange(length)[None, :] - positions_BT) // KEY_BLOCK
    q_MHK, row_M = _rows_of(q_BTHK)
    out_MHK = _attend(q_MHK, pages(k_BTNK), pages(v_BTNK), tables_BJ, row_M, first_BT.reshape(-1), positions_BT.reshape(-1))
    return out_MHK.reshape(q_BTHK.shape), None


def paged_attention(q_BTHK, k_PSNK, v_PSNK, tables_BJ, positions_BT):
    """See `api.paged_attention`."""
    q_MHK, sequence_M = _rows_of(q_BTHK)
    first_M = jnp.zeros_like(sequence_M)
    out_MHK = _attend(q_MHK, k_PSNK, v_PSNK, tables_BJ, sequence_M, first_M, positions_BT.reshape(-1))
    return out_MHK.reshape(q_BTHK.shape)


def attention_backward(q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse, g_BTHK):
    """Gradients of q, k, v, straight through the roundings. Holds the scores of one batch: [B, N, H / N, T, T] float32."""
    del out_BTHK, lse  # what the kernels keep in place of scores
    batch, length, num_heads, head_dim = q_BTHK.shape
    num_kv_heads = k_BTNK.shape[2]
    grouped = (batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scale = head_dim**-0.5
    q_BTNGK = q_BTHK.astype(jnp.float32).reshape(grouped)
    g_BTNGK = g_BTHK.astype(jnp.float32).reshape(grouped)
    token_T = jnp.arange(length)
    behind_TS = token_T[:, None] - token_T[None, :]
    seen_BTS = (behind_TS >= 0)[None] & (behind_TS[None] <= positions_BT[:, :, None])
    k_BSNK, v_BSNK = k_BTNK.astype(jnp.float32), v_BTNK.astype(jnp.float32)

    score_BNGTS = _einsum("btngk,bsnk->bngts", q_BTNGK, k_BSNK) * scale
    score_BNGTS = jnp.where(seen_BTS[:, None, None], score_BNGTS, -jnp.inf)
    prob_BNGTS = jnp.exp(score_BNGTS - jnp.max(score_BNGTS, axis=-1, keepdims=True))
    prob_BNGTS = prob_BNGTS / jnp.sum(prob_BNGTS, axis=-1, keepdims=True)

    dv_BSNK = _einsum("bngts,btngk->bsnk", prob_BNGTS, g_BTNGK)
    dprob_BNGTS = _einsum("btngk,bsnk->bngts", g_BTNGK, v_BSNK)
    dscore_BNGTS = prob_BNGTS * (dprob_BNGTS - jnp.sum(prob_BNGTS * dprob_BNGTS, axis=-1, keepdims=True)) * scale
    dq_BTHK = _einsum("bngts,bsnk->btngk", dscore_BNGTS, k_BSNK).reshape(q_BTHK.shape)
    dk_BSNK = _einsum("bngts,btngk->bsnk", dscore_BNGTS, q_BTNGK)
    return dq_BTHK.astype(q_BTHK.dtype), dk_BSNK.astype(k_BTNK.dtype), dv_BSNK.astype(v_BTNK.dtype)
