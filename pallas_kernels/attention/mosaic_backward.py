"""Gradients of keys and values of packed causal attention on Hopper in Pallas (Mosaic GPU): the dk/dv kernel of
`triton_backward.py` with the TMA unit and warpgroups of two kinds, the same order of sums.

A thread block owns 128 keys of one key/value head, two blocks of 64, one for each of its two multipliers. A third warpgroup, the
loader, asks the TMA unit for them and then for one tile of 64 queries of one head after another, with the gradients, log-sum-exps
and deltas of the same rows, into a ring of slots ("full", given back "empty"): the tiles in the order of the tokens, in each the
heads that share the key/value head. A step of a multiplier is four products,

    scores = k q^T, dweights = v g^T, dv += weights g, dk += dscores q,

of keys by queries, so that weights and dscores are operands as they lie in registers. The tensor cores work on the last two while
the next step's first two are asked for; weights are computed beside dweights, and dscores beside dv.

Blocks of keys that are neighbours may belong to two sequences. The loader brings the tiles that any of them meets, and a
multiplier gives back those that its own does not.

As many thread blocks as there are processors go through the tiles, those first that see most queries in a row of one sequence.

Let G = H / N be the query heads per key/value head.
"""

import dataclasses
import functools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.attention import mosaic_softmax
from pallas_kernels.attention.mosaic_tiles import BLOCK, MULTIPLIERS, divide_work, kernel, slots, take_turns
from pallas_kernels.attention.walks import walks

__all__ = ["Config", "DEFAULT", "keys_gradient"]

REGISTERS = (24, 240)  # of a loader's and of a multiplier's thread
_COPIES = 4  # of a step: queries, gradients, log-sum-exps, deltas
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is done. Changes speed, never bits.

    Attributes:
      stages: slots of the ring of queries and their gradients (dk and dv).
      key_stages: slots of the ring of keys and values (dq).
    """

    stages: int = 3
    key_stages: int = 4


DEFAULT = Config()


def starts_of_blocks(positions_BT):
    """[B, blocks] int32: the block where the sequence of a block begins, as its first row says."""
    first_BI = positions_BT[:, ::BLOCK].astype(jnp.int32)
    own_1I = jnp.arange(first_BI.shape[1], dtype=jnp.int32)[None]
    return jnp.maximum(own_1I * BLOCK - first_BI, 0) // BLOCK


def whole_blocks(q_BTHK, k_BTNK, v_BTNK, lse_BHT, delta_BHT, g_BTHK):
    """The arrays with rows up to a multiple of 64, since a tile is copied whole. Those weigh nothing: exp2(0 - inf)."""
    behind = -q_BTHK.shape[1] % BLOCK
    if not behind:
        return q_BTHK, k_BTNK, v_BTNK, lse_BHT, delta_BHT, g_BTHK
    q, k, v, g = (jnp.pad(x, ((0, 0), (0, behind), (0, 0), (0, 0))) for x in (q_BTHK, k_BTNK, v_BTNK, g_BTHK))
    lse, delta = (
        jnp.pad(x, ((0, 0), (0, 0), (0, behind)), constant_values=fill) for x, fill in ((lse_BHT, jnp.inf), (delta_BHT, 0))
    )
    return q, k, v, lse, delta, g


# --- on registers and tensor cores


def _add_step(sums, tiles, release, distance, state, *, scale: float):
    """Adds a step's products to the sums; `release` is called where the step before has been summed up."""
    dk_ref, dv_ref = sums
    k_smem, v_smem, q_smem, g_smem, lse_smem, delta_smem = tiles

    def products(scores_ref, dweights_ref):
        plgpu.wgmma(scores_ref, k_smem, q_smem.transpose((1, 0)))
        plgpu.wgmma(dweights_ref, v_smem, g_smem.transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        lse = plgpu.load(lse_smem, layout=_COLUMN)  # not before the wait: registers are few
        release()
        if distance is not None:
            scores = mosaic_softmax.on_registers.seen(scores, distance, axis=1)
        weights, narrow = mosaic_softmax.on_registers.probabilities(scores, lse, axis=1, scale=scale)
        plgpu.wgmma(dv_ref, narrow, g_smem)
        dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1)
        delta = plgpu.load(delta_smem, layout=_COLUMN)
        plgpu.wgmma(dk_ref, mosaic_softmax.on_registers.score_gradients(weights, dweights, delta, axis=1), q_smem)
        plgpu.wgmma_wait(1)  # the next step needs the registers of `narrow`

    pl.run_scoped(products, *[plgpu.ACC((BLOCK, BLOCK), jnp.float32)] * 2)
    return state


