"""Matmuls on an NVIDIA GPU for many rows: dense and grouped, forward and gradients. One kernel multiplies, one sums over rows.

`multiply` computes out[i] = a[i] @ b[group of i]. The sum over the contracted axis runs in rising order, in steps that depend on
nothing but k, so that a row's bits depend on no tile, no neighbour and no number of rows. Operands are E4M3 (fp8 tensor cores),
bfloat16, or float32 (multiplied as float32, without TF32). Dense is the grouped kernel with one group.

Hopper's fp8 tensor cores add with about 14 bits. Sums of E4M3 products stay in them from the first to the last: moving partial
sums to float32 every 128 products costs 30 % of the speed and more (docs/kernels.md), for an error that is below the rounding of
a bfloat16 result. Sums of bfloat16 products are float32 sums.

`multiply_transposed` computes the weight gradient of each group, out[e] = g[rows of e].T @ x[rows of e]: one program sums over
all rows of its group in order. No split, no atomics; an empty group gives zeros.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu, operands, tuning
from pallas_kernels.grouped_matmul import mosaic, triton_packed
from pallas_kernels.nvfp4 import Nvfp4Array
from pallas_kernels.nvfp4 import triton as nvfp4_triton
from pallas_kernels.nvfp4.expanded import ExpandedArray


@triton.jit
def group_tiles_kernel(
    sizes_ptr, m, group_ptr, first_ptr, end_ptr, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    """For each tile of ROWS rows: its group, its first row, and where its group ends. Rows behind the last group are group -1;
    tiles beyond the last of those begin where they end."""
    e = tl.arange(0, E2)
    sizes = tl.load(sizes_ptr + e, mask=e < E, other=0)
    row_ends = tl.cumsum(sizes, 0)
    tiles = (sizes + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * 64 + tl.arange(0, 64)
    group = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    mine = e[None, :] == group[:, None]
    end = tl.sum(tl.where(mine, row_ends[None, :], 0), axis=1)
    first = tl.sum(tl.where(mine, (row_ends - sizes - (tile_ends - tiles) * ROWS)[None, :], 0), axis=1) + tile * ROWS
    inside = tile < TILES
    is_behind = group >= E2
    first = tl.where(is_behind, tl.sum(sizes) + (tile - tl.sum(tiles)) * ROWS, first)
    tl.store(group_ptr + tile, tl.where(is_behind, -1, group), mask=inside)
    tl.store(first_ptr + tile, first, mask=inside)
    tl.store(end_ptr + tile, tl.where(is_behind, m, end), mask=inside)


@triton.jit
def multiply_kernel(
    a_ptr, b_ptr, a_outer_ptr, b_outer_ptr, row_ptr, group_ptr, first_ptr, end_ptr, m, out_ptr,
    N: tl.constexpr, K: tl.constexpr, B_STRIDE_N: tl.constexpr, B_STRIDE_K: tl.constexpr,
    GROUPED: tl.constexpr, GATHERED: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out [m, N] = a [m, K] @ b [group, N, K].T; GATHERED: row i of the product is that of a[row[i]]. A_OUTER and B_OUTER say
    whether outer scales apply."""
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    number = tl.program_id(0)
    if GROUPED:
        # Neighbouring programs share a tile of rows and, mostly, a group's weights.
        tile = number // NUM_N
        n_tile = number % NUM_N
        group = tl.load(group_ptr + tile).to(tl.int64)
        first = tl.load(first_ptr + tile)
        end = tl.load(end_ptr + tile)
    else:
        # Blocks of GROUP_M row tiles go through all columns together, which keeps both operands in the L2 cache.
        num_m = tl.cdiv(m, BLOCK_M)
        width = GROUP_M * NUM_N
        first_tile = (number // width) * GROUP_M
        height = tl.minimum(num_m - first_tile, GROUP_M)
        tile = first_tile + (number % width) % height
        n_tile = (number % width) // height
        group = tl.zeros((), tl.int64)
        first = tile * BLOCK_M
        end = m
    if (first >= end) | (group < -1):  # no group is below -1: said so that all three are loaded at once
        return
    rows = first + tl.arange(0, BLOCK_M)
    columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GROUPED:
        if group < 0:  # rows behind the last group
            out_ptrs = out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
            tl.store(out_ptrs, zeros, mask=(rows < end)[:, None] & (columns < N)[None, :])
            return
    # Rows and columns outside read a neighbour's numbers and are not stored: loads without a mask stay wide.
    a_rows = tl.minimum(rows, end - 1)
    if GATHERED:
        a_rows = tl.load(row_ptr + a_rows)
    a_rows = a_rows.to(tl.int64)
    safe_columns = columns if N % BLOCK_N == 0 else tl.minimum(columns, N - 1)
    # Asked for here, since nothing would hide the wait behind the loop.
    if A_OUTER:
        a_outer = tl.load(a_outer_ptr + a_rows)
    if B_OUTER:
        b_outer = tl.load(b_outer_ptr + group)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_rows[:, None] * K + k[None, :]
    b_ptrs = b_ptr + group * N * K + safe_columns[None, :] * B_STRIDE_N + k[:, None] * B_STRIDE_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < K - k0, other=0.0)
            b = tl.load(b_ptrs, mask=k[:, None] < K - k0, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * B_STRIDE_K
    if A_OUTER:
        total = total * a_outer[:, None]
    if B_OUTER:
        total = total * b_outer
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def multiply_transposed_kernel(
    g_ptr, x_ptr, ends_ptr, out_ptr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out [E, N, K] = g [rows of e, N].T @ x [rows of e, K], float32."""
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    group = pid // (NUM_N * NUM_K)
    n_tile = (pid // NUM_K) % NUM_N
    k_tile = pid % NUM_K
    end = tl.load(ends_ptr + group)
    first = 0
    if group > 0:
        first = tl.load(ends_ptr + group - 1)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    safe_n = n if N % BLOCK_N == 0 else tl.minimum(n, N - 1)
    safe_k = k if K % BLOCK_K == 0 else tl.minimum(k, K - 1)
    row = first + tl.arange(0, BLOCK_M)
    g_ptrs = g_ptr + row[None, :].to(tl.int64) * N + safe_n[:, None]
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * K + safe_k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for row0 in range(first, end, BLOCK_M):
        # Both are masked: a number that is not there may be NaN.
        inside = row0 + tl.arange(0, BLOCK_M) < end
        g = tl.load(g_ptrs, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
        total = tl.dot(g, x, total, input_precision="ieee")
        g_ptrs += BLOCK_M * N
        x_ptrs += BLOCK_M * K
    out_ptrs = out_ptr + group.to(tl.int64) * N * K + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(out_ptrs, total, mask=(n < N)[:, None] & (k < K)[None, :])


# --- launches ------------------------------------------------------------------------------------------------------------------

_FORWARD = {
    # By the bytes of a number. Stages are what fits 228 KiB of shared memory.
    1: dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, GROUP_M=8, num_warps=8, num_stages=4),
    2: dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
    4: dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=3),
}
_TRANSPOSED = {
    2: dict(BLOCK_N=128, BLOCK_K=256, BLOCK_M=64, num_warps=8, num_stages=3),
    4: dict(BLOCK_N=64, BLOCK_K=64, BLOCK_M=32, num_warps=4, num_stages=3),
}


def multiply_launch(m: int, n: int, k: int, dtype, out_dtype, *, num_groups: int, grouped: bool, gathered: bool = False,
                    transposed: bool = False, a_outer: bool, b_outer: bool) -> gpu.Launch:  # fmt: skip
    """Inputs: a [any, k], b [num_groups, n, k] (`transposed`: [num_groups, k, n]), outer scales of a and b, which row of a each
    of the m rows is (any array where not `gathered`), the three arrays of `group_tiles_launch` (any where not `grouped`), m.
    Output: [m, n]. Raises ValueError where the tuning table has a tile that does not fit."""
    itemsize = jnp.dtype(dtype).itemsize
    op = f"multiply{'_transposed' if transposed else ''}_{jnp.dtype(dtype).name}"
    config = tuning.config(op, rows=m // num_groups, features=n, depth=k, default=_FORWARD[itemsize])
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    shared = (block_m + block_n) * config["BLOCK_K"] * config["num_stages"] * itemsize
    gpu.check_tile(op, config, sums=block_m * block_n, shared_bytes=shared)
    constants = dict(
        N=n,
        K=k,
        B_STRIDE_N=1 if transposed else k,
        B_STRIDE_K=n if transposed else 1,
        GROUPED=grouped,
        GATHERED=gathered,
        A_OUTER=a_outer,
        B_OUTER=b_outer,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=config["BLOCK_K"],
        GROUP_M=config["GROUP_M"],
    )
    tiles = num_tiles(m, num_groups, block_m) if grouped else triton.cdiv(m, block_m)
    grid = (tiles * triton.cdiv(n, block_n),)
    return gpu.Launch(
        multiply_kernel, gpu.outputs(((m, n), out_dtype)), grid, constants, config["num_warps"], config["num_stages"]
    )


def num_tiles(m: int, num_groups: int, block_m: int) -> int:
    """How many tiles of block_m rows any division of m rows into groups, and rows behind them, can need."""
    return m // block_m + min(num_groups + 1, m)


def group_tiles_launch(m: int, num_groups: int, block_m: int) -> gpu.Launch:
    """Inputs: group sizes int32 [num_groups], m. Outputs, for each tile: group (-1 for rows behind the last one), first row, end
    of the group's rows."""
    tiles = num_tiles(m, num_groups, block_m)
    constants = dict(E=num_groups, E2=triton.next_power_of_2(num_groups), ROWS=block_m, TILES=tiles)
    out_shape = gpu.outputs(*[((tiles,), jnp.int32)] * 3)
    return gpu.Launch(group_tiles_kernel, out_shape, (triton.cdiv(tiles, 64),), constants)


def multiply_transposed_launch(m: int, n: int, k: int, dtype, *, num_groups: int) -> gpu.Launch:
    """Inputs: g [m, n], x [m, k], ends of the groups int32 [num_groups]. Output: float32 [num_groups, n, k]. No rows: no
    programs."""
    itemsize = jnp.dtype(dtype).itemsize
    op = f"multiply_rows_{jnp.dtype(dtype).name}"
    config = tuning.config(op, rows=m // num_groups, features=n, depth=k, default=_TRANSPOSED[itemsize])
    shared = (config["BLOCK_N"] + config["BLOCK_K"]) * config["BLOCK_M"] * config["num_stages"] * itemsize
    gpu.check_tile(op, config, sums=config["BLOCK_N"] * config["BLOCK_K"], shared_bytes=shared)
    constants = dict(E=num_groups, N=n, K=k, BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], BLOCK_M=config["BLOCK_M"])
    grid = (num_groups * triton.cdiv(n, config["BLOCK_N"]) * triton.cdiv(k, config["BLOCK_K"]) * min(m, 1),)
    return gpu.Launch(
        multiply_transposed_kernel, gpu.outputs(((num_groups, n, k), jnp.float32)), grid, constants, config["num_warps"],
        config["num_stages"],
    )  # fmt: skip


# --- operands ------------------------------------------------------------------------------------------------------------------


def _plain(operand: operands.Operand, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Values of an operand in the type that is multiplied, and its outer scale."""
    if isinstance(operand, Nvfp4Array):
        operand = nvfp4_triton.expand(operand, dtype)
    if isinstance(operand, ExpandedArray):
        values = operand.values if operand.values.dtype == dtype else operand.values.astype(dtype)  # E4M3 to bfloat16: exact
        return values, operand.outer_scale
    if operand.dtype != dtype:
        raise NotImplementedError(f"operands of {operand.dtype} and {jnp.dtype(dtype)} are not multiplied; cast one first")
    return operand, None


def _multiply(a, b, a_outer, b_outer, group_sizes, *, out_dtype, rows=None, transposed=False, kernel="triton"):
    m, k = (a.shape[0] if rows is None else rows.shape[0]), a.shape[1]
    num_groups = b.shape[0]
    n = b.shape[2] if transposed else b.shape[1]
    if a_outer is not None and a_outer.ndim == 0:
        a_outer = jnp.broadcast_to(a_outer, (a.shape[0],))
    if kernel == "mosaic" and m:
        if rows is not None:
            a, a_outer = jax.tree.map(lambda leaf: leaf[rows], (a, a_outer))
        return mosaic.multiply(a, b, group_sizes, a_outer, b_outer, out_dtype=out_dtype, transposed=transposed)
    grouped = group_sizes is not None
    launch = multiply_launch(
        m, n, k, a.dtype, out_dtype, num_groups=num_groups, grouped=grouped, gathered=rows is not None, transposed=transposed,
        a_outer=a_outer is not None, b_outer=b_outer is not None,
    )  # fmt: skip
    unused = jnp.zeros((1,), jnp.int32)
    tiles = (unused,) * 3
    if grouped:
        tiles = gpu.run(group_tiles_launch(m, num_groups, launch.constants["BLOCK_M"]), group_sizes.astype(jnp.int32), m)
    outer = [jnp.zeros((1,), jnp.float32) if each is None else each.reshape(-1) for each in (a_outer, b_outer)]
    rows = unused if rows is None else rows.astype(jnp.int32)
    return gpu.run(launch, a, b, *outer, rows, *tiles, m)[0]


# --- the operations ------------------------------------------------------------------------------------------------------------


def grouped_matmul(x, w, group_sizes, *, rows=None, out_dtype=jnp.bfloat16, kernel="triton"):
    """`grouped_matmul` for operands of any kind; w [E, N, K]. `group_sizes` None: dense, E = 1."""
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    inner, dtype = operands.packed_product(x, w, num_rows), operands.product_dtype(x, w)
    if kernel == "triton" and inner is not None:
        if rows is not None:
            x = operands.take_rows(x, rows)
        sizes = jnp.full((1,), num_rows, jnp.int32) if group_sizes is None else group_sizes.astype(jnp.int32)
        if inner != "native":
            x = ExpandedArray(*_plain(x, dtype))
        return triton_packed.grouped_matmul(x, w, sizes, inner=inner, out_dtype=out_dtype)
    x_values, x_outer = _plain(x, dtype)
    w_values, w_outer = _plain(w, dtype)
    return _multiply(x_values, w_values, x_outer, w_outer, group_sizes, rows=rows, out_dtype=out_dtype, kernel=kernel)


def grouped_matmul_dgrad(g, w, group_sizes, *, out_dtype=jnp.float32, kernel="triton"):
    """g @ dequantized(w): bfloat16 operands, since code x block scale is exact there; float32 for float32 weights."""
    dtype = operands.gradient_dtype(w)
    w_values, w_outer = _plain(w, dtype)
    g = g.astype(dtype)
    return _multiply(g, w_values, None, w_outer, group_sizes, out_dtype=out_dtype, transposed=True, kernel=kernel)


def _dequantized(operand: operands.Operand, dtype) -> jax.Array:
    """The numbers that an operand stands for, in one pass: exact in bfloat16 with power-of-two outer scales, else rounded."""
    if isinstance(operand, Nvfp4Array):
        return nvfp4_triton.dequantize(operand, dtype)
    if isinstance(operand, ExpandedArray):
        return operands.dequantized(operand).astype(dtype)
    return operand


def grouped_matmul_wgrad(x, g, group_sizes, *, kernel="triton"):
    """g.T @ dequantized(x) for each group. x is exact by the default rule; outer scales that are no powers of two cost x one more
    rounding to bfloat16."""
    dtype = operands.gradient_dtype(x)
    x, g = _dequantized(x, dtype), g.astype(dtype)
    m, n = g.shape
    if kernel == "mosaic" and m:
        return mosaic.multiply_transposed(g, x, group_sizes)
    num_groups = 1 if group_sizes is None else group_sizes.shape[0]
    ends = jnp.full((1,), m, jnp.int32) if group_sizes is None else jnp.cumsum(group_sizes).astype(jnp.int32)
    launch = multiply_transposed_launch(m, n, x.shape[1], dtype, num_groups=num_groups)
    return gpu.run(launch, g, x, ends)[0]
