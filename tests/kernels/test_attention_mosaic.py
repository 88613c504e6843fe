"""The Pallas attention for Hopper: indexing, barriers and chunks in Pallas's GPU interpreter, the order of sums in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas's GPU interpreter is too young before jax 0.11", allow_module_level=True)

from pallas_kernels.attention import mosaic, mosaic_softmax, reference  # noqa: E402

# Two thread blocks share the tiles; slots are few, so that they come back often.
HOST = dict(processors=2, config=mosaic.Config(stages=2), interpret=plgpu.InterpretGPUParams(detect_races=True))


def _inputs(length, heads, kv_heads, head_dim, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    keys = (batch, length, kv_heads, head_dim), 1.0
    shapes = ((batch, length, heads, head_dim), 2.0), keys, keys
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.bfloat16) for shape, scale in shapes)


def _log_sum_exp(q, k, positions):
    """[B, H, T] in base 2, float64."""
    q, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bthk,bshk->bhts", q, k) * q.shape[3] ** -0.5 * np.log2(np.e)
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])[None, :]
    seen = (behind >= 0)[None] & (behind[None] <= np.asarray(positions)[:, :, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    return top[..., 0] + np.log2(np.exp2(scores - top).sum(axis=-1))


def _check(q, k, v, positions):
    run = jax.jit(lambda *args: mosaic.attention(*args, **HOST))
    out, lse = run(q, k, v, positions)
    want = np.asarray(reference.attention(q, k, v, positions)[0].astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), want, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(np.asarray(lse), _log_sum_exp(q, k, positions), rtol=1e-5, atol=1e-4)
    return out


def test_packed_sequences():
    """Of 70, 1 and 20 tokens, padding behind the first two; several tiles a thread block, T no multiple of 64."""
    positions = np.r_[np.arange(128), np.arange(64), np.arange(20)]
    q, k, v = _inputs(len(positions), 16, 2, 64)
    _check(q, k, v, jnp.asarray(positions[None], jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "heads"), [(1, 2), (65, 64)])
def test_one_token_and_the_most_heads_of_a_key_value_head(length, heads):
    _check(*_inputs(length, heads, 1, 64), jnp.arange(length, dtype=jnp.int32)[None])


def test_chunks_and_rows_of_a_batch(monkeypatch):
    """Three chunks of at most two blocks, where a real chunk has 32; the last of one block, and then of two."""
    monkeypatch.setattr(mosaic, "CHUNK_BLOCKS", 2)
    q, k, v = _inputs(330, 4, 1, 128, batch=2)
    positions = jnp.broadcast_to(jnp.arange(330, dtype=jnp.int32), (2, 330))
    _check(q, k, v, positions)


def test_row_sum_is_in_the_order_of_the_threads():
    """As the registers of a tensor core's result lie: each thread's in order, then threads two apart, then neighbours."""
    weights = np.random.default_rng(0).random((8, 64), np.float32)
    want = np.empty(8, np.float32)
    for r in range(8):
        threads = []
        for t in range(4):
            total = weights[r, 2 * t]
            for column in [8 * i + 2 * t + e for i in range(8) for e in (0, 1)][1:]:
                total = np.float32(total + weights[r, column])
            threads.append(total)
        want[r] = np.float32(np.float32(threads[0] + threads[2]) + np.float32(threads[1] + threads[3]))
    np.testing.assert_array_equal(np.asarray(mosaic_softmax.row_sum(jnp.asarray(weights))), want)


def test_blocks_are_the_triton_kernels():
    triton = pytest.importorskip("pallas_kernels.attention.triton", reason="triton is not installed")
    assert (mosaic.KEY_BLOCK, mosaic.CHUNK_BLOCKS) == (triton.KEY_BLOCK, triton.CHUNK_BLOCKS)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, dtype", [(4, 4, 128, "bfloat16"), (8, 2, 32, "bfloat16"), (8, 2, 64, "float32")]
)
def test_what_is_not_built_is_refused(heads, kv_heads, head_dim, dtype):
    q, k, v = (x.astype(dtype) for x in _inputs(64, heads, kv_heads, head_dim))
    with pytest.raises(NotImplementedError, match=r"mosaic attention: no kernel for q \(1, 64"):
        mosaic.attention(q, k, v, jnp.zeros((1, 64), jnp.int32))
