"""The kernels for many rows in Triton's interpreter against the reference, and compiled for a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SIZES = (20, 0, 1, 17, 5)
CASES = ["dense", "grouped", "gathered", "transposed", "rows"]


def _interpreted():
    """Small integers, whose products and sums are exact in any order."""
    from pallas_kernels import gpu
    from pallas_kernels.grouped_matmul import reference, triton

    rng = np.random.default_rng(0)
    e, m, n, k, used = len(SIZES), 50, 24, 80, sum(SIZES)
    sizes = jnp.asarray(SIZES, jnp.int32)
    integers = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)  # noqa: E731
    a, b = integers(m, k), integers(e, n, k)
    a_outer, b_outer = np.exp2(integers(m)), np.exp2(integers(e))
    none = np.zeros(1, np.int32)

    def launch(num_groups, **kinds):
        kinds = dict(dict(grouped=True), **kinds)
        return triton.multiply_launch(
            m, n, k, jnp.float32, jnp.float32, num_groups=num_groups, a_outer=True, b_outer=True, **kinds
        )

    def expected(a, a_outer, b, b_outer, sizes):
        return [np.asarray(reference._multiply_tiles(*map(jnp.asarray, (a, a_outer, b, b_outer, sizes)), jnp.float32))]

    tiles = gpu.interpret(triton.group_tiles_launch(m, e, launch(e).constants["BLOCK_M"]), np.asarray(sizes), m)
    inputs = a, b[:1], a_outer, b_outer[:1], none, none, none, none, m
    yield "dense", launch(1, grouped=False), inputs, expected(a, a_outer, b[:1], b_outer[:1], [m])
    grouped = expected(a, a_outer, b, b_outer, sizes)
    yield "grouped", launch(e), (a, b, a_outer, b_outer, none, *tiles, m), grouped
    rows = rng.permutation(m).astype(np.int32)
    inputs = np.asarray(a)[np.argsort(rows)], b, a_outer[np.argsort(rows)], b_outer, rows, *tiles, m
    yield "gathered", launch(e, gathered=True), inputs, grouped
    swapped = np.ascontiguousarray(np.swapaxes(b, 1, 2))
    yield "transposed", launch(e, transposed=True), (a, swapped, a_outer, b_outer, none, *tiles, m), grouped

    g = integers(m, n)
    g[used:] = np.nan  # behind the last group: must not be read
    inputs = g, a, np.cumsum(SIZES).astype(np.int32)
    sums = [np.asarray(reference.grouped_matmul_wgrad(jnp.asarray(a), jnp.nan_to_num(g), sizes))]
    yield "rows", triton.multiply_transposed_launch(m, n, k, jnp.float32, num_groups=e), inputs, sums


def _compiled():
    from pallas_kernels.grouped_matmul import triton

    array, m, n, k, e = jax.ShapeDtypeStruct, 65536, 1536, 2048, 128
    floats, integers = array((e,), jnp.float32), array((e,), jnp.int32)
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
        launch = triton.multiply_launch(
            m, n, k, dtype, jnp.bfloat16, num_groups=e, grouped=True, gathered=True, a_outer=True, b_outer=True
        )
        inputs = array((m, k), dtype), array((e, n, k), dtype), floats, floats, *[integers] * 4, m
        yield jnp.dtype(dtype).name, launch, inputs


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_references(child, case):
    results = child("interpret")[case]
    assert results == [0] * len(results)


@pytest.mark.parametrize("kernel", ["float8_e4m3fn", "bfloat16"])
def test_compiled_for_tensor_cores(child, kernel):
    found = child("compile")[kernel]["90"]
    assert found["mma"] > 0 and found["atomics"] == 0


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
