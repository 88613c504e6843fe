"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with an online softmax over key blocks of fixed place
(Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135), over a batch or over a cache of pages
(Kwon et al. 2023, arXiv:2309.06180).

The bits of a row have one definition: the keys of its sequence are cut into blocks of `key_block` slots, counted from the
sequence's first token, and the softmax runs over the blocks in order. A page of the cache is such a block, so a token that is
decoded gets the bits that it gets in a full pass, wherever its sequence lies.

Let B be rows of a batch, T tokens of a row, H query heads, N key/value heads (H a multiple of N), K the head dimension; P pages
of S slots each, J pages of a sequence at most.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gpu

__all__ = ["attention", "key_block", "paged_attention"]

# What the kernels are written for.
_KERNEL_HEAD_DIMS = (16, 32, 64, 128)
_KERNEL_DTYPES = (jnp.bfloat16, jnp.float32)


_WITH_MOSAIC = ("reference", "triton", "mosaic")
_WITHOUT_MOSAIC = ("reference", "triton")


def mosaic_lacks(q_shape: tuple[int, ...], num_kv_heads: int, dtype) -> str | None:
    """What the Mosaic kernel does not have for queries [B, T, H, K], or None."""
    G, K = q_shape[2] // num_kv_heads, q_shape[3]
    if dtype == jnp.bfloat16 and K in (64, 128) and G in (2, 4, 8, 16, 32, 64) and 0 not in q_shape:
        return None
    return (
        f"no kernel for q {q_shape} in {dtype} with {num_kv_heads} key/value heads: there is bfloat16, head dimensions "
        "64 and 128, 2, 4, 8, 16, 32 or 64 query heads per key/value head, and no empty array"
    )


def _resolve(op: str, implementation: str | None, lacks: str | None = None) -> str:
    """`lacks`: why the Mosaic kernel cannot run. On Hopper it runs where nobody names anything: 1.2 to 1.4 times as fast."""
    gpu_default = "mosaic" if not lacks and gpu.on_hopper() else "triton"
    # Who prefers Mosaic's kernels in general gets Triton's where there is none; who names it for this call is refused.
    available = _WITHOUT_MOSAIC if lacks and implementation is None else _WITH_MOSAIC
    chosen = dispatch.resolve(op, implementation, available, gpu_default=gpu_default)
    if chosen == "mosaic" and lacks:
        raise NotImplementedError(f"{op}: {lacks}; choose implementation='triton'")
    return chosen


def key_block(implementation: str | None = None) -> int:
    """Slots per key block: what starts of packed sequences are multiples of, and the size of a page.

    Part of the definition of a row's bits: implementations may differ in it, and bits are promised within one of them.

    Args:
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    return dispatch.module(__package__, _resolve("attention", implementation)).KEY_BLOCK


def _check(op: str, implementation: str, q, k, v) -> None:
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{op}: {num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k and v must have one type, not {q.dtype}, {k.dtype} and {v.dtype}")
    if implementation != "reference" and (q.shape[3] not in _KERNEL_HEAD_DIMS or q.dtype not in _KERNEL_DTYPES):
        raise NotImplementedError(
            f"{op}: no {implementation} kernel for q of shape {q.shape} in {q.dtype} on {dispatch.platform()}: head dimensions "
            f"are {', '.join(map(str, _KERNEL_HEAD_DIMS))}, types bfloat16 and float32; choose implementation='reference'"
        )


@dispatch.replaceable
def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N K"],
    positions: Int[Array, "B T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Packed causal self-attention, scores scaled by ``K ** -0.5``. Differentiable.

    Token t of row b stands at ``positions[b, t]`` of its sequence and attends the tokens ``t - positions[b, t] .. t`` of that
    row. Sequences packed one after another into a row start at multiples of `key_block`; a plain batch has positions
    ``arange(T)``. Padding may carry any position up to t: it attends something, and no token of a sequence attends it. It must be
    finite all the same: kernels multiply values that a token does not see by a weight of 0.

    Args:
      q: [B, T, H, K] bfloat16 or float32. T need not be a multiple of the key block.
      k: [B, T, N, K] in the type of `q`.
      v: [B, T, N, K] in the type of `q`.
      positions: [B, T] int32, each in 0..t.
      implementation: see `pallas_kernels.dispatch.resolve`. The kernels have head dimensions 16 to 128, powers of two.

    Returns:
      [B, T, H, K] in the type of `q`. A token's bits depend on its own sequence alone, and are those of `paged_attention`.

    Raises:
      ValueError: H is not a multiple of N, or q, k and v differ in type.
      NotImplementedError: the kernels do not have this head dimension or type.
    """
    chosen = _resolve("attention", implementation, mosaic_lacks(q.shape, k.shape[2], q.dtype))
    _check("attention", chosen, q, k, v)
    return _attention(chosen, q, k, v, positions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(implementation, q_BTHK, k_BTNK, v_BTNK, positions_BT):
    return dispatch.module(__package__, implementation).attention(q_BTHK, k_BTNK, v_BTNK, positions_BT)[0]


def _forward(implementation, q_BTHK, k_BTNK, v_BTNK, positions_BT):
    out_BTHK, lse = dispatch.module(__package__, implementation).attention(q_BTHK, k_BTNK, v_BTNK, positions_BT)
    return out_BTHK, (q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse)


def _backward(implementation, residuals, g_BTHK):
    return *dispatch.module(__package__, implementation).attention_backward(*residuals, g_BTHK), None


_attention.defvjp(_forward, _backward)


@dispatch.replaceable
def paged_attention(
    q: Float[Array, "B T H K"],
    k_pages: Float[Array, "P S N K"],
    v_pages: Float[Array, "P S N K"],
    tables: Int[Array, "B J"],
    positions: Int[Array, "B T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Attention of T tokens of each sequence to the pages that hold its keys, scores scaled by ``K ** -0.5``.

    Slot s of sequence b lies in page ``tables[b, s // S]`` at place ``s % S``. A token attends the slots
    ``0 .. positions[b, t]`` of its sequence. Slots behind the position may hold anything, NaN included, and so may the table
    behind the page of the position. Not differentiable.

    Args:
      q: [B, T, H, K] bfloat16 or float32.
      k_pages: [P, S, N, K] in the type of `q`, S = ``key_block(implementation)``.
      v_pages: [P, S, N, K] in the type of `q`.
      tables: [B, J] int32, page numbers. Sequences may share pages.
      positions: [B, T] int32, each in 0..J*S-1, or -1: a token that attends nothing. Its result is 0.
      implementation: see `pallas_kernels.dispatch.resolve`. The kernels have head dimensions 16 to 128, powers of two.

    Returns:
      [B, T, H, K] in the type of `q`.

    Raises:
      ValueError: H is not a multiple of N, types differ, or a page is no key block.
      NotImplementedError: the kernels do not have this head dimension or type.
    """
    chosen = _resolve("paged_attention", implementation, "no kernel for a cache of pages")
    _check("paged_attention", chosen, q, k_pages, v_pages)
    slots, wanted = k_pages.shape[1], key_block(chosen)
    if slots != wanted:
        raise ValueError(f"paged_attention: pages have {slots} slots; a page is a key block, {wanted} slots")
    return dispatch.module(__package__, chosen).paged_attention(q, k_pages, v_pages, tables, positions)
