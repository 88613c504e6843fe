"""MoE router on a GPU: logits, softmax and top-k in one kernel, for tiles of ROWS tokens.

The product is float32 by float32 on the ordinary cores ("ieee"): neither TF32 nor bfloat16 passes. Every tile has the same shape
and walks through D in the same steps, so a token's bits do not depend on how many there are. They are not the reference's bits:
its matrix product adds in another order.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import exp, ordered_sum, padded, sortable

_ROWS = 16
_BLOCK_D = 32
_SMALLEST = tl.constexpr(-0x80000000)


@triton.jit
def _router_kernel(
    x,
    weight,
    num_rows,
    weights,
    experts,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_E: tl.constexpr,
    SIZE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.expand_dims(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), 1)
    expert = tl.expand_dims(tl.arange(0, SIZE_E), 0)
    depth = tl.arange(0, BLOCK_D)
    logits = tl.zeros((ROWS, SIZE_E), tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        column = start + tl.expand_dims(depth, 0)
        tile = tl.load(x + row * WIDTH + column, mask=(row < num_rows) & (column < WIDTH), other=0.0).to(tl.float32)
        line = start + tl.expand_dims(depth, 1)
        matrix = tl.load(weight + expert * WIDTH + line, mask=(expert < EXPERTS) & (line < WIDTH), other=0.0)
        logits = tl.dot(tile, matrix, logits, input_precision="ieee")

    is_expert = expert < EXPERTS
    top = tl.max(tl.where(is_expert, logits, float("-inf")), axis=1)
    powers = tl.where(is_expert, exp(logits - tl.expand_dims(top, 1)), 0.0)
    keys = tl.where(is_expert, sortable(logits), _SMALLEST)
    rank = tl.expand_dims(tl.arange(0, SIZE_K), 0)
    chosen = tl.zeros((ROWS, SIZE_K), tl.float32)
    numbers = tl.zeros((ROWS, SIZE_K), tl.int32)
    for r in tl.static_range(TOP_K):
        largest = tl.expand_dims(tl.max(keys, axis=1), 1)
        number = tl.expand_dims(tl.min(tl.where(keys == largest, expert, SIZE_E), axis=1), 1)
        is_number = expert == number
        power = tl.expand_dims(tl.sum(tl.where(is_number, powers, 0.0), axis=1), 1)  # of zeros and one number: exact
        chosen = tl.where(rank == r, power, chosen)
        numbers = tl.where(rank == r, number, numbers)
        keys = tl.where(is_number, _SMALLEST, keys)
    if NORMALIZE:
        total = ordered_sum(chosen, ROWS, SIZE_K)
    else:
        total = ordered_sum(powers, ROWS, SIZE_E)
    mask = (row < num_rows) & (rank < TOP_K)
    tl.store(weights + row * TOP_K + rank, tl.div_rn(chosen, tl.broadcast_to(tl.expand_dims(total, 1), chosen.shape)), mask=mask)
    tl.store(experts + row * TOP_K + rank, numbers, mask=mask)


def router_launch(num_rows: int, width: int, num_experts: int, top_k: int, normalize: bool) -> gpu.Launch:
    """Inputs: x [M, D], weight [E, D] float32, M. Outputs: weights [M, k] float32, experts [M, k] int32."""
    return gpu.Launch(
        _router_kernel,
        gpu.outputs(((num_rows, top_k), jnp.float32), ((num_rows, top_k), jnp.int32)),
        grid=(triton.cdiv(num_rows, _ROWS),),
        constants=dict(
            WIDTH=width,
            EXPERTS=num_experts,
            TOP_K=top_k,
            NORMALIZE=normalize,
            ROWS=_ROWS,
            SIZE_E=max(16, padded(num_experts)),
            SIZE_K=padded(top_k),
            BLOCK_D=_BLOCK_D,
        ),
        num_warps=8 if num_experts > 64 else 4,
    )


def router(x_MD, weight_ED, *, top_k, normalize) -> tuple[jax.Array, jax.Array]:
    launch = router_launch(*x_MD.shape, weight_ED.shape[0], top_k, normalize)
    weights_Mk, experts_Mk = gpu.run(launch, x_MD, weight_ED, x_MD.shape[0])
    return weights_Mk, experts_Mk
