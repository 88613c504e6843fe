"""Causal grouped-query attention in plain jnp: the specification of the kernels.

The unit of work is one query token with all its heads. A tile is 32 query tokens, each with the key block of its own sequence.
Scores, the softmax's sum and the weighted sum of values are explicit trees over arrays of fixed shape.
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


def _key_blocks(x_BSNK):
    """[B, S, N, K] -> [B, S / KEY_BLOCK, KEY_BLOCK, N, K], filled up with zeros."""
    batch, slots, *rest = x_BSNK.shape
    blocks = -(-slots // KEY_BLOCK)
    x = jnp.pad(x_BSNK, [(0, 0), (0, blocks * KEY_BLOCK - slots), (0, 0), (0, 0)])
    return x.reshape(batch, blocks, KEY_BLOCK, *rest)


def attention(q_BTHK, k_BSNK, v_BSNK, positions_BT):
    batch, length, num_heads, head_dim = q_BTHK.shape
    num_kv_heads = k_BSNK.shape[2]
    heads_per_kv = num_heads // num_kv_heads
    scale = head_dim**-0.5
    dtype = q_BTHK.dtype
    k_blocks, v_blocks = _key_blocks(k_BSNK), _key_blocks(v_BSNK)

    def body(tile):
        q_RHK, sequence_R, position_R = tile
        rows = q_RHK.shape[0]
        q_KRNG = jnp.moveaxis(q_RHK.astype(jnp.float32).reshape(rows, num_kv_heads, heads_per_kv, head_dim), -1, 0)

        def step(j, state):
            max_RNG, sum_RNG, acc_RNGK = state
            slot_S = j * KEY_BLOCK + jnp.arange(KEY_BLOCK)
            seen_RNGS = (slot_S[None, :] <= position_R[:, None])[:, None, None, :]
            seen_SRNK = (slot_S[:, None] <= position_R[None, :])[:, :, None, None]
            k_KRNS = jnp.transpose(k_blocks[sequence_R, j].astype(jnp.float32), (3, 0, 2, 1))
            v_SRNK = jnp.swapaxes(v_blocks[sequence_R, j].astype(jnp.float32), 0, 1)
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
        return round_to(acc_RNGK / sum_RNG[..., None], dtype).reshape(rows, num_heads, head_dim)

    tokens = batch * length
    sequence_M = jnp.repeat(jnp.arange(batch), length)
    out_MHK = map_row_tiles(body, (q_BTHK.reshape(tokens, num_heads, head_dim), sequence_M, positions_BT.reshape(tokens)))
    return out_MHK.reshape(batch, length, num_heads, head_dim)


def attention_gradients(q_BTHK, k_BSNK, v_BSNK, positions_BT, *, g_BTHK):
    """Gradients of q, k, v, straight through the roundings. Holds the scores of one batch: [B, N, H / N, T, S] float32."""
    batch, length, num_heads, head_dim = q_BTHK.shape
    num_kv_heads = k_BSNK.shape[2]
    grouped = (batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scale = head_dim**-0.5
    q_BTNGK = q_BTHK.astype(jnp.float32).reshape(grouped)
    g_BTNGK = g_BTHK.astype(jnp.float32).reshape(grouped)
    seen_BTS = jnp.arange(k_BSNK.shape[1])[None, None, :] <= positions_BT[:, :, None]
    # Slots that no query sees may hold anything, and 0 x NaN is NaN.
    used_BS11 = jnp.any(seen_BTS, axis=1)[:, :, None, None]
    k_BSNK32, v_BSNK32 = (jnp.where(used_BS11, x.astype(jnp.float32), 0.0) for x in (k_BSNK, v_BSNK))

    score_BNGTS = _einsum("btngk,bsnk->bngts", q_BTNGK, k_BSNK32) * scale
    score_BNGTS = jnp.where(seen_BTS[:, None, None], score_BNGTS, -jnp.inf)
    prob_BNGTS = jnp.exp(score_BNGTS - jnp.max(score_BNGTS, axis=-1, keepdims=True))
    prob_BNGTS = prob_BNGTS / jnp.sum(prob_BNGTS, axis=-1, keepdims=True)

    dv_BSNK = _einsum("bngts,btngk->bsnk", prob_BNGTS, g_BTNGK)
    dprob_BNGTS = _einsum("btngk,bsnk->bngts", g_BTNGK, v_BSNK32)
    dscore_BNGTS = prob_BNGTS * (dprob_BNGTS - jnp.sum(prob_BNGTS * dprob_BNGTS, axis=-1, keepdims=True)) * scale
    dq_BTHK = _einsum("bngts,bsnk->btngk", dscore_BNGTS, k_BSNK32).reshape(q_BTHK.shape)
    dk_BSNK = _einsum("bngts,btngk->bsnk", dscore_BNGTS, q_BTNGK)
    return dq_BTHK.astype(q_BTHK.dtype), dk_BSNK.astype(k_BSNK.dtype), dv_BSNK.astype(v_BSNK.dtype)
