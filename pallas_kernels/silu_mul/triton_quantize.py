"""silu(gate) * up and NVFP4 quantising in one kernel: the product never goes to memory. Bits are those of one after the other."""

import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.nvfp4.array import Nvfp4Array
from pallas_kernels.nvfp4.expanded import ExpandedArray
from pallas_kernels.nvfp4.triton_quantize import (
    bfloat16_pair,
    high_value,
    larger_words,
    load_words,
    low_value,
    operand_of_rows,
    quantize_three,
    quantize_words,
    row_launch,
    row_maximum,
    row_tiling,
)
from pallas_kernels.silu_mul.triton import silu_times


@triton.jit
def _product(gate, up):
    return bfloat16_pair(silu_times(low_value(gate), low_value(up)), silu_times(high_value(gate), high_value(up)))


@triton.jit
def _tile(x_ptr, row, block0, m, K: tl.constexpr, BLOCKS: tl.constexpr):
    gate_a, gate_b = load_words(x_ptr, row, block0, m, K, BLOCKS, 2 * K)
    up_a, up_b = load_words(x_ptr + K, row, block0, m, K, BLOCKS, 2 * K)
    return _product(gate_a, up_a), _product(gate_b, up_b)


@triton.jit
def silu_mul_quantize_kernel(
    x_ptr, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr,
):  # fmt: skip
    """x [m, 2 K] bfloat16, gates first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    NUM_BLOCKS: tl.constexpr = K // 16
    if NUM_BLOCKS == 3 * BLOCKS:
        a0, b0 = _tile(x_ptr, row, 0, m, K, BLOCKS)
        a1, b1 = _tile(x_ptr, row, BLOCKS, m, K, BLOCKS)
        a2, b2 = _tile(x_ptr, row, 2 * BLOCKS, m, K, BLOCKS)
        quantize_three(a0, b0, a1, b1, a2, b2, row, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED)
    elif BLOCKS >= NUM_BLOCKS:
        a, b = _tile(x_ptr, row, 0, m, K, BLOCKS)
        outer_max = row_maximum(larger_words(a, b))
        quantize_words(a, b, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)
    else:
        largest = tl.zeros((ROWS,), tl.int32)
        for block0 in range(0, NUM_BLOCKS, BLOCKS):
            a, b = _tile(x_ptr, row, block0, m, K, BLOCKS)
            largest = tl.maximum(largest, row_maximum(larger_words(a, b)))
        for block0 in range(0, NUM_BLOCKS, BLOCKS):
            a, b = _tile(x_ptr, row, block0, m, K, BLOCKS)
            quantize_words(a, b, largest, row, block0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)


def silu_mul_quantize_launch(m: int, k: int, *, expanded: bool) -> gpu.Launch:
    """Inputs: gate_up [m, 2 k] bfloat16, m. Outputs: as `row_launch` has them."""
    return row_launch(silu_mul_quantize_kernel, m, k, row_tiling(k), dict(EXPANDED=expanded))


def silu_mul_quantize(gate_up_MF, *, expanded: bool) -> Nvfp4Array | ExpandedArray:
    m, k = gate_up_MF.shape[0], gate_up_MF.shape[1] // 2
    return operand_of_rows(gpu.run(silu_mul_quantize_launch(m, k, expanded=expanded), gate_up_MF, m))
