"""Gradient of an embedding: the kernels in Triton's interpreter against the reference, and compiled for GPUs not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_KERNELS = ["chunks", "tokens"]


def _interpreted():
    from pallas_kernels import gpu
    from pallas_kernels.embedding import reference, triton
    from pallas_kernels.embedding.segments import CHUNK, make_segments

    rng = np.random.default_rng(0)
    V, D = 4, 12
    # Tokens 0 and 2 have a full chunk and a chunk of one row each; 1 and 3 do not occur.
    tokens = rng.permutation([0, 2] * (CHUNK + 1))
    for dtype in (jnp.bfloat16, jnp.float32):
        g = jnp.asarray(rng.standard_normal((len(tokens), D)), dtype)
        segments = make_segments(jnp.asarray(tokens, jnp.int32), V)
        expected = jax.jit(reference.embed_gradient)(g, segments)
        launch = triton.chunk_launch(len(segments.chunk_start), D)
        inputs = g, segments.order, segments.chunk_start, segments.chunk_size
        (sums,) = gpu.interpret(launch, *map(np.asarray, inputs))
        last = np.flatnonzero(np.asarray(segments.chunk_size)).max() + 1
        sizes = np.asarray(segments.chunk_size)[:last]
        assert sizes.tolist() == [CHUNK, 1] * 2 and np.isnan(sums[last:]).all()
        in_order = np.asarray(g.astype(jnp.float32))[np.asarray(segments.order)]
        chunks = np.split(in_order, np.cumsum(sizes)[:-1])
        unset = np.full_like(sums[last:], np.nan).view(np.uint32) | np.uint32(0xFFFFFFFF)
        sequential = np.concatenate([np.stack([np.add.accumulate(c)[-1] for c in chunks]), unset.view(np.float32)])
        name = jnp.dtype(dtype).name
        yield f"chunks-{name}", launch, inputs, [sequential]
        yield f"tokens-{name}", triton.token_launch(V, D), (sums, segments.token_start), [expected]


def _compiled():
    from pallas_kernels.embedding import triton

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    M, C, D, V = 64, 70, 2048, 1000
    yield "chunks", triton.chunk_launch(C, D), (array(M, D, dtype=jnp.bfloat16), array(M), array(C), array(C))
    yield "tokens", triton.token_launch(V, D), (array(C, D, dtype=jnp.float32), array(V + 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_bits_are_the_references(child, kernel, dtype):
    assert child("interpret")[f"{kernel}-{dtype}"] == [0]


@pytest.mark.parametrize("capability", ["90", "103"])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_compiled_without_atomics(child, kernel, capability):
    found = child("compile")[kernel][capability]
    assert found["atomics"] == 0
    assert found["wide_loads"] > 0  # 16 bytes a lane


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
