"""RMS norm and NVFP4 quantising in one kernel, and the residual stream's add before it: the normalised row goes to memory only
where somebody else reads it. Bits are those of one after the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
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
def _store_words(ptr, a, b, row, m, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Stores words a and b [ROWS, BLOCKS, 4] where `load_words` finds them."""
    block = tl.arange(0, BLOCKS)[None, :, None]
    word = row.to(tl.int64)[:, None, None] * (K // 2) + block * 8 + tl.arange(0, 4)[None, None, :]
    inside = (row < m)[:, None, None] & (block < K // 16)
    ptr = ptr.to(tl.pointer_type(tl.int32))
    tl.store(ptr + word, a, mask=inside)
    tl.store(ptr + word + 4, b, mask=inside)


@triton.jit
def _added(a, b):
    """Sums of two words' numbers, rounded to bfloat16."""
    return bfloat16_pair(low_value(a) + low_value(b), high_value(a) + high_value(b))


@triton.jit
def _norm_quantize_tile(
    x_ptr, y_ptr, weight_ptr, m, sum_ptr, normed_ptr, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Rows of x or, where there is a y, of x + y, which is rounded and stored first; normalised, and stored so where there is a
    place for it; quantised. x, y [m, K] bfloat16, weight [4, K / 4] float32: `streams` of the weight. A tile holds whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a, b = load_words(x_ptr, row, 0, m, K, BLOCKS, K)
    if y_ptr is not None:
        y_a, y_b = load_words(y_ptr, row, 0, m, K, BLOCKS, K)
        a = _added(a, y_a)
        b = _added(b, y_b)
        _store_words(sum_ptr, a, b, row, m, K, BLOCKS)
    a_even = low_value(a)
    a_odd = high_value(a)
    b_even = low_value(b)
    b_odd = high_value(b)
    squares = tree_of_words(
        _square(a_even), _square(a_odd), _square(b_even), _square(b_odd), ROWS, BLOCKS,
    )  # fmt: skip
    mean = (ordered_sum(squares, ROWS, BLOCKS) + EPS * K) * (1.0 / K)
    inverse = reciprocal_sqrt(mean)[:, None, None]
    a = bfloat16_pair(a_even * inverse * _weights(weight_ptr, 0, BLOCKS, K), a_odd * inverse * _weights(weight_ptr, 1, BLOCKS, K))
    b = bfloat16_pair(b_even * inverse * _weights(weight_ptr, 2, BLOCKS, K), b_odd * inverse * _weights(weight_ptr, 3, BLOCKS, K))
    if normed_ptr is not None:
        _store_words(normed_ptr, a, b, row, m, K, BLOCKS)
    outer_max = row_maximum(larger_words(a, b))
    quantize_words(a, b, outer_max, row, 0, m, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, False, EXPANDED)


# What a kernel does not have is None, and arguments are given by place: one kernel for each of the four cases.


@triton.jit
def _rms_norm_quantize_kernel(
    x_ptr, weight_ptr, m, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    _norm_quantize_tile(
        x_ptr, None, weight_ptr, m, None, None, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED, EPS
    )  # fmt: skip


@triton.jit
def _rms_norm_keep_quantize_kernel(
    x_ptr, weight_ptr, m, normed_ptr, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    _norm_quantize_tile(
        x_ptr, None, weight_ptr, m, None, normed_ptr, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED, EPS
    )  # fmt: skip


@triton.jit
def _add_rms_norm_quantize_kernel(
    x_ptr, y_ptr, weight_ptr, m, sum_ptr, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    _norm_quantize_tile(
        x_ptr, y_ptr, weight_ptr, m, sum_ptr, None, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED, EPS
    )  # fmt: skip


@triton.jit
def _add_rms_norm_keep_quantize_kernel(
    x_ptr, y_ptr, weight_ptr, m, sum_ptr, normed_ptr, out_ptr, outer_ptr, scale_ptr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EXPANDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    _norm_quantize_tile(
        x_ptr, y_ptr, weight_ptr, m, sum_ptr, normed_ptr, out_ptr, outer_ptr, scale_ptr, K, ROWS, BLOCKS, EXPANDED, EPS
    )  # fmt: skip


_KERNELS = {  # (adds, keeps)
    (False, False): _rms_norm_quantize_kernel,
    (False, True): _rms_norm_keep_quantize_kernel,
    (True, False): _add_rms_norm_quantize_kernel,
    (True, True): _add_rms_norm_keep_quantize_kernel,
}
LONGEST_ROW = 8192  # what a program can hold


def rms_norm_quantize_launch(m: int, k: int, eps: float, *, expanded: bool, add: bool = False, keep: bool = False) -> gpu.Launch:
    """Inputs: x [m, k] bfloat16, with `add` y [m, k], `streams` of the weight [4, k / 4] float32, m.

    Outputs: with `add` the sum [m, k], with `keep` the normalised rows [m, k], and then as `row_launch` has them.
    """
    blocks = triton.next_power_of_2(k // 16)
    rows = max(1, 128 // blocks)
    tiling = dict(ROWS=rows, BLOCKS=blocks, num_warps=max(1, min(8, rows * blocks // 64)))
    launch = row_launch(_KERNELS[add, keep], m, k, tiling, dict(EXPANDED=expanded, EPS=eps))
    rows_too = gpu.outputs(*[((m, k), jnp.bfloat16)] * (add + keep))
    return dataclasses.replace(launch, out_shape=rows_too + launch.out_shape)


def streams(weight_D):
    """The weight as threads hold numbers: [first or second 8 of a block, even or odd, block, word], as [4, D / 4]."""
    return weight_D.reshape(-1, 2, 4, 2).transpose(1, 3, 0, 2).reshape(4, -1)


def add_rms_norm_quantize(
    x_MD, y_MD, weight_D, *, eps, keep: bool, expanded: bool
) -> tuple[jax.Array, jax.Array | None, Nvfp4Array | ExpandedArray]:
    m, k = x_MD.shape
    launch = rms_norm_quantize_launch(m, k, eps, expanded=expanded, add=y_MD is not None, keep=keep)
    outputs = gpu.run(launch, *((x_MD,) if y_MD is None else (x_MD, y_MD)), streams(weight_D), m)
    sum_MD = x_MD if y_MD is None else outputs.pop(0)
    normed_MD = outputs.pop(0) if keep else None
    return sum_MD, normed_MD, operand_of_rows(outputs)
