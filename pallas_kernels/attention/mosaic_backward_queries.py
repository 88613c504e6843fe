"""Gradient of queries of packed causal attention on Hopper in Pallas (Mosaic GPU): the dq kernel of `triton_backward.py` with the
TMA unit and warpgroups of two kinds, the same order of sums.

A thread block owns 64 query tokens of two heads that share a key/value head, one for each of its two multipliers. The loader asks
for their queries, gradients, log-sum-exps and deltas, and then for one block of 64 keys and values after another, from the
sequence's first to the tokens' own, the only one with a mask. A step of a multiplier is three products,

    scores = q k^T, dweights = g v^T, dq += dscores k.

The tensor cores work on the last one while the next step's first two are asked for; weights are computed beside dweights.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.attention import mosaic_softmax
from pallas_kernels.attention.mosaic_backward import DEFAULT, REGISTERS, Config, starts_of_blocks, whole_blocks
from pallas_kernels.attention.mosaic_tiles import BLOCK, MULTIPLIERS, divide_work, kernel, slots, take_turns

__all__ = ["queries_gradient"]

_COPIES = 4  # of a multiplier's tile: queries, gradients, log-sum-exps, deltas
_ROW = plgpu.Layout.WGMMA.reduce(1)


# --- on registers and tensor cores


def _add_step(dq_ref, tiles, numbers, release, mask, state, *, scale: float):
    """Adds a step's products to the sum; `release` is called where the step before has been summed up."""
    q_smem, g_smem, k_smem, v_smem = tiles
    lse, delta = numbers
    math = mosaic_softmax.on_registers

    def products(scores_ref, dweights_ref):
        plgpu.wgmma(scores_ref, q_smem, k_smem.transpose((1, 0)))
        plgpu.wgmma(dweights_ref, g_smem, v_smem.transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        if mask:
            scores = math.seen(scores, jnp.int32(0), axis=0)
        weights, _ = math.probabilities(scores, lse, axis=0, scale=scale)
        release()  # a branch, over which the assembler does not move the weights to behind the next wait
        dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
        plgpu.wgmma(dq_ref, math.score_gradients(weights, dweights, delta, axis=0), k_smem)

    pl.run_scoped(products, *[plgpu.ACC((BLOCK, BLOCK), jnp.float32)] * 2)
    return state


def _sum(walk, numbers, width: int):
    """dq [64, K] float32, as `walk(add_step)` adds it up; `numbers`: references to log-sum-exps and deltas."""
    loaded = tuple(plgpu.load(x, layout=_ROW, optimized=False) for x in numbers)

    def run(dq_ref):
        walk(lambda tiles, *rest, **scale: _add_step(dq_ref, tiles, loaded, *rest, **scale), ())
        return dq_ref[...]

    return pl.run_scoped(run, plgpu.ACC((BLOCK, width), jnp.float32))


# --- on arrays, since the interpreter has no operands in registers and no accumulators


def _array_add_step(tiles, numbers, release, mask, dq, *, scale: float):
    release()
    q, g, k, v = (x[...].astype(jnp.float32) for x in tiles)
    plgpu.commit_smem()  # tensor cores read as the TMA unit writes; registers do not
    lse, delta = numbers
    math = mosaic_softmax.interpreted
    scores = jnp.dot(q, k.T)
    if mask:
        scores = math.seen(scores, jnp.int32(0), axis=0)
    weights, _ = math.probabilities(scores, lse, axis=0, scale=scale)
    return dq + jnp.dot(math.score_gradients(weights, jnp.dot(g, v.T), delta, axis=0).astype(jnp.float32), k)


def _array_sum(walk, numbers, width: int):
    loaded = tuple(x[...] for x in numbers)
    return walk(
        lambda tiles, *rest, **scale: _array_add_step(tiles, loaded, *rest, **scale), jnp.zeros((BLOCK, width), jnp.float32)
    )


def _kernel(q, k, v, lse, delta, g, starts, dq, *, config: Config, interpret, **shared):
    B, T, H, K = q.shape
    G = H // k.shape[2]
    blocks = T // BLOCK
    per_row = B * (H // MULTIPLIERS)  # tiles of the same tokens' places
    my_tiles, number = take_turns(blocks * per_row)
    me = lax.axis_index("warpgroup")
    q_smem, g_smem, lse_smem, delta_smem, k_smem, v_smem, out_smem = (
        shared[f"{name}_smem"] for name in ("q", "g", "lse", "delta", "k", "v", "out")
    )
    queries_full, queries_empty, full, empty = (shared[name] for name in ("queries_full", "queries_empty", "full", "empty"))

    def place(i):
        """(row of the batch, first head, the tokens' block, the sequence's first one) of this block's i-th tile."""
        row, rest = lax.div(number(i), jnp.int32(per_row)), lax.rem(number(i), jnp.int32(per_row))
        b, pair = lax.div(rest, jnp.int32(H // MULTIPLIERS)), lax.rem(rest, jnp.int32(H // MULTIPLIERS))
        own = blocks - 1 - row
        return b, pair * MULTIPLIERS, own, starts[b, own]

    def slot_of(step):
        return lax.rem(step, jnp.int32(config.key_stages))

    # --- the loader

    def load_tile(i, done):
        b, head, own, start = place(i)
        steps = own - start + 1

        def load(s, _):
            step = done + s
            slot = slot_of(step)

            @pl.when(step >= config.key_stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            tokens = pl.ds((start + s) * BLOCK, BLOCK)
            for source, target in ((k, k_smem), (v, v_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, tokens, lax.div(head, jnp.int32(G))], target.at[slot], full.at[slot])

        # The multipliers give the queries back last: until then, the first keys.
        ahead = jnp.minimum(steps, config.key_stages)
        lax.fori_loop(0, ahead, load, None)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(queries_empty)

        tokens = pl.ds(own * BLOCK, BLOCK)
        for part in range(MULTIPLIERS):
            for source, target in ((q, q_smem), (g, g_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, tokens, head + part], target.at[part], queries_full)
            for source, target in ((lse, lse_smem), (delta, delta_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, head + part, tokens], target.at[part], queries_full)
        lax.fori_loop(ahead, steps, load, None)
        return done + steps

    # --- a multiplier

    def multiply_tile(i, done):
        b, head, own, start = place(i)
        steps = own - start + 1
        plgpu.barrier_wait(queries_full)

        def walk(add_step, state):
            def step(s, state, *, mask):
                slot = slot_of(done + s)
                plgpu.barrier_wait(full.at[slot])

                def release():
                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(done + s - 1)])

                tiles = q_smem.at[me], g_smem.at[me], k_smem.at[slot], v_smem.at[slot]
                return add_step(tiles, release, mask, state, scale=K**-0.5 * numerics.LOG2_E)

            state = lax.fori_loop(0, steps - 1, functools.partial(step, mask=False), state)
            return step(steps - 1, state, mask=True)

        total = (_array_sum if interpret else _sum)(walk, (lse_smem.at[me], delta_smem.at[me]), K)
        plgpu.barrier_arrive(empty.at[slot_of(done + steps - 1)])
        plgpu.barrier_arrive(queries_empty)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left
        out_smem[me] = (total * K**-0.5).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[me], dq.at[b, pl.ds(own * BLOCK, BLOCK), head + me])
        return done + steps

    divide_work(
        me, REGISTERS, my_tiles, load_tile, multiply_tile, stages=config.key_stages,
        wait_for_slot=lambda step: plgpu.barrier_wait(empty.at[slot_of(step)]),
        wait_for_tile=lambda: plgpu.barrier_wait(queries_empty),
    )  # fmt: skip


# A function of its own for JAX, because tracing and lowering take a second, and a model has as many calls as layers.
@functools.partial(jax.jit, static_argnames=("config", "processors", "interpret"))
def queries_gradient(
    q_BTHK, k_BTNK, v_BTNK, positions_BT, lse_BHT, delta_BHT, g_BTHK, *, config: Config = DEFAULT, processors=None, interpret=None
):
    """Gradient of q, [B, T, H, K] bfloat16. Arguments as for `mosaic_backward.keys_gradient`."""
    B, length, H, K = q_BTHK.shape
    starts_BI = starts_of_blocks(positions_BT)
    numbers = plgpu.SMEM((MULTIPLIERS, BLOCK), jnp.float32)
    scratch = dict(
        q_smem=slots((MULTIPLIERS, BLOCK, K)),
        g_smem=slots((MULTIPLIERS, BLOCK, K)),
        lse_smem=numbers,
        delta_smem=numbers,
        k_smem=slots((config.key_stages, BLOCK, K)),
        v_smem=slots((config.key_stages, BLOCK, K)),
        out_smem=slots((MULTIPLIERS, BLOCK, K)),
        queries_full=plgpu.Barrier(num_arrivals=MULTIPLIERS * _COPIES),
        queries_empty=plgpu.Barrier(num_arrivals=MULTIPLIERS),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=config.key_stages),
        empty=plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=config.key_stages),
    )

    def body(*refs, **shared):
        _kernel(*refs, config=config, interpret=interpret, **shared)

    gradient = jax.ShapeDtypeStruct((B, starts_BI.shape[1] * BLOCK, H, K), jnp.bfloat16)
    inputs = *whole_blocks(q_BTHK, k_BTNK, v_BTNK, lse_BHT, delta_BHT, g_BTHK), starts_BI
    options = dict(processors=processors, interpret=interpret)
    return kernel("attention_queries_gradient", body, gradient, scratch, inputs, **options)[:, :length]
