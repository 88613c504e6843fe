"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with an online softmax over key blocks of fixed place
(Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).

Let B be sequences, T query tokens, S key slots, H query heads, N key/value heads (H a multiple of N), K the head dimension.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention import reference
from pallas_kernels.attention.reference import KEY_BLOCK

__all__ = ["KEY_BLOCK", "attention"]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    positions: Int[Array, "B T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Attends from each query token to the slots 0..position of its own sequence, with scores scaled by ``K ** -0.5``.

    Slot s holds the key of position s. A full forward passes its own keys (S = T), a decode step passes the cache (T = 1): each
    query token runs the same program over the same key blocks, counted from the start of its sequence, so both give the same
    bits. Slots behind the position are never used, whatever they hold (NaN included).

    Args:
      q: [B, T, H, K] bfloat16 or float32.
      k: [B, S, N, K] in the type of `q`.
      v: [B, S, N, K] in the type of `q`.
      positions: [B, T] int32, each in 0..S-1.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [B, T, H, K] in the type of `q`.

    Raises:
      ValueError: H is not a multiple of N.
    """
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"attention: {num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    dispatch.resolve("attention", implementation, ("reference",))
    return _attention(q, k, v, positions)


@jax.custom_vjp
def _attention(q_BTHK, k_BSNK, v_BSNK, positions_BT):
    return reference.attention(q_BTHK, k_BSNK, v_BSNK, positions_BT)


def _forward(q_BTHK, k_BSNK, v_BSNK, positions_BT):
    return _attention(q_BTHK, k_BSNK, v_BSNK, positions_BT), (q_BTHK, k_BSNK, v_BSNK, positions_BT)


def _backward(residuals, g_BTHK):
    q_BTHK, k_BSNK, v_BSNK, positions_BT = residuals
    gradients = functools.partial(reference.attention_gradients, g_BTHK=g_BTHK)
    return *gradients(q_BTHK, k_BSNK, v_BSNK, positions_BT), None


_attention.defvjp(_forward, _backward)
