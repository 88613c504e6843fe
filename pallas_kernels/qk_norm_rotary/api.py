"""Split of the fused projection, RMS norm of each query and key head (Qwen3's, arXiv:2505.09388), rotary embedding: one pass over
the numbers in place of five.

Let M be tokens, H query heads, N key/value heads, K the head dimension.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.numerics import ordered_sum


@dispatch.replaceable
def qk_norm_rotary(
    qkv: Float[Array, "M HNN K"],
    q_weight: Float[Array, "K"],
    k_weight: Float[Array, "K"],
    cos: Float[Array, "M K2"],
    sin: Float[Array, "M K2"],
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "M H K"], Float[Array, "M N K"], Float[Array, "M N K"]]:
    """``rotary(rms_norm(q))``, ``rotary(rms_norm(k))`` and v of a projection's heads [q | k | v], bit for bit. Differentiable.

    The norm is rounded to the type of `qkv` before it is rotated, as the two operations one after the other do.

    Args:
      qkv: [M, H + 2 N, K] bfloat16 or float32, K even.
      q_weight: [K] float32, the norm's weight for queries.
      k_weight: [K] float32, the norm's weight for keys.
      cos: [M, K/2] float32, cosines at each token's position, see `pallas_kernels.rotary.rotary_table`. No gradient.
      sin: [M, K/2] float32. No gradient.
      num_heads: H.
      num_kv_heads: N.
      eps: added to the mean square of a head.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      q [M, H, K], k [M, N, K] and v [M, N, K] in the type of `qkv`. Token i depends on token i alone, bit for bit.

    Raises:
      ValueError: `qkv` does not have H + 2 N heads.
    """
    if qkv.shape[1] != num_heads + 2 * num_kv_heads:
        raise ValueError(
            f"qk_norm_rotary: {qkv.shape[1]} heads are not {num_heads} of queries and twice {num_kv_heads} of keys and values"
        )
    return _qk_norm_rotary(
        dispatch.resolve("qk_norm_rotary", implementation), num_heads, num_kv_heads, eps, qkv, q_weight, k_weight, cos, sin
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _qk_norm_rotary(implementation, num_heads, num_kv_heads, eps, *inputs):
    op = dispatch.module(__package__, implementation).qk_norm_rotary
    return op(*inputs, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps)


def _forward(implementation, num_heads, num_kv_heads, eps, *inputs):
    return _qk_norm_rotary(implementation, num_heads, num_kv_heads, eps, *inputs), inputs


def _backward(implementation, num_heads, num_kv_heads, eps, inputs, gradients):
    op = dispatch.module(__package__, implementation).qk_norm_rotary_backward
    dqkv_MHK, q_sums_TK, k_sums_TK = op(*inputs, *gradients, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps)
    cos_MK, sin_MK = inputs[-2:]
    sums = (ordered_sum(q_sums_TK, axis=0), ordered_sum(k_sums_TK, axis=0))
    return dqkv_MHK, *sums, jnp.zeros_like(cos_MK), jnp.zeros_like(sin_MK)


_qk_norm_rotary.defvjp(_forward, _backward)
