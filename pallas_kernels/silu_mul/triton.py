"""silu(gate) * up on a GPU: every number by itself."""

import jax
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import round_to, separate_product, sigmoid

_BLOCK = 2048  # results per program


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32, before it is rounded."""
    return gate * sigmoid(gate) * up


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where this program's results lie, where their gates lie, and which exist. Ups lie WIDTH behind the gates."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = index // WIDTH
    return index, row.to(tl.int64) * (2 * WIDTH) + index % WIDTH, row < num_rows


@triton.jit
def _silu_mul_kernel(gate_up, num_rows, result, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index, place, mask = _places(num_rows, WIDTH, BLOCK)
    gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + index, round_to(silu_times(gate, up), result.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_backward_kernel(gate_up, gradient, num_rows, dgate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index, place, mask = _places(num_rows, WIDTH, BLOCK)
    gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradient + index, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    dgate = g * up * s * (1.0 + separate_product(gate * (1.0 - s)))
    dup = g * gate * s
    tl.store(dgate_up + place, round_to(dgate, dgate_up.dtype.element_ty), mask=mask)
    tl.store(dgate_up + place + WIDTH, round_to(dup, dgate_up.dtype.element_ty), mask=mask)


def _launch(kernel, num_rows: int, width: int, out_width: int, dtype) -> gpu.Launch:
    if num_rows * width >= 2**31 - _BLOCK:
        raise NotImplementedError(f"silu_mul: {num_rows} x {width} results are too many for 32-bit indices; cut the rows")
    return gpu.Launch(
        kernel,
        gpu.outputs(((num_rows, out_width), dtype)),
        grid=(triton.cdiv(num_rows * width, _BLOCK),),
        constants=dict(WIDTH=width, BLOCK=_BLOCK),
    )


def silu_mul_launch(num_rows: int, width: int, dtype) -> gpu.Launch:
    """Inputs: gate_up [M, 2 F], M. Output: [M, F]."""
    return _launch(_silu_mul_kernel, num_rows, width, width, dtype)


def silu_mul_backward_launch(num_rows: int, width: int, dtype) -> gpu.Launch:
    """Inputs: gate_up [M, 2 F], gradient [M, F], M. Output: [M, 2 F]."""
    return _launch(_silu_mul_backward_kernel, num_rows, width, 2 * width, dtype)


def silu_mul(gate_up_MF) -> jax.Array:
    num_rows, width = gate_up_MF.shape[0], gate_up_MF.shape[1] // 2
    (result_MF,) = gpu.run(silu_mul_launch(num_rows, width, gate_up_MF.dtype), gate_up_MF, num_rows)
    return result_MF


def silu_mul_backward(gate_up_MF, g_MF) -> jax.Array:
    num_rows, width = g_MF.shape
    (dgate_up_MF,) = gpu.run(silu_mul_backward_launch(num_rows, width, gate_up_MF.dtype), gate_up_MF, g_MF, num_rows)
    return dgate_up_MF
