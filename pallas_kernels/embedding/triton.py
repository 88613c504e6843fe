"""Gradient of an embedding on a GPU: one program per chunk of a token's rows, then one per token of the vocabulary. No two
programs write to one place, and a token without rows gets its zeros from the program that owns it.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.embedding.segments import Segments
from pallas_kernels.triton_numerics import num_warps, padded

_BLOCK = 1024  # columns per program


@triton.jit
def _chunk_kernel(gradient, order, chunk_start, chunk_size, sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    size = tl.load(chunk_size + chunk)
    if size > 0:
        start = tl.load(chunk_start + chunk)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        total = tl.full((BLOCK,), -0.0, tl.float32)  # -0 + x is x, also where x is -0
        for i in range(size):
            row = tl.load(order + start + i).to(tl.int64)
            total = total + tl.load(gradient + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(sums + chunk.to(tl.int64) * WIDTH + column, total, mask=mask)


@triton.jit
def _token_kernel(sums, token_start, result, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    first = tl.load(token_start + token)
    last = tl.load(token_start + token + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    if last > first:
        line = sums + first.to(tl.int64) * WIDTH + column
        total = tl.load(line, mask=mask, other=0.0)
        for _ in range(first + 1, last):
            line += WIDTH
            total = total + tl.load(line, mask=mask, other=0.0)
    tl.store(result + token.to(tl.int64) * WIDTH + column, total, mask=mask)


def _launch(kernel, num_programs: int, width: int) -> gpu.Launch:
    block = min(_BLOCK, padded(width))
    return gpu.Launch(
        kernel,
        gpu.outputs(((num_programs, width), jnp.float32)),
        grid=(num_programs, triton.cdiv(width, block)),
        constants=dict(WIDTH=width, BLOCK=block),
        num_warps=num_warps(block),
    )


def chunk_launch(num_chunks: int, width: int) -> gpu.Launch:
    """Inputs: gradient [M, D], order [M], chunk_start [C], chunk_size [C]. Output: [C, D] float32, unset for chunks of size 0."""
    return _launch(_chunk_kernel, num_chunks, width)


def token_launch(vocab_size: int, width: int) -> gpu.Launch:
    """Inputs: sums of chunks [C, D], token_start [V + 1]. Output: [V, D] float32."""
    return _launch(_token_kernel, vocab_size, width)


def embed_gradient(g_MD, segments: Segments) -> jax.Array:
    width, num_chunks = g_MD.shape[1], segments.chunk_start.shape[0]
    launch = chunk_launch(num_chunks, width)
    (sums_CD,) = gpu.run(launch, g_MD, segments.order, segments.chunk_start, segments.chunk_size)
    (result_VD,) = gpu.run(token_launch(segments.token_start.shape[0] - 1, width), sums_CD, segments.token_start)
    return result_VD
