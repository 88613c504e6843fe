"""Causal grouped-query attention on an NVIDIA GPU: packed for training, and over the pages of a cache for decoding.

One kernel serves both, so that both give the same bits. A program has a tile of query tokens and one key/value head; the rows of
its tile are the tokens times the query heads of that head, so keys and values are read once for all of them. A tile has at least
64 rows, filled up where there are fewer, so that every bfloat16 product is one kind of tensor-core instruction.

What a row's bits are made of: keys in blocks of `KEY_BLOCK`, counted from the start of the sequence; an online softmax over the
blocks of a chunk of `CHUNK_BLOCKS`, which starts from nothing; the chunks merged in order. Chunks stand alone, so different
programs may take them (decoding few long sequences), and `merge_kernel` then merges as one program does. Blocks that a row does
not see multiply by one and add zero. Nothing depends on the tile, the neighbours, or where a key lies in memory.

The blocks that all rows of a tile see have a loop of their own, without masks, which are a quarter of the instructions. Both
loops do the same operations. A block is 64 keys: with 128 the scores take another 32 registers a thread, and the loop spills.

Scores are scaled in base 2: with s = q . k and c = log2(e) / sqrt(K), a weight is 2 ** (s c - max). The log-sum-exp that the
backward reads is in base 2 as well: lse = max + log2(sum), so that a probability is 2 ** (s c - lse).

Let B be sequences (or rows of packed sequences), T query tokens, H query heads, N key/value heads, G = H / N, K the head
dimension, P pages, S = KEY_BLOCK slots of a page, J pages of a table.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gpu, tuning
from pallas_kernels.attention import triton_backward
from pallas_kernels.attention.triton_backward import scale_log2
from pallas_kernels.triton_numerics import INTERPRETED, round_to

__all__ = ["CHUNK_BLOCKS", "KEY_BLOCK", "attention", "attention_backward", "paged_attention"]

KEY_BLOCK = 64  # keys per step of the online softmax; a page of the cache
CHUNK_BLOCKS = 32  # blocks that share an online softmax: 2048 keys


@triton.jit
def _operand(x):
    """An operand of a product. Triton's interpreter does not multiply bfloat16; in float32 the products are as exact."""
    if INTERPRETED:
        return x.to(tl.float32)
    return x


