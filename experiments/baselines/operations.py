"""Operations as one usually writes them in JAX: plain XLA, whose order of sums follows the shape of the batch and the code
around.

`naive_engine` is made of these, and `choices` puts them, one by one, in place of ours in the one forward. Casts to bfloat16 are
plain ones: inside a program XLA may leave them out.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import nvfp4, operands
from pallas_kernels.nvfp4.blocks import signed_codes
from pallas_kernels.nvfp4.formats import BLOCK, float32_to_e2m1_magnitude

# TransformerEngine's plain rule, with one largest magnitude for a whole tensor.
TENSOR_RULE = nvfp4.ScaleRule.te(outer="matrix")
ROW_RULE = nvfp4.ScaleRule.te(outer="row")
SPLITS = 4


def fake_quantize(x, dtype):
    """Rounds to NVFP4 with one outer scale for the last two axes, and back."""
    return nvfp4.dequantize(nvfp4.quantize(x, TENSOR_RULE), dtype)


def rms_norm(x, weight, eps):
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def angles(positions_BT, head_dim, theta):
    """Cosines and sines in float32, [B, T, 1, K/2]."""
    half = head_dim // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1K = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_K[None, None, None, :]
    return jnp.cos(angle_BT1K), jnp.sin(angle_BT1K)


def rotate(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(q_BTHK, k_BSNK, v_BSNK, mask_BTS):
    """[B, T, H K], all scores at once."""
    batch, length, num_heads, head_dim = q_BTHK.shape
    q_BTNRK = q_BTHK.reshape(batch, length, k_BSNK.shape[2], -1, head_dim)  # R query heads share a key head
    score_BNRTS = jnp.einsum("btnrk,bsnk->bnrts", q_BTNRK, k_BSNK, preferred_element_type=jnp.float32)
    score_BNRTS = jnp.where(mask_BTS[:, None, None], score_BNRTS * head_dim**-0.5, -jnp.inf)
    prob_BNRTS = jax.nn.softmax(score_BNRTS, axis=-1).astype(v_BSNK.dtype)
    return jnp.einsum("bnrts,bsnk->btnrk", prob_BNRTS, v_BSNK).reshape(batch, length, num_heads * head_dim)


def gate(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def route(x_MD, weight_ED, top_k, normalize):
    """Weights [M, k] and experts [M, k], in float32."""
    return _top(x_MD.astype(jnp.float32) @ weight_ED.T, top_k, normalize)


def route_bfloat16(x_MD, weight_ED, top_k, normalize):
    """The same with logits in bfloat16."""
    logits_ME = lax.reduce_precision(x_MD.astype(jnp.bfloat16) @ weight_ED.astype(jnp.bfloat16).T, 8, 7)
    return _top(logits_ME.astype(jnp.float32), top_k, normalize)


def _top(logits_ME, top_k, normalize):
    weight_Mk, expert_Mk = lax.top_k(jax.nn.softmax(logits_ME, axis=-1), top_k)
    if normalize:
        weight_Mk = weight_Mk / jnp.sum(weight_Mk, axis=-1, keepdims=True)
    return weight_Mk, expert_Mk


def ragged_dot(rows_mK, weight_ENK, group_sizes_E):
    return lax.ragged_dot(rows_mK, jnp.swapaxes(weight_ENK, 1, 2), group_sizes_E)


def combine(out_MkD, weight_Mk):
    return jnp.einsum("mkd,mk->md", out_MkD.astype(jnp.float32), weight_Mk).astype(out_MkD.dtype)


def logits(hidden_MD, head_VD):
    return jnp.matmul(hidden_MD, head_VD.T, preferred_element_type=jnp.float32)


def log_softmax(logits_MV):
    return jax.nn.log_softmax(logits_MV, axis=-1)


# --- what no engine that we know of has all of: single liberties, to be put in place of ours


def plain(operand, dtype):
    """The numbers that a matmul's operand stands for, in the type in which XLA multiplies them."""
    if isinstance(operand, (nvfp4.Nvfp4Array, nvfp4.ExpandedArray)):
        return operands.dequantized(operand).astype(dtype)
    return operand


def _summed(x, w, group_sizes, order=slice(None)):
    """Sums over a part or an order of K, float32 and without outer scales."""
    x_MK, w_NK = operands.values(x)[..., order], operands.values(w)[..., order]
    if group_sizes is None:
        return jnp.matmul(x_MK, w_NK.T, precision=lax.Precision.HIGHEST)
    return lax.ragged_dot(x_MK, jnp.swapaxes(w_NK, 1, 2), group_sizes, precision=lax.Precision.HIGHEST)


def _scaled(sum_MN, x, w, group_sizes, dtype):
    x_outer, w_outer = operands.outer_scale(x), operands.outer_scale(w)
    if x_outer is not None:
        sum_MN = sum_MN * (x_outer[:, None] if x_outer.ndim else x_outer)
    if w_outer is not None:
        if group_sizes is not None:
            w_outer = jnp.repeat(w_outer, group_sizes, total_repeat_length=sum_MN.shape[0])[:, None]
        sum_MN = sum_MN * w_outer
    return sum_MN.astype(dtype)


def split_k(x, w, group_sizes, dtype):
    """K in `SPLITS` parts, summed apart and then together."""
    edges = [x.shape[-1] * i // SPLITS for i in range(SPLITS + 1)]
    total = sum(_summed(x, w, group_sizes, slice(a, b)) for a, b in zip(edges, edges[1:], strict=False))
    return _scaled(total, x, w, group_sizes, dtype)


def other_k_order(x, w, group_sizes, dtype):
    """K from its end to its start."""
    return _scaled(_summed(x, w, group_sizes, slice(None, None, -1)), x, w, group_sizes, dtype)


def quantize_with_bfloat16_quotients(x, rule):
    """Scales as the rule has them, codes from quotients in bfloat16."""
    q = nvfp4.quantize(x, rule)
    outer = q.outer_scale[..., None] if q.outer_per_row else q.outer_scale[..., None, None]
    inverse = jnp.repeat(_bfloat16(1.0 / (nvfp4.block_scale_values(q) * outer)), BLOCK, axis=-1)
    quotient = _bfloat16(_bfloat16(x.astype(jnp.float32)) * inverse)
    codes = signed_codes(float32_to_e2m1_magnitude(jnp.abs(quotient)), quotient < 0)
    return q.replace(codes=nvfp4.pack_codes(codes.astype(jnp.uint8)))


def _bfloat16(x):
    return lax.reduce_precision(x, 8, 7)  # which XLA does not leave out, as it may a pair of casts
