"""RMS norm on a GPU. Forward: a program owns whole rows. Backward: a program owns ROW_TILE rows, one after another; it writes
their gradients and the sum of their terms for the weight, which the caller adds by one fixed tree. The residual stream's add is
part of either: of the rows before they are normalised, and of their gradients before they are rounded.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.rows import ROW_TILE
from pallas_kernels.triton_numerics import blocked_sum, num_warps, padded, reciprocal_sqrt, round_to, separate_product

_TILE = 2048  # numbers per program, at least; so many rows share one that are short


@triton.jit
def inverse_rms(x, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """[ROWS, SIZE] float32, zeros behind WIDTH -> [ROWS, 1]."""
    mean = (blocked_sum(separate_product(x * x), ROWS, SIZE) + EPS * WIDTH) * (1.0 / WIDTH)
    return tl.expand_dims(reciprocal_sqrt(mean), 1)


@triton.jit
def rms_norm_rows(x, weight, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """The norm of whole rows, before it is rounded: x [ROWS, SIZE] float32 with zeros behind WIDTH, weight [SIZE] float32."""
    return x * inverse_rms(x, ROWS, SIZE, WIDTH, EPS) * tl.expand_dims(weight, 0)


@triton.jit
def _norm_tile(
    x, y, weight, num_rows, total, normed, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The norm of a tile of x or, where there is a y, of x + y, which is rounded and stored first."""
    row = tl.expand_dims(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), 1)
    column = tl.arange(0, SIZE)
    mask = (row < num_rows) & tl.expand_dims(column < WIDTH, 0)
    place = row * WIDTH + tl.expand_dims(column, 0)
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if y is not None:
        values += tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
        rounded = round_to(values, total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    values = rms_norm_rows(values, scale, ROWS, SIZE, WIDTH, EPS)
    tl.store(normed + place, round_to(values, normed.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_kernel(x, weight, num_rows, y, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    _norm_tile(x, None, weight, num_rows, None, y, WIDTH, EPS, ROWS, SIZE)


@triton.jit
def _add_rms_norm_kernel(
    x, y, weight, num_rows, total, normed, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    _norm_tile(x, y, weight, num_rows, total, normed, WIDTH, EPS, ROWS, SIZE)


@triton.jit
def _backward_tile(
    x, weight, gradient, addend, num_rows, dx, sums,
    WIDTH: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROW_TILE
    column = tl.expand_dims(tl.arange(0, SIZE), 0)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0)
    total = tl.full((1, SIZE), -0.0, tl.float32)  # -0 + x is x, also where x is -0
    for i in range(ROW_TILE):
        mask = inside & (first + i < num_rows)
        place = (first + i) * WIDTH + column
        values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
        inverse = inverse_rms(values, 1, SIZE, WIDTH, EPS)
        unit = values * inverse
        dunit = separate_product(g * scale)
        mean = blocked_sum(separate_product(dunit * unit), 1, SIZE) * (1.0 / WIDTH)
        result = inverse * (dunit - separate_product(unit * tl.expand_dims(mean, 1)))
        if addend is not None:
            result = separate_product(result) + tl.load(addend + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + place, round_to(result, dx.dtype.element_ty), mask=mask)
        total = total + separate_product(g * unit)
    tl.store(sums + tl.program_id(0) * WIDTH + column, total, mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    x, weight, gradient, num_rows, dx, sums,
    WIDTH: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    _backward_tile(x, weight, gradient, None, num_rows, dx, sums, WIDTH, EPS, SIZE, ROW_TILE)


@triton.jit
def _add_rms_norm_backward_kernel(
    x, weight, gradient, addend, num_rows, dx, sums,
    WIDTH: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    _backward_tile(x, weight, gradient, addend, num_rows, dx, sums, WIDTH, EPS, SIZE, ROW_TILE)


def rms_norm_launch(num_rows: int, width: int, dtype, eps: float, *, add: bool = False) -> gpu.Launch:
    """Inputs: x [M, D], with `add` y [M, D], weight [D] float32, M. Outputs: with `add` the sum [M, D], and the norm [M, D]."""
    size = max(16, padded(width))
    rows = max(1, _TILE // size)
    return gpu.Launch(
        _add_rms_norm_kernel if add else _rms_norm_kernel,
        gpu.outputs(*[((num_rows, width), dtype)] * (2 if add else 1)),
        grid=(triton.cdiv(num_rows, rows),),
        constants=dict(WIDTH=width, EPS=eps, ROWS=rows, SIZE=size),
        num_warps=num_warps(rows * size),
    )


def rms_norm_backward_launch(num_rows: int, width: int, dtype, eps: float, *, add: bool = False) -> gpu.Launch:
    """Inputs: x [M, D], weight [D] float32, gradient [M, D], with `add` the addend [M, D], M. Outputs: dx [M, D], sums for the
    weight [tiles, D] float32.
    """
    size = max(16, padded(width))
    tiles = triton.cdiv(num_rows, ROW_TILE)
    return gpu.Launch(
        _add_rms_norm_backward_kernel if add else _rms_norm_backward_kernel,
        gpu.outputs(((num_rows, width), dtype), ((tiles, width), jnp.float32)),
        grid=(tiles,),
        constants=dict(WIDTH=width, EPS=eps, SIZE=size, ROW_TILE=ROW_TILE),
        num_warps=num_warps(size),
    )


def rms_norm(x_MD, weight_D, *, eps) -> jax.Array:
    (y_MD,) = gpu.run(rms_norm_launch(*x_MD.shape, x_MD.dtype, eps), x_MD, weight_D, x_MD.shape[0])
    return y_MD


def add_rms_norm(x_MD, y_MD, weight_D, *, eps) -> tuple[jax.Array, jax.Array]:
    launch = rms_norm_launch(*x_MD.shape, x_MD.dtype, eps, add=True)
    sum_MD, normed_MD = gpu.run(launch, x_MD, y_MD, weight_D, x_MD.shape[0])
    return sum_MD, normed_MD


def rms_norm_backward(x_MD, weight_D, g_MD, addend_MD=None, *, eps):
    launch = rms_norm_backward_launch(*x_MD.shape, x_MD.dtype, eps, add=addend_MD is not None)
    gradients = (g_MD,) if addend_MD is None else (g_MD, addend_MD)
    dx_MD, sums_TD = gpu.run(launch, x_MD, weight_D, *gradients, x_MD.shape[0])
    return dx_MD, sums_TD
