"""Un-dispatch on a GPU: combine's sum over ranks, without weights."""

import jax
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.combine.triton import rank_sum
from pallas_kernels.triton_numerics import num_warps, padded, round_to

_BLOCK = 2048  # columns per program


@triton.jit
def _undispatch_kernel(rows, slot, result, WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = rank_sum(rows, slot, slot, token, column, mask, WIDTH, RANKS, False)
    tl.store(result + token * WIDTH + column, round_to(total, result.dtype.element_ty), mask=mask)


def undispatch_launch(num_tokens: int, num_ranks: int, width: int, out_dtype) -> gpu.Launch:
    """Inputs: rows [M k, D], slot [M, k] int32. Output: [M, D]."""
    block = min(_BLOCK, padded(width))
    return gpu.Launch(
        _undispatch_kernel,
        gpu.outputs(((num_tokens, width), out_dtype)),
        grid=(num_tokens, triton.cdiv(width, block)),
        constants=dict(WIDTH=width, RANKS=num_ranks, BLOCK=block),
        num_warps=num_warps(block),
    )


def undispatch(rows, slot_Mk, *, out_dtype) -> jax.Array:
    (result,) = gpu.run(undispatch_launch(*slot_Mk.shape, rows.shape[-1], out_dtype), rows, slot_Mk)
    return result
