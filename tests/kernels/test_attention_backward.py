"""Attention's gradients: the kernels in Triton's interpreter against float64, packed sequences against the same ones alone, and
compiled for GPUs that are not here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# dk has the operations of dq and more; a compiler for another GPU takes seconds.
_COMPILED = {"delta": (90,), "dq": (90,), "dk": (90, 100)}
_DTYPES = ["bfloat16", "float32"]


def _exact(q, k, v, g):
    """Float64 out, base-2 log-sum-exp and gradients of one causal sequence, q [T, H, K], k and v [T, 1, K]."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5
    score = np.einsum("thk,sk->hts", q, k[:, 0]) * scale
    score = np.where(np.tri(len(q), dtype=bool), score, -np.inf)
    lse = np.log(np.exp(score).sum(-1))
    weight = np.exp(score - lse[..., None])
    dweight = np.einsum("thk,sk->hts", g, v[:, 0])
    dscore = weight * (dweight - (weight * dweight).sum(-1, keepdims=True)) * scale
    gradients = (
        np.einsum("hts,sk->thk", dscore, k[:, 0]),
        np.einsum("hts,thk->sk", dscore, q)[:, None],
        np.einsum("hts,thk->sk", weight, g)[:, None],
    )
    return np.einsum("hts,sk->thk", weight, v[:, 0]), lse / np.log(2), gradients


def _launches(q, k, v, positions, lse, out, g, keys=16):
    """The launches for dq and for dk and dv (with so many keys to a program), each with its inputs."""
    from pallas_kernels import gpu
    from pallas_kernels.attention import triton_backward as backward

    length, num_kv_heads = q.shape[1], k.shape[2]
    (delta,) = gpu.interpret(backward.delta_launch(q.shape), out, g, length)
    inputs = (q, k, v, positions, lse, delta, g)
    walks = jax.jit(backward.walks, static_argnames=("block", "tile"))
    bounds = map(np.asarray, walks(jnp.asarray(positions), block=keys, tile=16))
    pipeline = dict(num_warps=1, num_stages=1)
    for_dq = backward.dq_launch(q.shape, num_kv_heads, q.dtype, dict(BLOCK_M=64, BLOCK_N=16, **pipeline))
    for_dk = backward.dk_launch(q.shape, num_kv_heads, q.dtype, dict(BLOCK_N=keys, **pipeline), tile=16)
    return (for_dq, (*inputs, length)), (for_dk, (*inputs, *bounds, length))


def _interpreted():
    from pallas_kernels import gpu

    lengths, heads, width = (48, 10), 3, 16  # three heads share the keys; the last tile is not full
    for dtype in _DTYPES:
        rng = np.random.default_rng(0)
        sequences, alone = [], []
        for length in lengths:
            q, g = (rng.standard_normal((length, heads, width)).astype(dtype) for _ in range(2))
            k, v = (rng.standard_normal((length, 1, width)).astype(dtype) for _ in range(2))
            g[-4:] = 0  # as padding has
            out, lse, expected = _exact(q, k, v, g)
            positions = np.arange(length, dtype=np.int32)
            arrays = (q, k, v, positions, lse.astype(np.float32), out.astype(dtype), g)
            found = [x for launch, inputs in _launches(*(x[None] for x in arrays)) for x in gpu.interpret(launch, *inputs)]
            # Weights, their gradients and the results are rounded to 2^-9; float32: sums of up to 144 products.
            tolerance = 2.0**-7 if dtype == "bfloat16" else 2.0**-20
            for actual, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(actual[0].astype(np.float64), wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
            assert not found[0][0, -4:].astype(np.float32).any()
            sequences.append(arrays)
            alone.append([x[0] for x in found])
        axes = (0, 0, 0, 0, 1, 0, 0)
        packed = [np.concatenate(parts, axis)[None] for parts, axis in zip(zip(*sequences, strict=True), axes, strict=True)]
        dq, dk, dv = (np.concatenate(parts)[None] for parts in zip(*alone, strict=True))
        # The second sequence starts within a program's 32 keys. numpy's products have other bits in other rows of a matrix.
        _, (launch, inputs) = _launches(*packed, keys=32)
        for actual, wanted in zip(gpu.interpret(launch, *inputs), (dk, dv), strict=True):
            np.testing.assert_allclose(actual.astype(np.float64), wanted.astype(np.float64), rtol=2.0**-7, atol=1e-5)
        for_dq, for_dk = _launches(*packed)
        yield f"dq-{dtype}", *for_dq, [dq]
        yield f"dk-{dtype}", *for_dk, [dk, dv]


def _compiled():
    from pallas_kernels.attention import triton_backward as backward

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    B, T, H, N, K = 2, 256, 16, 4, 64
    shape = (B, T, H, K)
    q, k, positions, row = array(*shape), array(B, T, N, K), array(B, T, dtype=jnp.int32), array(B, H, T, dtype=jnp.float32)
    bounds = array(B, T // 64, dtype=jnp.int32)
    inputs = (q, k, k, positions, row, row, q)
    yield "delta", backward.delta_launch(shape), (q, q, T), _COMPILED["delta"]
    yield "dq", backward.dq_launch(shape, N, jnp.bfloat16), (*inputs, T), _COMPILED["dq"]
    yield "dk", backward.dk_launch(shape, N, jnp.bfloat16), (*inputs, bounds, bounds, T), _COMPILED["dk"]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kernel", ["dq", "dk"])
def test_gradients_are_right_and_packed_sequences_have_the_bits_they_have_alone(child, kernel, dtype):
    results = child("interpret")[f"{kernel}-{dtype}"]
    assert results == [0] * len(results)


@pytest.mark.parametrize("kernel, capability", [(name, each) for name, several in _COMPILED.items() for each in several])
def test_compiled_without_atomics(child, kernel, capability):
    found = child("compile")[kernel][str(capability)]
    assert found["atomics"] == 0
    assert (found["mma"] > 0) == (kernel != "delta")


def test_which_tiles_a_block_of_keys_meets():
    pytest.importorskip("triton")
    from pallas_kernels.attention.triton_backward import walks

    plain = np.arange(40, dtype=np.int32)
    packed = np.r_[np.arange(16), np.arange(16), np.arange(8)].astype(np.int32)
    astray = np.r_[np.arange(24), [20] * 16].astype(np.int32)  # padding that begins within other blocks
    middles, ends = jax.jit(lambda positions: walks(positions, block=8, tile=8))(np.stack([plain, packed, astray]))
    np.testing.assert_array_equal(ends, [[5] * 5, [2, 2, 4, 4, 5], [4, 5, 5, 5, 5]])
    # The block's own tile has a mask; so has everything up to a row that sees a part of the block.
    np.testing.assert_array_equal(middles, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [4, 5, 5, 4, 5]])


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
