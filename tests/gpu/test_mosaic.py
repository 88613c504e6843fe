"""The Pallas matmuls for Hopper on a GPU: against float64, and bit for bit against the Triton kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import assert_same

from pallas_kernels import nvfp4
from pallas_kernels.grouped_matmul import grouped_matmul, mosaic

pytestmark = pytest.mark.gpu

CONFIGS = {
    "default": mosaic.Config(),
    "wide": mosaic.Config(rows=128, columns=128),
    "four chunks": mosaic.Config(stages=3, chunks=4),
}
GROUPS = {
    "all kinds": (5, 0, 70, 130, 1, 300, 63, 64, 0, 127, 33),  # and rows behind the last
    "one hot": (0, 0, 840, 0, 0, 0, 0, 0, 0, 0, 0),
    "even": (80,) * 11,
    "none": (0,) * 11,
}
ROWS, N, K = 880, 320, 192


def _random(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


@functools.cache
def _multiply(config, transposed=False, out_dtype=jnp.float32):
    return jax.jit(functools.partial(mosaic.multiply, config=CONFIGS[config], transposed=transposed, out_dtype=out_dtype))


@functools.cache
def _triton(transposed=False, out_dtype=jnp.float32):
    from pallas_kernels.grouped_matmul import triton

    def multiply(a, b, sizes, a_outer, b_outer):
        if transposed:
            return triton._multiply(a, b, a_outer, b_outer, sizes, out_dtype=out_dtype, transposed=True)
        return triton._multiply(a, b, a_outer, b_outer, sizes, out_dtype=out_dtype)

    return jax.jit(multiply)


def _operands(transposed=False, groups=11):
    a = _random(ROWS, K)
    b = _random(groups, *((K, N) if transposed else (N, K)), seed=1)
    a_outer = 1 + jnp.abs(_random(ROWS, dtype=jnp.float32, seed=2))
    b_outer = 1 + jnp.abs(_random(groups, dtype=jnp.float32, seed=3))
    return a, b, a_outer, b_outer


@pytest.mark.parametrize("config, transposed", [*((config, False) for config in CONFIGS), ("default", True)])
def test_groups(config, transposed):
    a, b, a_outer, b_outer = _operands(transposed)
    for kind, sizes in GROUPS.items():
        total = sum(sizes)
        a_nan = a.at[total:].set(jnp.nan)
        args = (a_nan, b, jnp.asarray(sizes, jnp.int32), a_outer, b_outer)
        got = _multiply(config, transposed)(*args)
        want, end = np.zeros((ROWS, N)), 0
        for e, size in enumerate(sizes):
            rows, end = slice(end, end + size), end + size
            w = _float64(b[e]) if transposed else _float64(b[e]).T
            want[rows] = _float64(a)[rows] @ w * _float64(a_outer)[rows, None] * float(b_outer[e])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3, err_msg=kind)
        assert_same(got[total:], jnp.zeros((ROWS - total, N), jnp.float32))
        assert_same(got, _triton(transposed)(*args))


@pytest.mark.parametrize("rows", [1, 7, 64, 127, 130, 880])
def test_dense_rows_do_not_depend_on_their_number(rows):
    a, b, _, _ = _operands(groups=1)
    many = _multiply("default", out_dtype=jnp.bfloat16)(a, b)
    assert_same(_multiply("default", out_dtype=jnp.bfloat16)(a[:rows], b), many[:rows])
    if rows == ROWS:
        assert_same(_triton(out_dtype=jnp.bfloat16)(a, b, None, None, None), many)
        for config in CONFIGS:
            assert_same(_multiply(config, out_dtype=jnp.bfloat16)(a, b), many)


@pytest.mark.parametrize("config", ["default", "wide"])
def test_sum_over_rows(config):
    from pallas_kernels.grouped_matmul import triton

    run = jax.jit(functools.partial(mosaic.multiply_transposed, config=CONFIGS[config]))
    run_triton = jax.jit(lambda g, x, sizes: triton.grouped_matmul_wgrad(x, g, sizes))
    g, x = _random(ROWS, N), _random(ROWS, K, seed=1)
    for kind, sizes in GROUPS.items():
        total, end = sum(sizes), 0
        args = (g.at[total:].set(jnp.nan), x.at[total:].set(jnp.inf), jnp.asarray(sizes, jnp.int32))
        got = run(*args)
        for e, size in enumerate(sizes):
            rows, end = slice(end, end + size), end + size
            want = _float64(g)[rows].T @ _float64(x)[rows]
            np.testing.assert_allclose(got[e], want, rtol=1e-5, atol=1e-3, err_msg=kind)
        assert_same(got, run_triton(*args))


@functools.cache
def _multiply_e4m3(config, out_dtype=jnp.float32):
    return jax.jit(functools.partial(mosaic.multiply, config=CONFIGS[config], out_dtype=out_dtype))


def _operands_e4m3(groups=11):
    k = K + 16  # the last step has 80 of 128
    a, b = _random(ROWS, k, dtype=jnp.float8_e4m3fn), _random(groups, N, k, seed=1, dtype=jnp.float8_e4m3fn)
    return a, b, *_operands(groups=groups)[2:]


@pytest.mark.parametrize("config", CONFIGS)
def test_e4m3_groups(config):
    a, b, a_outer, b_outer = _operands_e4m3()
    for kind, sizes in GROUPS.items():
        total, end = sum(sizes), 0
        args = (a.at[total:].set(jnp.nan), b, jnp.asarray(sizes, jnp.int32), a_outer, b_outer)
        got = _multiply_e4m3(config)(*args)
        assert_same(got, _triton()(*args))
        assert_same(got[total:], jnp.zeros((ROWS - total, N), jnp.float32))
        if config == "default":
            assert_same(_multiply_e4m3(config, jnp.bfloat16)(*args), _triton(out_dtype=jnp.bfloat16)(*args))
        for e, size in enumerate(sizes):
            rows, end = slice(end, end + size), end + size
            x, w, outer = _float64(a)[rows], _float64(b[e]).T, _float64(a_outer)[rows, None] * float(b_outer[e])
            error = np.abs(np.asarray(got, np.float64)[rows] - x @ w * outer)
            assert np.all(error <= 2**-11 * (np.abs(x) @ np.abs(w)) * outer), kind


@pytest.mark.parametrize("rows", [1, 7, 64, 127, 130, 880])
def test_e4m3_dense_rows_do_not_depend_on_their_number(rows):
    a, b, _, _ = _operands_e4m3(groups=1)
    many = _multiply_e4m3("default")(a, b)
    assert_same(_multiply_e4m3("default")(a[:rows], b), many[:rows])
    if rows in (1, 130):
        assert_same(_multiply_e4m3("wide")(a[:rows], b), many[:rows])
    if rows == ROWS:
        assert_same(_triton()(a, b, None, None, None), many)
        for config in CONFIGS:
            assert_same(_multiply_e4m3(config)(a, b), many)


@pytest.mark.parametrize("gathered", [False, True])
def test_e4m3_by_name(gathered):
    a, b, a_outer, b_outer = _operands_e4m3()
    x, w = nvfp4.ExpandedArray(a, a_outer), nvfp4.ExpandedArray(b, b_outer)
    sizes = jnp.asarray(GROUPS["all kinds"], jnp.int32)
    rows = jnp.arange(ROWS, dtype=jnp.int32) // 2 if gathered else None
    run = jax.jit(lambda x, w, rows, name: grouped_matmul(x, w, sizes, rows=rows, implementation=name), static_argnums=3)
    assert_same(run(x, w, rows, "mosaic"), run(x, w, rows, "triton"))


@pytest.mark.parametrize("n, k", [(64, 16), (192, 80), (64, 144)])
def test_e4m3_narrower_than_a_tile(n, k):
    a, b = _random(130, k, dtype=jnp.float8_e4m3fn), _random(1, n, k, seed=1, dtype=jnp.float8_e4m3fn)
    assert_same(_multiply_e4m3("default")(a, b), _triton()(a, b, None, None, None))


def test_forty_runs_one_result():
    # Enough rows and depth that every slot of the ring is used again and again, and blocks have several tiles.
    rows, n, k, groups = 16384, 1536, 768, 64
    a, b = _random(rows, k), _random(groups, n, k, seed=1)
    g = _random(rows, n, seed=2)
    sizes = jnp.asarray(np.random.default_rng(4).multinomial(rows - 100, np.full(groups, 1 / groups)), jnp.int32)
    runs = [
        lambda: _multiply("default", out_dtype=jnp.bfloat16)(a, b, sizes),
        lambda: _multiply("wide", out_dtype=jnp.bfloat16)(a, b, sizes),
        lambda: jax.jit(mosaic.multiply_transposed)(g, a, sizes),
    ]
    a8, b8 = (each.astype(jnp.float8_e4m3fn) for each in (a, b))
    for config in CONFIGS:
        runs.append(lambda config=config: _multiply_e4m3(config, jnp.bfloat16)(a8, b8, sizes))
    first = [run() for run in runs]
    assert_same(first[0], first[1])
    assert_same(first[3], first[4])
    assert_same(first[3], first[5])
    for _ in range(39):
        for run, want in zip(runs, first, strict=True):
            assert bool(jnp.array_equal(run(), want))
