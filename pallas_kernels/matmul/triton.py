"""Dense matmul on an NVIDIA GPU: the grouped kernels with one group, so that the bits of both are the same."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import triton as grouped


def _one_group(w):
    """[N, K] -> [1, N, K], for an array or the parts of an NVFP4 one."""
    return jax.tree.map(lambda leaf: leaf[None], w)


def matmul(x, w, *, out_dtype=jnp.bfloat16, kernel="triton"):
    return grouped.grouped_matmul(x, _one_group(w), None, out_dtype=out_dtype, kernel=kernel)


def matmul_dgrad(g, w, *, out_dtype=jnp.float32, kernel="triton"):
    return grouped.grouped_matmul_dgrad(g, _one_group(w), None, out_dtype=out_dtype, kernel=kernel)


def matmul_wgrad(x, g, *, kernel="triton"):
    return grouped.grouped_matmul_wgrad(x, g, None, kernel=kernel)[0]
