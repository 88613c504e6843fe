"""Combine and un-dispatch: the kernels in Triton's interpreter against the reference, and compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CASES = [f"{op}-{dtype}" for op in ("combine", "combine_backward", "undispatch") for dtype in ("bfloat16", "float32")]
WIDTHS = (1, 4101, 8300)  # of one, two and four warps a token in the backward, none full


def _interpreted():
    from pallas_kernels.combine import reference as combine_reference
    from pallas_kernels.combine import triton as combine
    from pallas_kernels.undispatch import reference as undispatch_reference
    from pallas_kernels.undispatch import triton as undispatch

    rng = np.random.default_rng(0)
    M, k, D = 5, 3, 40
    slot = jnp.asarray(rng.permutation(M * k).reshape(M, k), jnp.int32)
    weights = jnp.asarray(rng.dirichlet(np.ones(k), M), jnp.float32)
    for dtype in ("bfloat16", "float32"):
        rows, g = (jnp.asarray(rng.standard_normal((n, D)), dtype) for n in (M * k, M))
        rows = rows.at[3, 5].set(jnp.inf)  # infinities are clipped in one place, and there alone
        inputs = rows, weights, slot
        shape = M, k, D, rows.dtype
        yield f"combine-{dtype}", combine.combine_launch(*shape), inputs, [jax.jit(combine_reference.combine)(*inputs)]
        expected = jax.jit(combine_reference.combine_backward)(*inputs, g)
        yield f"combine_backward-{dtype}", combine.combine_backward_launch(*shape), (*inputs, g), expected
        expected = undispatch_reference.undispatch(rows, slot, out_dtype=jnp.bfloat16)
        for width in WIDTHS:
            wide, wide_g = (jnp.asarray(rng.standard_normal((n, width)), dtype) for n in (4, 2))
            inputs = wide, weights[:2, :2], jnp.asarray([[3, 0], [1, 2]], jnp.int32), wide_g
            launch = combine.combine_backward_launch(2, 2, width, wide.dtype)
            yield f"{width} columns-{dtype}", launch, inputs, jax.jit(combine_reference.combine_backward)(*inputs)
        yield f"undispatch-{dtype}", undispatch.undispatch_launch(M, k, D, jnp.bfloat16), (rows, slot), [expected]


def _compiled():
    from pallas_kernels.combine import triton as combine
    from pallas_kernels.undispatch import triton as undispatch

    M, k, D = 16, 8, 2048
    array = jax.ShapeDtypeStruct
    rows, g = array((M * k, D), jnp.bfloat16), array((M, D), jnp.bfloat16)
    weights, slot = array((M, k), jnp.float32), array((M, k), jnp.int32)
    yield "combine", combine.combine_launch(M, k, D, jnp.bfloat16), (rows, weights, slot)
    yield "combine_backward", combine.combine_backward_launch(M, k, D, jnp.bfloat16), (rows, weights, slot, g)
    yield "undispatch", undispatch.undispatch_launch(M, k, D, jnp.bfloat16), (array((M * k, D), jnp.float32), slot)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_references(child, case):
    results = child("interpret")[case]
    assert results == [0] * len(results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_of_narrow_and_of_wide_rows(child, width, dtype):
    assert child("interpret")[f"{width} columns-{dtype}"] == [0, 0]


@pytest.mark.parametrize("capability", ["90", "103"])
@pytest.mark.parametrize("kernel", ["combine", "combine_backward", "undispatch"])
def test_compiled_without_atomics_or_contraction(child, kernel, capability):
    found = child("compile")[kernel][capability]
    assert found["atomics"] == found["multiply_adds"] == 0
    assert found["wide_loads"] > 0  # 16 bytes a lane


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