def _sums(walk, width: int):
    """dk and dv [64, K] float32, as `walk(add_step)` adds them up."""

    def run(dk_ref, dv_ref):
        walk(functools.partial(_add_step, (dk_ref, dv_ref)), ())
        return dk_ref[...], dv_ref[...]

    return pl.run_scoped(run, *[plgpu.ACC((BLOCK, width), jnp.float32)] * 2)


# --- on arrays, since the interpreter has no operands in registers and no accumulators


def _array_add_step(tiles, release, distance, state, *, scale: float):
    release()
    k, v, q, g = (x[...].astype(jnp.float32) for x in tiles[:4])
    lse, delta = (x[...] for x in tiles[4:])
    plgpu.commit_smem()  # tensor cores read as the TMA unit writes; registers do not
    scores = jnp.dot(k, q.T)
    if distance is not None:
        scores = mosaic_softmax.interpreted.seen(scores, distance, axis=1)
    weights, narrow = mosaic_softmax.interpreted.probabilities(scores, lse, axis=1, scale=scale)
    dscores = mosaic_softmax.interpreted.score_gradients(weights, jnp.dot(v, g.T), delta, axis=1)
    dk, dv = state
    return dk + jnp.dot(dscores.astype(jnp.float32), q), dv + jnp.dot(narrow.astype(jnp.float32), g)


def _array_sums(walk, width: int):
    return walk(_array_add_step, (jnp.zeros((BLOCK, width), jnp.float32),) * 2)


_REGISTERS_HAVE = types.SimpleNamespace(sums=_sums)
_ARRAYS_HAVE = types.SimpleNamespace(sums=_array_sums)


