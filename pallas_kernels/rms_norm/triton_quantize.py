"""RMS norm and NVFP4 quantising in one kernel: the normalised row never goes to memory. Bits are those of one after the other."""

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
    quantize_words,
    row_launch,
    row_maximum,
    tree_of_words,
)
from pallas_kernels.triton_numerics import ordered_sum, reciprocal_sqrt


@triton.jit
def _weights(weight_ptr, STREAM: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr):
    """[1, BLOCKS, 4] weights of one of the four streams of words, which lie one behind the other."""
    index = tl.arange(0, BLOCKS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.load(weight_ptr + STREAM * (K // 4) + index, mask=index < K // 4, other=0.0)


@triton.jit
def _square(x):
    """`separate_product(x * x)`, which is never negative."""
    return tl.minimum(x * x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rms_norm_quantize_kernel(
    x_ptr, weight_ptr, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """x [m, K] bfloat16, weight [4, K / 4] float32: `streams` of the weight. A program's tile holds whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a, b = load_words(x_ptr, row, 0, m, K, BLOCKS, K)
    a_even = low_value(a)
    a_odd = high_value(a)
    b_even = low_value(b)
    b_odd = high_value(b)
    squares = tree_of_words(
        _square(a_even), _square(a_odd), _square(b_even), _square(b_odd), ROWS, BLOCKS,
    )  # fmt: skip
    mean = (ordered_sum(squares, ROWS, BLOCKS) + EPS * K) * (1.0 / K)
    inverse = reciprocal_sqrt(mean)[:, None, None]
    a = bfloat16_pair(
        a_even * inverse * _weights(weight_ptr, 0, BLOCKS, K), a_odd * inverse * _weights(weight_ptr, 1, BLOCKS, K)
    )
    b = bfloat16_pair(
        b_even * inverse * _weights(weight_ptr, 2, BLOCKS, K), b_odd * inverse * _weights(weight_ptr, 3, BLOCKS, K)
    )
    outer_max = row_maximum(larger_words(a, b))
    quantize_words(a, b, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)


LONGEST_ROW = 8192  # what a program can hold


def rms_norm_quantize_launch(m: int, k: int, eps: float, *, expanded: bool) -> gpu.Launch:
    """Inputs: x [m, k] bfloat16, `streams` of the weight [4, k / 4] float32, m. Outputs: as `row_launch` has them."""
    blocks = triton.next_power_of_2(k // 16)
    rows = max(1, 128 // blocks)
    tiling = dict(ROWS=rows, BLOCKS=blocks, num_warps=max(1, min(8, rows * blocks // 64)))
    return row_launch(rms_norm_quantize_kernel, m, k, tiling, dict(EXPANDED=expanded, EPS=eps))


def streams(weight_D):
    """The weight as threads hold numbers: [first or second 8 of a block, even or odd, block, word], as [4, D / 4]."""
    return weight_D.reshape(-1, 2, 4, 2).transpose(1, 3, 0, 2).reshape(4, -1)


def rms_norm_quantize(x_MD, weight_D, *, eps, expanded: bool) -> Nvfp4Array | ExpandedArray:
    m, k = x_MD.shape
    return operand_of_rows(gpu.run(rms_norm_quantize_launch(m, k, eps, expanded=expanded), x_MD, streams(weight_D), m))
