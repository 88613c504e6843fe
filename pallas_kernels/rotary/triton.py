"""Rotary position embedding on a GPU. A program owns a token and some of its heads."""

import jax
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import num_warps, padded, round_to, separate_product

_TILE = 2048  # pairs per program, at most


@triton.jit
def rotate(first, second, cos, sin):
    """The two halves of heads, turned by their angles, in float32, before they are rounded."""
    return (
        separate_product(first * cos) - separate_product(second * sin),
        separate_product(second * cos) + separate_product(first * sin),
    )


@triton.jit
def _rotary_kernel(x, cos, sin, y, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.expand_dims(tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), 1)
    pair = tl.expand_dims(tl.arange(0, SIZE), 0)
    inside = pair < HALF
    mask = (head < HEADS) & inside
    place = (token * HEADS + head) * (2 * HALF) + pair
    cosine = tl.load(cos + token * HALF + pair, mask=inside, other=0.0)
    sine = tl.load(sin + token * HALF + pair, mask=inside, other=0.0)
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    first, second = rotate(first, second, cosine, sine)
    tl.store(y + place, round_to(first, y.dtype.element_ty), mask=mask)
    tl.store(y + place + HALF, round_to(second, y.dtype.element_ty), mask=mask)


def rotary_launch(num_tokens: int, num_heads: int, head_dim: int, dtype) -> gpu.Launch:
    """Inputs: x [M, H, K], cos and sin [M, K / 2] float32. Output: [M, H, K]."""
    size = padded(head_dim // 2)
    heads = min(padded(num_heads), max(1, _TILE // size))
    return gpu.Launch(
        _rotary_kernel,
        gpu.outputs(((num_tokens, num_heads, head_dim), dtype)),
        grid=(num_tokens, triton.cdiv(num_heads, heads)),
        constants=dict(HEADS=num_heads, HALF=head_dim // 2, BLOCK_H=heads, SIZE=size),
        num_warps=num_warps(heads * size),
    )


def rotary(x_MHK, cos_MK, sin_MK) -> jax.Array:
    (y_MHK,) = gpu.run(rotary_launch(*x_MHK.shape, x_MHK.dtype), x_MHK, cos_MK, sin_MK)
    return y_MHK
