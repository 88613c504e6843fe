"""Split, norm and rotation in plain jnp: the references of `rms_norm` and `rotary`, one after the other."""

import jax.numpy as jnp

from pallas_kernels.rms_norm import reference as norm
from pallas_kernels.rotary import reference as rotary


def _rows(x_MHK):
    return x_MHK.reshape(-1, x_MHK.shape[-1])


def qk_norm_rotary(qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, *, num_heads, num_kv_heads, eps):
    q_MHK, k_MNK, v_MNK = jnp.split(qkv_MHK, (num_heads, num_heads + num_kv_heads), axis=1)

    def turned(x, weight_K):
        return rotary.rotary(norm.rms_norm(_rows(x), weight_K, eps=eps).reshape(x.shape), cos_MK, sin_MK)

    return turned(q_MHK, q_weight_K), turned(k_MNK, k_weight_K), v_MNK


def qk_norm_rotary_backward(
    qkv_MHK, q_weight_K, k_weight_K, cos_MK, sin_MK, gq_MHK, gk_MNK, gv_MNK, *, num_heads, num_kv_heads, eps
):
    """Gradient of qkv in its type, and for each weight the sums over tiles of rows [tiles, K] whose sum is its gradient."""
    q_MHK, k_MNK, _ = jnp.split(qkv_MHK, (num_heads, num_heads + num_kv_heads), axis=1)

    def back(x, weight_K, g):
        g = rotary.rotary(g, cos_MK, -sin_MK)  # the transpose of a rotation is the rotation by the opposite angle
        dx, sums_TK = norm.rms_norm_backward(_rows(x), weight_K, _rows(g), eps=eps)
        return dx.reshape(x.shape), sums_TK

    dq_MHK, q_sums_TK = back(q_MHK, q_weight_K, gq_MHK)
    dk_MNK, k_sums_TK = back(k_MNK, k_weight_K, gk_MNK)
    return jnp.concatenate([dq_MHK, dk_MNK, gv_MNK], axis=1), q_sums_TK, k_sums_TK
