"""Packed causal attention on Hopper in Pallas (Mosaic GPU): the forward of `triton.py` with the TMA unit and warpgroups of two
kinds, the same bits.

A tile is 128 rows, query tokens times the query heads of one key/value head, and lies within one block of keys: so it has one
sequence, one number of blocks, and only its last block has a mask. A thread block has three warpgroups. The loader asks the TMA
unit for the tile's queries and for one block of keys and values after another, into rings of slots ("full", given back "empty").
Each of the two multipliers has 64 rows. In a step it asks the tensor cores for the scores of the next block and for the weighted
values of this one; while the values are summed, it turns those scores into weights (FlashAttention-3, Shah et al. 2024,
arXiv:2407.08608; to make the two take turns, as there, was no faster here).

As many thread blocks as there are processors go through the tiles, long ones first. The loader runs ahead into the next tile.

Where a chunk of keys ends, its softmax is merged into the running one, which waits in shared memory. See `triton.py` for what a
row's bits are, and `mosaic_softmax.py` for the arithmetic. Let G = H / N be the query heads per key/value head.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.attention import mosaic_backward, mosaic_softmax
from pallas_kernels.attention.api import mosaic_lacks
from pallas_kernels.attention.mosaic_backward_queries import queries_gradient
from pallas_kernels.attention.mosaic_tiles import BLOCK, MULTIPLIERS, divide_work, kernel, slots, take_turns
from pallas_kernels.grouped_matmul.mosaic_ring import swizzled

__all__ = ["CHUNK_BLOCKS", "Config", "KEY_BLOCK", "attention", "attention_backward"]

KEY_BLOCK = BLOCK  # see `triton.py`: with another number the bits are others
CHUNK_BLOCKS = 32
_ROWS = BLOCK  # of a multiplier
_WIDTH = 64  # columns of a row of 128 bytes
_REGISTERS = (40, 232)  # of a loader's and of a multiplier's thread
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is done. Changes speed, never bits.

    Attributes:
      stages: slots of the ring of keys, and of that of values.
    """

    stages: int = 3


_DEFAULT = Config()


def _queries(shape, interpret):
    """Shared memory [.., 64 rows, 64] as registers and tensor cores see it, and [.., tokens, heads, 64] as the TMA unit does.

    Eight rows of 128 bytes after eight rows of 128 bytes are rows of 128 bytes. Pallas's interpreter keeps each view by
    itself, so there is only the second.
    """
    *leading, tokens, heads, width = shape
    if interpret:
        return plgpu.SMEM(shape, jnp.bfloat16)
    return plgpu.RefUnion(
        plgpu.SMEM((*leading, tokens * heads, width), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.SwizzleTransform(128),)),
    )


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _scores(q_smem, k_smem):
    """q [halves, 64, 64] times the transposed k [64, K]."""

    def products(scores_ref):
        for half in range(q_smem.shape[0]):
            keys = k_smem.at[:, pl.ds(half * _WIDTH, _WIDTH)]
            plgpu.wgmma(scores_ref, q_smem.at[half], keys.transpose((1, 0)))
        return scores_ref[...]

    return pl.run_scoped(products, plgpu.ACC((_ROWS, KEY_BLOCK), jnp.float32))