def _kernel(q, k, v, lse, delta, g, starts, middles, ends, dk, dv, *, config: Config, interpret, **shared):
    B, T, H, K = q.shape
    N = k.shape[2]
    G = H // N
    blocks = T // BLOCK
    per_row = B * N  # tiles of the same tokens' places
    num_tiles = pl.cdiv(blocks, MULTIPLIERS) * per_row
    me = lax.axis_index("warpgroup")
    my_tiles, number = take_turns(num_tiles)
    sums = (_ARRAYS_HAVE if interpret else _REGISTERS_HAVE).sums
    k_smem, v_smem, q_smem, g_smem, lse_smem, delta_smem, out_smem = (
        shared[f"{name}_smem"] for name in ("k", "v", "q", "g", "lse", "delta", "out")
    )
    keys_full, keys_empty, full, empty = (shared[name] for name in ("keys_full", "keys_empty", "full", "empty"))

    def place(i):
        """(row of the batch, key/value head, first block of keys, last one, number of steps) of this block's i-th tile."""
        row, rest = lax.div(number(i), jnp.int32(per_row)), lax.rem(number(i), jnp.int32(per_row))
        b, n = lax.div(rest, jnp.int32(N)), lax.rem(rest, jnp.int32(N))
        begin = row * MULTIPLIERS
        last = jnp.minimum(begin + MULTIPLIERS - 1, blocks - 1)
        end = ends[b, begin]
        for part in range(1, MULTIPLIERS):
            end = jnp.maximum(end, ends[b, jnp.minimum(begin + part, last)])
        return b, n, begin, last, (end - begin) * G

    def slot_of(step):
        return lax.rem(step, jnp.int32(config.stages))

    # --- the loader

    def load_tile(i, done):
        b, n, begin, last, steps = place(i)

        def load(s, _):
            step = done + s
            slot = slot_of(step)

            @pl.when(step >= config.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            tokens = pl.ds((begin + lax.div(s, jnp.int32(G))) * BLOCK, BLOCK)
            head = n * G + lax.rem(s, jnp.int32(G))
            for source, target in ((q, q_smem), (g, g_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, tokens, head], target.at[slot], full.at[slot])
            for source, target in ((lse, lse_smem), (delta, delta_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, head, tokens], target.at[slot], full.at[slot])

        # The multipliers give the keys back last: until then, the first queries.
        ahead = jnp.minimum(steps, config.stages)
        lax.fori_loop(0, ahead, load, None)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(keys_empty)

        for part in range(MULTIPLIERS):
            tokens = pl.ds(jnp.minimum(begin + part, last) * BLOCK, BLOCK)
            for source, target in ((k, k_smem), (v, v_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, tokens, n], target.at[part], keys_full)
        lax.fori_loop(ahead, steps, load, None)
        return done + steps

    # --- a multiplier

    def multiply_tile(i, done):
        b, n, begin, last, steps = place(i)
        own = jnp.minimum(begin + me, last)
        exists = begin + me <= last
        # Steps without a mask, and all, count from the tile's first; a block that does not exist has none.
        my_begin = jnp.where(exists, (own - begin) * G, steps)
        my_middle = jnp.where(exists, (middles[b, own] - begin) * G, steps)
        my_end = jnp.where(exists, (ends[b, own] - begin) * G, steps)
        plgpu.barrier_wait(keys_full)

        def skip(s, _):
            slot = slot_of(done + s)
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(empty.at[slot])

        def walk(add_step, state):
            def step(s, state, *, mask):
                slot = slot_of(done + s)
                plgpu.barrier_wait(full.at[slot])

                def release():
                    @pl.when(s > my_begin)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(done + s - 1)])

                distance = None
                if mask:
                    block = begin + lax.div(s, jnp.int32(G))
                    # A block that begins behind these keys (padding may come between) sees none of them.
                    distance = jnp.where(starts[b, block] <= own, (block - own) * BLOCK, -BLOCK)
                tiles = (k_smem.at[me], v_smem.at[me], *(x.at[slot] for x in (q_smem, g_smem, lse_smem, delta_smem)))
                return add_step(tiles, release, distance, state, scale=K**-0.5 * numerics.LOG2_E)

            state = lax.fori_loop(my_begin, my_middle, functools.partial(step, mask=True), state)
            return lax.fori_loop(my_middle, my_end, functools.partial(step, mask=False), state)

        lax.fori_loop(0, my_begin, skip, None)
        dk_sum, dv_sum = sums(walk, K)

        @pl.when(exists)
        def _():
            plgpu.barrier_arrive(empty.at[slot_of(done + my_end - 1)])

        plgpu.barrier_arrive(keys_empty)
        lax.fori_loop(my_end, steps, skip, None)

        def store(total, out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was there has left
            out_smem[me] = total.astype(jnp.bfloat16)
            plgpu.commit_smem()

            @pl.when(exists)
            def _():
                plgpu.copy_smem_to_gmem(out_smem.at[me], out.at[b, pl.ds(own * BLOCK, BLOCK), n])

        store(dv_sum, dv)
        store(dk_sum * K**-0.5, dk)
        return done + steps

    divide_work(
        me, REGISTERS, my_tiles, load_tile, multiply_tile, stages=config.stages,
        wait_for_slot=lambda step: plgpu.barrier_wait(empty.at[slot_of(step)]),
        wait_for_tile=lambda: plgpu.barrier_wait(keys_empty),
    )  # fmt: skip


# A function of its own for JAX, because tracing and lowering take a second, and a model has as many calls as layers.
@functools.partial(jax.jit, static_argnames=("config", "processors", "interpret"))
def keys_gradient(
    q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK, *, config: Config = DEFAULT, processors=None, interpret=None
):
    """Gradients of k and v, [B, T, N, K] bfloat16.

    As in the forward, the first row of each aligned block of 64 rows says where the sequence of the whole block starts; starts
    are multiples of 64.

    Args:
      q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, g_BTHK: see `triton_backward.attention_backward`; shapes as
        `api.mosaic_lacks` has them.
      delta_BHT: [B, H, T] float32, the sum of ``out * g`` over the head dimension.
      config: how the work is done.
      processors: thread blocks to start; None: as many as the device has processors.
      interpret: parameters of Pallas's interpreter, for a machine without a GPU.
    """
    B, length, N, K = k_BTNK.shape
    starts_BI = starts_of_blocks(positions_BT)
    blocks = starts_BI.shape[1]
    middles_BI, ends_BI = walks(jnp.arange(blocks, dtype=jnp.int32)[None] - starts_BI, block=1, tile=1)
    numbers = plgpu.SMEM((config.stages, BLOCK), jnp.float32)
    scratch = dict(
        k_smem=slots((MULTIPLIERS, BLOCK, K)),
        v_smem=slots((MULTIPLIERS, BLOCK, K)),
        q_smem=slots((config.stages, BLOCK, K)),
        g_smem=slots((config.stages, BLOCK, K)),
        lse_smem=numbers,
        delta_smem=numbers,
        out_smem=slots((MULTIPLIERS, BLOCK, K)),
        keys_full=plgpu.Barrier(num_arrivals=2 * MULTIPLIERS),
        keys_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS),
        full=plgpu.Barrier(num_arrivals=_COPIES, num_barriers=config.stages),
        empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=config.stages),
    )

    def body(*refs, **shared):
        _kernel(*refs, config=config, interpret=interpret, **shared)

    gradient = jax.ShapeDtypeStruct((B, blocks * BLOCK, N, K), jnp.bfloat16)
    inputs = *whole_blocks(q_BTHK, k_BTNK, v_BTNK, lse_BHT, delta_BHT, g_BTHK), starts_BI, middles_BI, ends_BI
    options = dict(processors=processors, interpret=interpret)
    dk_BTNK, dv_BTNK = kernel("attention_keys_gradient", body, (gradient, gradient), scratch, inputs, **options)
    return dk_BTNK[:, :length], dv_BTNK[:, :length]