@triton.jit
def _finite(maximum):
    """0 in place of the -inf of a row that has seen nothing, since -inf - -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """The softmax over two sets of keys from those over each. One that is empty changes nothing: times one, plus zero."""
    maximum = tl.maximum(max_a, max_b)
    scale_a = tl.exp2(max_a - _finite(maximum))
    scale_b = tl.exp2(max_b - _finite(maximum))
    return maximum, sum_a * scale_a + sum_b * scale_b, acc_a * scale_a[:, None] + acc_b * scale_b[:, None]


@triton.jit
def _weighted_mean(total, acc):
    """acc / total; 0 for a row that attends nothing. No zero is negative, since a block that a row does not see may add +0."""
    inverse = tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total))
    return acc * inverse[:, None] + 0.0


@triton.jit
def _attend(
    j, max_, sum_, acc, q, k_ptr, v_ptr, tables_ptr, offsets, slot, last_slot, row_last,
    PAGED: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's part of the online softmax. SIZE: numbers from a block to the next. Without MASKED all rows see all of it."""
    place = (tl.load(tables_ptr + j).to(tl.int64) if PAGED else j) * SIZE + offsets
    first = j * BLOCK
    if MASKED:
        # Behind the last slot may be anything, and zero times NaN is NaN.
        there = (first + slot <= last_slot)[:, None]
        keys, values = tl.load(k_ptr + place, mask=there, other=0.0), tl.load(v_ptr + place, mask=there, other=0.0)
    else:
        keys, values = tl.load(k_ptr + place), tl.load(v_ptr + place)
    scores = tl.dot(q, tl.trans(_operand(keys)), input_precision="ieee")
    if MASKED:
        scores = tl.where((first + slot)[None, :] <= row_last[:, None], scores, float("-inf"))
    new_max = tl.maximum(max_, tl.max(scores, axis=1) * SCALE)
    subtract = _finite(new_max)
    weights = tl.exp2(tl.fma(scores, SCALE, -subtract[:, None]))
    rescale = tl.exp2(max_ - subtract)
    sum_ = sum_ * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(_operand(round_to(weights, values.dtype)), _operand(values), acc * rescale[:, None], input_precision="ieee")
    return new_max, sum_, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, positions_ptr, batch, length, table_length, out_ptr, stats_ptr,
    PAGED: tl.constexpr, SPLIT: tl.constexpr, ONE_CHUNK: tl.constexpr, DECODES: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, HEAD_ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [B, T, H, K], stats [B, H, T]: the log-sum-exp. SPLIT: program_id(1) is a chunk, out [chunks, B, T, H, K] float32 the
    sums of weighted values, stats [2, chunks, B, T, H] the maxima and the sums of the weights; chunks without keys are not
    written. DECODES: all blocks in the loop with masks; memory is what bounds a tile of few tokens, and one loop starts to read
    once. HEAD_ROWS: G, filled up to a power of two; a token has so many rows of the tile. CHUNK: blocks of a chunk."""
    TOKENS: tl.constexpr = BLOCK_M // HEAD_ROWS
    H: tl.constexpr = G * N
    # Long tiles first, all heads and sequences of a tile side by side: short ones fill the gaps at the end.
    number = tl.program_id(0)
    first_token = (tl.cdiv(length, TOKENS) - 1 - number // (batch * N)) * TOKENS
    b = number // N % batch
    head = number % N
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // HEAD_ROWS
    inside = token < length
    if PAGED:
        k_ptr += head * K
        v_ptr += head * K
        tables_ptr += b * table_length
        positions_ptr += b * length
        last_slot = tl.maximum(tl.max(tl.load(positions_ptr + token, mask=inside, other=-1), axis=0), -1)
        # Rows of no token see what the others see, so that they ask for no mask.
        row_last = tl.load(positions_ptr + token, mask=inside, other=last_slot)
        least = tl.min(row_last, axis=0)
    else:
        # Sequences start at multiples of BLOCK and a tile is not larger, so it has one start. The first row of its block knows.
        aligned = first_token // BLOCK * BLOCK
        start = tl.maximum(aligned - tl.load(positions_ptr + b * length + aligned), 0)
        sequence = (b * length + start).to(tl.int64) * (N * K) + head * K
        k_ptr += sequence
        v_ptr += sequence
        row_last = token - start
        last_slot = tl.minimum(first_token + TOKENS, length) - 1 - start
        least = first_token - start
    num_blocks = (last_slot + BLOCK) // BLOCK
    if SPLIT:
        first_chunk = tl.program_id(1)
        if first_chunk * CHUNK >= num_blocks:
            return
        end_chunk = first_chunk + 1
    else:
        first_chunk = 0
        end_chunk = tl.cdiv(num_blocks, CHUNK)

    row_head = head * G + row % HEAD_ROWS
    stored = inside & (row % HEAD_ROWS < G)
    k = tl.arange(0, K)
    q_row = ((b * length + token).to(tl.int64) * H + row_head) * K
    q = _operand(tl.load(q_ptr + q_row[:, None] + k[None, :], mask=stored[:, None], other=0.0))
    slot = tl.arange(0, BLOCK)
    offsets = slot[:, None] * (N * K) + k[None, :]

    total_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BLOCK_M,), tl.float32)
    total_acc = tl.zeros((BLOCK_M, K), tl.float32)
    for chunk in range(first_chunk, end_chunk):
        max_ = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sum_ = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, K), tl.float32)
        first = chunk * CHUNK
        end = tl.minimum(first + CHUNK, num_blocks)
        full = first
        if not DECODES:
            full = tl.maximum(tl.minimum((least + 1) // BLOCK, end), first)
            for j in range(first, full):
                max_, sum_, acc = _attend(
                    j, max_, sum_, acc, q, k_ptr, v_ptr, tables_ptr, offsets, slot, last_slot, row_last,
                    PAGED, False, BLOCK * N * K, SCALE, BLOCK,
                )  # fmt: skip
        for j in range(full, end):
            max_, sum_, acc = _attend(
                j, max_, sum_, acc, q, k_ptr, v_ptr, tables_ptr, offsets, slot, last_slot, row_last,
                PAGED, True, BLOCK * N * K, SCALE, BLOCK,
            )  # fmt: skip
        if ONE_CHUNK:
            total_max, total_sum, total_acc = max_, sum_, acc
        else:
            total_max, total_sum, total_acc = _merge(total_max, total_sum, total_acc, max_, sum_, acc)

    if SPLIT:
        own = first_chunk.to(tl.int64) * batch * length * H + (b * length + token) * H + row_head
        sums_ptr = stats_ptr + tl.num_programs(1).to(tl.int64) * batch * length * H
        tl.store(stats_ptr + own, total_max, mask=stored)
        tl.store(sums_ptr + own, total_sum, mask=stored)
        tl.store(out_ptr + own[:, None] * K + k[None, :], total_acc, mask=stored[:, None])
    else:
        out = round_to(_weighted_mean(total_sum, total_acc), out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_row[:, None] + k[None, :], out, mask=stored[:, None])
        lse_row = (b * H + row_head).to(tl.int64) * length + token
        tl.store(stats_ptr + lse_row, total_max + tl.log2(total_sum), mask=stored)


@triton.jit
def merge_kernel(
    acc_ptr, stats_ptr, positions_ptr, rows, out_ptr, H: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """acc [CHUNKS, rows, K], stats [2, CHUNKS, rows], positions [rows / H] -> out [rows, K]: chunks of CHUNK slots in order."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    k = tl.arange(0, K)
    chunks = (tl.maximum(tl.load(positions_ptr + row // H, mask=inside, other=-1), -1) + CHUNK) // CHUNK
    total_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total_sum = tl.zeros((ROWS,), tl.float32)
    total_acc = tl.zeros((ROWS, K), tl.float32)
    own = row
    for chunk in range(0, tl.max(chunks, axis=0)):
        there = chunk < chunks
        max_ = tl.load(stats_ptr + own, mask=there, other=float("-inf"))
        sum_ = tl.load(stats_ptr + CHUNKS * rows + own, mask=there, other=0.0)
        acc = tl.load(acc_ptr + own[:, None] * K + k[None, :], mask=there[:, None], other=0.0)
        total_max, total_sum, total_acc = _merge(total_max, total_sum, total_acc, max_, sum_, acc)
        own += rows
    out = round_to(_weighted_mean(total_sum, total_acc), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + k[None, :], out, mask=inside[:, None])


# --- launches ------------------------------------------------------------------------------------------------------------------

# Training: 128 rows read a block of keys from the cache half as often as 64 do. Decoding has few rows, and reads ahead (a page's
# number takes a stage of its own); with five stages two programs fit the shared memory of a multiprocessor. float32 has one tile
# for everything: without tensor cores a layout's sums follow the tile. Products are unrolled into multiply-adds, so it is small.
_PREFILL = dict(BLOCK_M=128, num_warps=8, num_stages=3)
_DECODE = dict(BLOCK_M=64, num_warps=4, num_stages=5)
_FLOAT32 = dict(BLOCK_M=16, num_warps=8, num_stages=1)
_MERGE_ROWS = 4


def attention_launch(
    B: int,
    T: int,
    H: int,
    N: int,
    K: int,
    dtype,
    *,
    table_length: int | None = None,
    split: bool | None = None,
) -> gpu.Launch:
    """Inputs: q [B, T, H, K]; k, v [B, T, N, K], or pages [P, KEY_BLOCK, N, K] where there is a `table_length` J; tables [B, J]
    (any array where there are none); positions [B, T]; B; T; J. Outputs: see `attention_kernel`.

    Args:
      B: sequences, or rows of packed ones.
      T: query tokens of each.
      H: query heads.
      N: key/value heads.
      K: head dimension.
      dtype: bfloat16 or float32.
      table_length: J, where keys and values are pages.
      split: whether chunks have programs of their own; None: where a tile holds all of a sequence's tokens, as in decoding.
    """
    dtype = jnp.dtype(dtype)
    paged = table_length is not None
    G = H // N
    head_rows = triton.next_power_of_2(G)
    if head_rows > 64:
        raise NotImplementedError(f"attention: {G} query heads per key/value head; the kernels have at most 64")
    decodes = T * head_rows <= 64
    if dtype == jnp.float32:
        block_m, num_warps, num_stages = max(_FLOAT32["BLOCK_M"], head_rows), _FLOAT32["num_warps"], _FLOAT32["num_stages"]
    else:
        op = f"attention_{'decode' if decodes else 'prefill'}_{dtype.name}"
        config = tuning.config(op, rows=T, features=H, depth=K, default=_DECODE if decodes else _PREFILL)
        block_m = max(64, min(config["BLOCK_M"], KEY_BLOCK * head_rows))  # a tile has one sequence: no more tokens than a block
        # More warps than there are groups of 16 rows would share a row's keys, and sum them in another order.
        num_warps, num_stages = min(config["num_warps"], block_m // 16), config["num_stages"]
    programs = triton.cdiv(T, block_m // head_rows) * B * N
    chunks = triton.cdiv(table_length if paged else triton.cdiv(T, KEY_BLOCK), CHUNK_BLOCKS)
    if split is None:
        split = paged and decodes and chunks > 1
    constants = dict(
        PAGED=paged, SPLIT=split, ONE_CHUNK=split or chunks == 1, DECODES=decodes, G=G, N=N, K=K,
        SCALE=scale_log2(K), BLOCK_M=block_m, HEAD_ROWS=head_rows, BLOCK=KEY_BLOCK, CHUNK=CHUNK_BLOCKS,
    )  # fmt: skip
    if split:
        out_shape = gpu.outputs(((chunks, B, T, H, K), jnp.float32), ((2, chunks, B, T, H), jnp.float32))
    else:
        out_shape = gpu.outputs(((B, T, H, K), dtype), ((B, H, T), jnp.float32))
    grid = (programs, chunks) if split else (programs,)
    return gpu.Launch(attention_kernel, out_shape, grid, constants, num_warps, num_stages)


def merge_launch(chunks: int, rows: int, H: int, K: int, dtype) -> gpu.Launch:
    """Inputs: the outputs of a split launch, positions, rows = B T H. Output: [rows, K]."""
    constants = dict(H=H, K=K, CHUNKS=chunks, CHUNK=CHUNK_BLOCKS * KEY_BLOCK, ROWS=_MERGE_ROWS)
    return gpu.Launch(
        merge_kernel, gpu.outputs(((rows, K), dtype)), (triton.cdiv(rows, _MERGE_ROWS),), constants, num_warps=4, num_stages=3
    )


# --- the operations ------------------------------------------------------------------------------------------------------------


def attention(q_BTHK, k_BTNK, v_BTNK, positions_BT):
    """Packed causal self-attention. Returns out [B, T, H, K] and the log-sum-exp float32 [B, H, T], in base 2.

    The first row of each aligned block of KEY_BLOCK rows says where the sequence of the whole block starts, so padding inside of
    a block attends what a token of the sequence in that place would.
    """
    B, T, H, K = q_BTHK.shape
    launch = attention_launch(B, T, H, k_BTNK.shape[2], K, q_BTHK.dtype)
    positions_BT = positions_BT.astype(jnp.int32)
    return tuple(gpu.run(launch, q_BTHK, k_BTNK, v_BTNK, positions_BT, positions_BT, B, T, 0))


def attention_backward(q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse_BHT, g_BTHK):
    """Gradients of q, k and v. Padding attends what it attends in the forward, as its log-sum-exp wants."""
    T = positions_BT.shape[1]
    token_T = jnp.arange(T, dtype=jnp.int32)
    start_BJ = jnp.maximum(token_T[None, ::KEY_BLOCK] - positions_BT[:, ::KEY_BLOCK].astype(jnp.int32), 0)
    positions_BT = token_T[None] - jnp.repeat(start_BJ, KEY_BLOCK, axis=1)[:, :T]
    return triton_backward.attention_backward(q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse_BHT, g_BTHK)


def paged_attention(q_BTHK, k_PSNK, v_PSNK, tables_BJ, positions_BT, *, split: bool | None = None) -> jax.Array:
    """See `api.paged_attention`. `split`: see `attention_launch`."""
    B, T, H, K = q_BTHK.shape
    J = tables_BJ.shape[1]
    launch = attention_launch(B, T, H, k_PSNK.shape[2], K, q_BTHK.dtype, table_length=J, split=split)
    positions_BT = positions_BT.astype(jnp.int32)
    out, stats = gpu.run(launch, q_BTHK, k_PSNK, v_PSNK, tables_BJ.astype(jnp.int32), positions_BT, B, T, J)
    if not launch.constants["SPLIT"]:
        return out
    rows = math.prod(out.shape[1:-1])
    merge = merge_launch(out.shape[0], rows, H, K, q_BTHK.dtype)
    return gpu.run(merge, out, stats, positions_BT, rows)[0].reshape(q_BTHK.shape)
