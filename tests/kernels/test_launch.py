"""No rows are no launch: what every kernel returns then, on a machine without a GPU; and more rows than a GPU can count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, gpu, nvfp4
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad

ROWS, WEIGHTS = nvfp4.ScaleRule.fp8_exact(outer="row"), nvfp4.ScaleRule.fp8_exact(outer="matrix")


@pytest.mark.parametrize("grid", [(0,), (4, 0), (0, 3)])
def test_a_grid_of_no_programs(grid):
    launch = gpu.Launch(None, gpu.outputs(((0, 8), jnp.bfloat16), ((2, 3), jnp.float32)), grid, {})
    rows, sums = gpu.run(launch, jnp.ones((0, 8)))
    assert (rows.shape, rows.dtype) == ((0, 8), jnp.bfloat16)
    np.testing.assert_array_equal(sums, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("grid", [(1, 65535 + 1), (1, 1, 70_000), (2**31,)])
def test_a_grid_that_no_gpu_has(grid):
    def kernel(): ...

    wanted = f"kernel: {' x '.join(map(str, grid))} programs; a GPU has at most 2147483647 x 65535 x 65535: cut the batch"
    with pytest.raises(NotImplementedError, match=wanted):
        gpu.run(gpu.Launch(kernel, gpu.outputs(((1,), jnp.float32)), grid, {}))


@pytest.mark.parametrize("kernel", ["triton", "mosaic"])
def test_matmuls_of_no_rows(monkeypatch, kernel):
    pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
    monkeypatch.setattr(dispatch, "resolve", lambda op, implementation, *_, **__: implementation or "reference")
    x, g, w = jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros((0, 32), jnp.bfloat16), jnp.ones((3, 32, 64), jnp.bfloat16)
    sizes, chosen = jnp.zeros(3, jnp.int32), dict(implementation=kernel)
    assert matmul(x, w[0], **chosen).shape == grouped_matmul(x, w, sizes, **chosen).shape == (0, 32)
    assert grouped_matmul(jnp.ones((5, 64), jnp.bfloat16), w, sizes, rows=jnp.zeros(0, jnp.int32), **chosen).shape == (0, 32)
    assert matmul_dgrad(g, w[0], **chosen).shape == grouped_matmul_dgrad(g, w, sizes, **chosen).shape == (0, 64)
    np.testing.assert_array_equal(matmul_wgrad(x, g, **chosen), np.zeros((32, 64), np.float32))
    np.testing.assert_array_equal(grouped_matmul_wgrad(x, g, sizes, **chosen), np.zeros((3, 32, 64), np.float32))


@pytest.mark.slow
def test_packed_matmul_of_no_rows(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(dispatch, "resolve", lambda op, implementation, *_, **__: implementation or "reference")
    x = jax.tree.map(lambda leaf: leaf[:0], nvfp4.quantize(jnp.ones((1, 64)), ROWS))
    w = nvfp4.quantize(jnp.ones((32, 64)), WEIGHTS)
    assert matmul(x, w, implementation="triton").shape == (0, 32)