def _add_values(acc, weights, v_smem):
    """acc + weights [64, 64] times v [64, K]."""

    def products(acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(acc_ref, weights, v_smem)
        return acc_ref[...]

    return pl.run_scoped(products, plgpu.ACC(acc.shape, jnp.float32))


def _scores_and_values(q_smem, k_smem, acc, weights, v_smem, softmax):
    """`_scores` of a block and `_add_values` of the one before it; `softmax` gets the scores while the values are summed."""

    def products(scores_ref, acc_ref):
        acc_ref[...] = acc
        for half in range(q_smem.shape[0]):
            keys = k_smem.at[:, pl.ds(half * _WIDTH, _WIDTH)]
            plgpu.wgmma(scores_ref, q_smem.at[half], keys.transpose((1, 0)))
        plgpu.wgmma(acc_ref, weights, v_smem)
        result = softmax(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        return acc_ref[...], result

    return pl.run_scoped(products, plgpu.ACC((_ROWS, KEY_BLOCK), jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


# The interpreter has no operands in registers and no accumulators with a value, so there these are products of arrays.


def _array_scores(q_smem, k_smem):
    q_HRD = q_smem[...].reshape(-1, _ROWS, _WIDTH)
    q = jnp.concatenate(list(q_HRD), axis=1).astype(jnp.float32)
    scores = jnp.dot(q, k_smem[...].astype(jnp.float32).T)
    plgpu.commit_smem()  # tensor cores read as the TMA unit writes; registers do not
    return scores


def _array_add_values(acc, weights, v_smem):
    acc = acc + jnp.dot(weights.astype(jnp.float32), v_smem[...].astype(jnp.float32))
    plgpu.commit_smem()
    return acc


def _array_scores_and_values(q_smem, k_smem, acc, weights, v_smem, softmax):
    scores = _array_scores(q_smem, k_smem)
    acc = _array_add_values(acc, weights, v_smem)
    return acc, softmax(scores)


def _kernel(q, k, v, positions, out, lse, *, config: Config, interpret, one_chunk: bool, scale: float, **shared):
    B, T, H, K = q.shape
    N = k.shape[2]
    G = H // N
    halves = K // _WIDTH
    tokens = _ROWS // G  # of a multiplier
    tile_tokens = MULTIPLIERS * tokens
    per_row = B * N  # tiles of the same tokens' places
    my_tiles, number = take_turns(T // tile_tokens * per_row)
    me = lax.axis_index("warpgroup")
    math = mosaic_softmax.interpreted if interpret else mosaic_softmax.on_registers
    products = (
        (_array_scores, _array_add_values, _array_scores_and_values) if interpret else (_scores, _add_values, _scores_and_values)
    )
    scores_of, add_values, scores_and_values = products
    q_smem, q_landing = (shared["q_smem"],) * 2 if interpret else shared["q_smem"]
    out_smem, out_leaving = (shared["out_smem"],) * 2 if interpret else shared["out_smem"]
    k_smem, v_smem, lse_smem = (shared[name] for name in ("k_smem", "v_smem", "lse_smem"))
    q_full, q_empty, k_full, k_empty, v_full, v_empty = (
        shared[name] for name in ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty")
    )

    def place(i):
        """(row of the batch, key/value head, first token, first block of keys, number of blocks) of this block's i-th tile."""
        row, rest = lax.div(number(i), jnp.int32(per_row)), lax.rem(number(i), jnp.int32(per_row))
        b, n = lax.div(rest, jnp.int32(N)), lax.rem(rest, jnp.int32(N))
        token = (T // tile_tokens - 1 - row) * tile_tokens
        own = lax.div(token, jnp.int32(KEY_BLOCK))
        aligned = own * KEY_BLOCK
        start = lax.div(jnp.maximum(aligned - positions[b, aligned], 0), jnp.int32(KEY_BLOCK))
        return b, n, token, start, own - start + 1

    def slot_of(step):
        return lax.rem(step, jnp.int32(config.stages))

    # --- the loader

    def load_tile(i, done):
        b, n, token, start, blocks = place(i)

        def load(j, _):
            step = done + j
            slot = slot_of(step)
            for source, target, full, empty in ((k, k_smem, k_full, k_empty), (v, v_smem, v_full, v_empty)):

                @pl.when(step >= config.stages)
                def _(empty=empty):
                    plgpu.barrier_wait(empty.at[slot])

                piece = source.at[b, pl.ds((start + j) * KEY_BLOCK, KEY_BLOCK), n]
                plgpu.copy_gmem_to_smem(piece, target.at[slot], full.at[slot])

        load(jnp.int32(0), None)  # the multipliers give the queries back last

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(q_empty)

        for part in range(MULTIPLIERS):
            for half in range(halves):
                piece = q.at[b, pl.ds(token + part * tokens, tokens), pl.ds(n * G, G), pl.ds(half * _WIDTH, _WIDTH)]
                plgpu.copy_gmem_to_smem(piece, q_landing.at[part, half], q_full)
        lax.fori_loop(1, blocks, load, None)
        return done + blocks

    # --- a multiplier

    def multiply_tile(i, done):
        b, n, token, start, blocks = place(i)
        place_in_block = lax.rem(token, jnp.int32(KEY_BLOCK)) + me * tokens
        mine = q_smem.at[me]
        plgpu.barrier_wait(q_full)

        def masked(scores, j):
            """Row r's token has seen column c of block j if c G <= r + G (the token's place behind the block's start)."""
            row, column = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
            behind = place_in_block + (blocks - 1 - j) * KEY_BLOCK
            return jnp.where(column * G <= row + behind * G, scores, -jnp.inf)

        def step(j, state, *, mask):
            weights, max_, sum_, acc = state
            slot, before = slot_of(done + j), slot_of(done + j - 1)

            def softmax(scores):
                plgpu.barrier_arrive(k_empty.at[slot])
                return math.step(masked(scores, j) if mask else scores, max_, sum_, scale=scale)

            plgpu.barrier_wait(k_full.at[slot])
            plgpu.barrier_wait(v_full.at[before])
            acc, (weights, max_, sum_, rescale) = scores_and_values(
                mine, k_smem.at[slot], acc, weights, v_smem.at[before], softmax
            )
            plgpu.barrier_arrive(v_empty.at[before])
            return math.narrow(weights), max_, sum_, math.scaled(acc, rescale)

        def attend_chunk(c):
            """(maximum, sum, weighted sum of values) of a chunk's keys."""
            begin = c * CHUNK_BLOCKS
            end = jnp.minimum(begin + CHUNK_BLOCKS, blocks)
            slot = slot_of(done + begin)
            plgpu.barrier_wait(k_full.at[slot])
            scores = scores_of(mine, k_smem.at[slot])
            plgpu.barrier_arrive(k_empty.at[slot])
            weights, max_, sum_, _ = math.step(
                masked(scores, begin), _full((_ROWS,), -jnp.inf, _ROW), _full((_ROWS,), 0.0, _ROW), scale=scale
            )
            state = math.narrow(weights), max_, sum_, _full((_ROWS, K), 0.0, plgpu.Layout.WGMMA)
            whole = jnp.maximum(jnp.minimum(end, blocks - 1), begin + 1)
            state = lax.fori_loop(begin + 1, whole, lambda j, state: step(j, state, mask=False), state)
            weights, max_, sum_, acc = lax.fori_loop(whole, end, lambda j, state: step(j, state, mask=True), state)

            @pl.when(end == blocks)
            def _():
                plgpu.barrier_arrive(q_empty)

            slot = slot_of(done + end - 1)
            plgpu.barrier_wait(v_full.at[slot])
            acc = add_values(acc, weights, v_smem.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])
            return max_, sum_, acc

        if one_chunk:
            total_max, total_sum, acc = attend_chunk(jnp.int32(0))
        else:
            total_smem = shared["total_smem"].at[me]
            pieces = [slice(c, c + _WIDTH) for c in range(0, K, _WIDTH)]

            def add_chunk(c, total):
                """The running softmax with chunk c. Its values wait in shared memory: registers hold one chunk's."""
                total_max, total_sum, total_acc = total

                @pl.when(c > 0)
                def _():
                    for p, piece in enumerate(pieces):
                        total_smem[p] = total_acc[:, piece]

                max_, sum_, acc = attend_chunk(c)

                def merge():
                    new_max, scale_total, scale_chunk = math.merge_scales(total_max, max_)
                    new_sum = math.blend(total_sum, scale_total, sum_, scale_chunk)
                    parts = (math.blend(total_smem[p], scale_total, acc[:, x], scale_chunk) for p, x in enumerate(pieces))
                    return new_max, new_sum, jnp.concatenate(list(parts), axis=1)

                return lax.cond(c > 0, merge, lambda: (max_, sum_, acc))  # a first chunk and nothing are the chunk

            chunks = lax.div(blocks + CHUNK_BLOCKS - 1, jnp.int32(CHUNK_BLOCKS))
            nothing = _full((_ROWS,), -jnp.inf, _ROW), _full((_ROWS,), 0.0, _ROW), _full((_ROWS, K), 0.0, plgpu.Layout.WGMMA)
            total_max, total_sum, acc = lax.fori_loop(0, chunks, add_chunk, nothing)

        inverse = math.inverse(total_sum)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left
        for half in range(halves):
            piece = acc[:, half * _WIDTH : (half + 1) * _WIDTH]
            mean = math.scaled(piece, inverse, plus_zero=True).astype(jnp.bfloat16)
            out_smem[me, half] = mean.reshape(tokens, G, _WIDTH) if interpret else mean
        lse_smem[me] = total_max + jnp.log2(total_sum)
        plgpu.commit_smem()
        token = token + me * tokens
        for half in range(halves):
            piece = out.at[b, pl.ds(token, tokens), pl.ds(n * G, G), pl.ds(half * _WIDTH, _WIDTH)]
            plgpu.copy_smem_to_gmem(out_leaving.at[me, half], piece)
        plgpu.copy_smem_to_gmem(lse_smem.at[me], lse.at[b, n, pl.ds(token * G, _ROWS)])
        return done + blocks

    def wait_for_slot(step):
        for empty in (k_empty, v_empty):
            plgpu.barrier_wait(empty.at[slot_of(step)])

    divide_work(
        me, _REGISTERS, my_tiles, load_tile, multiply_tile, stages=config.stages, wait_for_slot=wait_for_slot,
        wait_for_tile=lambda: plgpu.barrier_wait(q_empty),
    )  # fmt: skip


# A function of its own for JAX, because tracing and lowering take a second, and a model has as many calls as layers.
@functools.partial(jax.jit, static_argnames=("config", "processors", "interpret"))
def attention(q_BTHK, k_BTNK, v_BTNK, positions_BT, *, config: Config = _DEFAULT, processors: int | None = None, interpret=None):
    """Packed causal self-attention. Returns out [B, T, H, K] and the log-sum-exp float32 [B, H, T], in base 2.

    The first row of each aligned block of KEY_BLOCK rows says where the sequence of the whole block starts; starts are multiples
    of KEY_BLOCK. What a sequence has behind a token, up to the end of the token's block, must be finite.

    Args:
      q_BTHK, k_BTNK, v_BTNK, positions_BT: see `api.attention`.
      config: how the work is done.
      processors: thread blocks to start; None: as many as the device has processors.
      interpret: parameters of Pallas's interpreter, for a machine without a GPU.

    Raises:
      NotImplementedError: see `api.mosaic_lacks`.
    """
    B, length, H, K = q_BTHK.shape
    N = k_BTNK.shape[2]
    lacks = mosaic_lacks(q_BTHK.shape, N, q_BTHK.dtype)
    if lacks is not None:
        raise NotImplementedError(f"mosaic attention: {lacks}")
    # Tiles of shared memory are copied from whole groups of 8 rows, and a block of keys is copied whole.
    T = pl.cdiv(length, KEY_BLOCK) * KEY_BLOCK
    if T > length:
        q_BTHK, k_BTNK, v_BTNK = (jnp.pad(x, ((0, 0), (0, T - length), (0, 0), (0, 0))) for x in (q_BTHK, k_BTNK, v_BTNK))
        positions_BT = jnp.pad(positions_BT, ((0, 0), (0, T - length)))
    G = H // N
    one_chunk = T <= CHUNK_BLOCKS * KEY_BLOCK
    queries = (MULTIPLIERS, K // _WIDTH, _ROWS // G, G, _WIDTH)
    scratch = dict(
        q_smem=_queries(queries, interpret),
        k_smem=slots((config.stages, KEY_BLOCK, K)),
        v_smem=slots((config.stages, KEY_BLOCK, K)),
        out_smem=_queries(queries, interpret),
        lse_smem=plgpu.SMEM((MULTIPLIERS, _ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=MULTIPLIERS * (K // _WIDTH)),
        q_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS),
        **{f"{name}_full": plgpu.Barrier(num_barriers=config.stages) for name in "kv"},
        **{f"{name}_empty": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=config.stages) for name in "kv"},
    )
    if not one_chunk:
        sums = (MULTIPLIERS, K // _WIDTH, _ROWS, _WIDTH)
        scratch["total_smem"] = plgpu.SMEM(sums, jnp.float32, transforms=swizzled(jnp.float32))
    scale = K**-0.5 * numerics.LOG2_E

    def body(*refs, **shared):
        _kernel(*refs, config=config, interpret=interpret, one_chunk=one_chunk, scale=scale, **shared)

    out_type = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16), jax.ShapeDtypeStruct((B, N, T * G), jnp.float32)
    inputs = q_BTHK, k_BTNK, v_BTNK, positions_BT.astype(jnp.int32)
    out_BTHK, lse_BNR = kernel("attention", body, out_type, scratch, inputs, processors=processors, interpret=interpret)
    lse_BHT = jnp.swapaxes(lse_BNR.reshape(B, N, T, G), 2, 3).reshape(B, H, T)
    return out_BTHK[:, :length], lse_BHT[:, :, :length]


def attention_backward(
    q_BTHK,
    k_BTNK,
    v_BTNK,
    positions_BT,
    out_BTHK,
    lse_BHT,
    g_BTHK,
    *,
    config: mosaic_backward.Config | None = mosaic_backward.DEFAULT,
):
    """Gradients of q, k and v. Padding attends what it attends in the forward, as its log-sum-exp wants.

    Args:
      q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse_BHT, g_BTHK: see `triton_backward.attention_backward`.
      config: how the work is done; None: by the Triton kernels, to the same bits.
    """
    from pallas_kernels.attention import triton, triton_backward

    if config is None:
        return triton.attention_backward(q_BTHK, k_BTNK, v_BTNK, positions_BT, out_BTHK, lse_BHT, g_BTHK)
    inputs = q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, triton_backward.delta(out_BTHK, g_BTHK), g_BTHK
    return queries_gradient(*inputs, config=config), *mosaic_backward.keys_gradient(*inputs, config=config)
