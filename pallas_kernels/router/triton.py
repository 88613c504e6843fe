"""MoE router on a GPU, in two kernels: logits of tiles of tokens and experts, then softmax and top-k of each token.

The weight is float32 and the tokens are bfloat16, which the tensor cores cannot multiply by each other. So the weight is cut into
three bfloat16 numbers whose sum it is (8 of its 24 bits each; what is below 2^-133 is lost): products are exact, and they are
added in float32, the small ones first, sums of DEPTH products apart from each other. No TF32 and no rounding of the weight is in
it, logits keep the bound of a float32 product, and it is ten times as fast. Tokens in float32 (the `fp32` recipe) go to the
ordinary cores ("ieee").

D is cut into PARTS, whose sums are added one after the other: by the program itself where there are tokens enough to fill a GPU;
else each part has a program of its own, and the second kernel adds them. So a token's bits do not depend on how many there are.
They are not the reference's bits: its matrix product adds in another order.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu
from pallas_kernels.triton_numerics import INTERPRETED, exp, ordered_sum, padded, sortable

_TILE_EXPERTS = 64  # rows of a tensor-core product
_FEW_TOKENS, _TILE_TOKENS = 16, 64  # columns: few, so that decoding has more programs
_MANY_TOKENS = 512  # from here on there are programs enough
# Products that are summed on their own, and parts of D whose sums are: the order of sums.
_DEPTH, _PARTS = 64, 4
_CHOICE_NUMBERS = 512  # that a program of one warp keeps
_UNROLLED = tl.constexpr(16)  # choices in a row; of all of 128 experts a compiler makes a program that takes it 20 s
_SMALLEST = tl.constexpr(-0x80000000)


@triton.jit
def _bfloat16_part(x):
    """The first 8 bits of float32 numbers, as bfloat16, and what is left of them, exactly; of infinity, zero is left."""
    part = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = tl.where(part == x, 0.0, x - part)
    return part if INTERPRETED else part.to(tl.bfloat16), rest


@triton.jit
def _logits_kernel(
    x, weight, num_rows, logits,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TILE_EXPERTS: tl.constexpr, TILE_TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """logits [M, E] of x [M, D] and weight [E, D]; the experts are the rows of the product, so that tokens may be few.

    The PARTS sums of PART products each are added one after the other; APART: each by a program of its own, which leaves it in
    logits [PARTS, M, E] for the choice to add."""
    row = (tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS))[:, None]
    expert = (tl.program_id(1) * TILE_EXPERTS + tl.arange(0, TILE_EXPERTS))[:, None]
    total = tl.zeros((TILE_EXPERTS, TILE_TOKENS), tl.float32)
    sums = tl.zeros((TILE_EXPERTS, TILE_TOKENS), tl.float32)
    for start in range(0, PART if APART else PARTS * PART, DEPTH):
        column = tl.program_id(2) * PART + start + tl.arange(0, DEPTH)[None, :]
        tile = tl.load(x + row * WIDTH + column, mask=(row < num_rows) & (column < WIDTH), other=0.0)
        matrix = tl.load(weight + expert * WIDTH + column, mask=(expert < EXPERTS) & (column < WIDTH), other=0.0)
        if SPLIT:
            if INTERPRETED:
                tile = tile.to(tl.float32)
            high, rest = _bfloat16_part(matrix)
            middle, rest = _bfloat16_part(rest)
            low, rest = _bfloat16_part(rest)
            tokens = tl.trans(tile)
            part = tl.dot(low, tokens)
            part = tl.dot(middle, tokens, part)
            sums = sums + tl.dot(high, tokens, part)
        else:
            sums = tl.dot(matrix, tl.trans(tile.to(tl.float32)), sums, input_precision="ieee")
        # Selected, not branched: the loop stays one pipeline.
        ends = (start + DEPTH) % PART == 0
        total = tl.where(ends, total + sums, total)
        sums = tl.where(ends, 0.0, sums)
    expert = tl.program_id(1) * TILE_EXPERTS + tl.arange(0, TILE_EXPERTS)[None, :]
    place = tl.program_id(2).to(tl.int64) * num_rows + row
    tl.store(logits + place * EXPERTS + expert, tl.trans(total), mask=(row < num_rows) & (expert < EXPERTS))


@triton.jit
def _choose(r, keys, powers, chosen, numbers, expert, rank, SIZE_E: tl.constexpr):
    """Takes the largest key of each row, the r-th choice, and leaves the others."""
    largest = tl.max(keys, axis=1)[:, None]
    number = tl.min(tl.where(keys == largest, expert, SIZE_E), axis=1)[:, None]
    is_number = expert == number
    power = tl.sum(tl.where(is_number, powers, 0.0), axis=1)[:, None]  # of zeros and one number: exact
    keys = tl.where(is_number, _SMALLEST, keys)
    return keys, tl.where(rank == r, power, chosen), tl.where(rank == r, number, numbers)


@triton.jit
def _choice_kernel(
    logits, num_rows, weights, experts,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, SIZE_E: tl.constexpr, SIZE_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K largest of each row, ties to the lower number, and their softmax, of the sum of logits [PARTS, M, E]."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    expert = tl.arange(0, SIZE_E)[None, :]
    is_expert = expert < EXPERTS
    inside = (row < num_rows) & is_expert
    logit = tl.load(logits + row * EXPERTS + expert, mask=inside, other=0.0)
    for part in range(1, PARTS):
        plane = logits + tl.cast(part, tl.int64) * num_rows * EXPERTS
        logit = logit + tl.load(plane + row * EXPERTS + expert, mask=inside, other=0.0)
    top = tl.max(tl.where(is_expert, logit, float("-inf")), axis=1)
    powers = tl.where(is_expert, exp(logit - top[:, None]), 0.0)
    keys = tl.where(is_expert, sortable(logit), _SMALLEST)
    rank = tl.arange(0, SIZE_K)[None, :]
    chosen = tl.zeros((ROWS, SIZE_K), tl.float32)
    numbers = tl.zeros((ROWS, SIZE_K), tl.int32)
    if TOP_K <= _UNROLLED:
        for r in tl.static_range(TOP_K):
            keys, chosen, numbers = _choose(r, keys, powers, chosen, numbers, expert, rank, SIZE_E)
    else:
        for r in range(TOP_K):
            keys, chosen, numbers = _choose(r, keys, powers, chosen, numbers, expert, rank, SIZE_E)
    if NORMALIZE:
        total = ordered_sum(chosen, ROWS, SIZE_K)
    else:
        total = ordered_sum(powers, ROWS, SIZE_E)
    mask = (row < num_rows) & (rank < TOP_K)
    tl.store(weights + row * TOP_K + rank, tl.div_rn(chosen, tl.broadcast_to(total[:, None], chosen.shape)), mask=mask)
    tl.store(experts + row * TOP_K + rank, numbers, mask=mask)


def logits_launch(num_rows: int, width: int, num_experts: int, dtype) -> gpu.Launch:
    """Inputs: x [M, D] of `dtype`, weight [E, D] float32, M. Output: float32 [P, M, E], whose sum over P, one after the other, is
    the logits. P is 1 where there are tokens enough to fill a GPU."""
    split = dtype == jnp.bfloat16
    many = num_rows > _MANY_TOKENS
    tile_tokens = _TILE_TOKENS if split and many else _FEW_TOKENS
    planes = 1 if many else _PARTS
    return gpu.Launch(
        _logits_kernel,
        gpu.outputs(((planes, num_rows, num_experts), jnp.float32)),
        grid=(triton.cdiv(num_rows, tile_tokens), triton.cdiv(num_experts, _TILE_EXPERTS), planes),
        constants=dict(
            WIDTH=width,
            EXPERTS=num_experts,
            TILE_EXPERTS=_TILE_EXPERTS,
            TILE_TOKENS=tile_tokens,
            DEPTH=_DEPTH,
            PARTS=_PARTS,
            PART=triton.cdiv(width, _PARTS * _DEPTH) * _DEPTH,
            SPLIT=split,
            APART=not many,
        ),
        num_warps=4,
        num_stages=4 if split else 2,
    )


def choice_launch(num_parts: int, num_rows: int, num_experts: int, top_k: int, normalize: bool) -> gpu.Launch:
    """Inputs: parts of logits [P, M, E] float32, M. Outputs: weights [M, k] float32, experts [M, k] int32."""
    size = max(16, padded(num_experts))
    rows = max(1, _CHOICE_NUMBERS // size)
    return gpu.Launch(
        _choice_kernel,
        gpu.outputs(((num_rows, top_k), jnp.float32), ((num_rows, top_k), jnp.int32)),
        grid=(triton.cdiv(num_rows, rows),),
        constants=dict(
            EXPERTS=num_experts,
            PARTS=num_parts,
            TOP_K=top_k,
            NORMALIZE=normalize,
            ROWS=rows,
            SIZE_E=size,
            SIZE_K=padded(top_k),
        ),
        num_warps=1,
    )


def router(x_MD, weight_ED, *, top_k, normalize) -> tuple[jax.Array, jax.Array]:
    M, D = x_MD.shape
    E = weight_ED.shape[0]
    (logits_PME,) = gpu.run(logits_launch(M, D, E, x_MD.dtype), x_MD, weight_ED, M)
    weights_Mk, experts_Mk = gpu.run(choice_launch(len(logits_PME), M, E, top_k, normalize), logits_PME, M)
    return weights_Mk, experts_Mk
