"""MoE combine on a GPU. A program owns a token: it reads the rows of its k experts where they lie, so nothing is gathered into
[M, k, D] first, and adds them in rank order. No two programs write to one place.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import num_warps, ordered_sum, padded, round_to, separate_product

_BLOCK = 2048  # columns per program


@triton.jit
def rank_sum(rows, slot, weights, token, column, mask, WIDTH: tl.constexpr, RANKS: tl.constexpr, WEIGHTED: tl.constexpr):
    """Sum over ranks r = 0, 1, .. of rows[slot[token, r], column], times weights[token, r] if WEIGHTED; float32."""
    for rank in tl.static_range(RANKS):
        row = tl.load(slot + token * RANKS + rank).to(tl.int64)
        term = tl.load(rows + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            term = separate_product(term * tl.load(weights + token * RANKS + rank))
        if rank == 0:
            total = term
        else:
            total = total + term
    return total


@triton.jit
def _combine_kernel(outputs, weights, slot, result, WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = rank_sum(outputs, slot, weights, token, column, mask, WIDTH, RANKS, True)
    tl.store(result + token * WIDTH + column, round_to(total, result.dtype.element_ty), mask=mask)


@triton.jit
def _combine_backward_kernel(
    outputs, weights, slot, gradient, doutputs, dweights, WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    g = tl.load(gradient + token * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    for rank in range(RANKS):
        assignment = token * RANKS + rank
        row = tl.load(slot + assignment).to(tl.int64)
        output = tl.load(outputs + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        doutput = tl.load(weights + assignment) * g
        tl.store(doutputs + row * WIDTH + column, round_to(doutput, doutputs.dtype.element_ty), mask=mask)
        products = tl.reshape(separate_product(output * g), (1, BLOCK))
        tl.store(dweights + assignment + tl.arange(0, 1), ordered_sum(products, 1, BLOCK))


def combine_launch(num_tokens: int, num_ranks: int, width: int, dtype) -> gpu.Launch:
    """Inputs: outputs [M k, D], weights [M, k] float32, slot [M, k] int32. Output: [M, D]."""
    block = min(_BLOCK, padded(width))
    return gpu.Launch(
        _combine_kernel,
        gpu.outputs(((num_tokens, width), dtype)),
        grid=(num_tokens, triton.cdiv(width, block)),
        constants=dict(WIDTH=width, RANKS=num_ranks, BLOCK=block),
        num_warps=num_warps(block),
    )


def combine_backward_launch(num_tokens: int, num_ranks: int, width: int, dtype) -> gpu.Launch:
    """Inputs: those of `combine_launch`, then the gradient [M, D]. Outputs: doutputs [M k, D], dweights [M, k] float32."""
    block = padded(width)
    # One warp up to 4096 columns: the tree of a sum then crosses lanes, and no warps that would wait for each other.
    return gpu.Launch(
        _combine_backward_kernel,
        gpu.outputs(((num_tokens * num_ranks, width), dtype), ((num_tokens, num_ranks), jnp.float32)),
        grid=(num_tokens,),
        constants=dict(WIDTH=width, RANKS=num_ranks, BLOCK=block),
        num_warps=max(1, block // 4096),
    )


def _rows_and_slot(outputs, slot_Mk, shape):
    """A token's rows as sorted rows and where they lie: [M, k, D] is sorted by token."""
    if slot_Mk is None:
        slot_Mk = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
    return outputs.reshape(-1, outputs.shape[-1]), slot_Mk


def combine(outputs, weights_Mk, slot_Mk) -> jax.Array:
    rows, slot_Mk = _rows_and_slot(outputs, slot_Mk, weights_Mk.shape)
    (result,) = gpu.run(combine_launch(*weights_Mk.shape, rows.shape[-1], rows.dtype), rows, weights_Mk, slot_Mk)
    return result


def combine_backward(outputs, weights_Mk, slot_Mk, g_MD):
    rows, slot_Mk = _rows_and_slot(outputs, slot_Mk, weights_Mk.shape)
    launch = combine_backward_launch(*weights_Mk.shape, rows.shape[-1], rows.dtype)
    doutputs, dweights_Mk = gpu.run(launch, rows, weights_Mk, slot_Mk, g_MD)
    return doutputs.reshape(outputs.shape), dweights_Mk
