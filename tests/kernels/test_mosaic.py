"""The Pallas matmuls for Hopper: their arithmetic, indexing and barriers in Pallas's GPU interpreter on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("Pallas's GPU interpreter is too young before jax 0.11", allow_module_level=True)

from pallas_kernels.grouped_matmul import mosaic  # noqa: E402

# One processor has all tiles, one after the other; columns are few, since interpreting is slow.
HOST = dict(processors=1, interpret=plgpu.InterpretGPUParams(detect_races=True))
# Small, empty, more than one tile, one row, and rows behind the last group.
SIZES = (5, 0, 70, 130, 1)
ROWS = 210


def _random(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _groups(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize(
    "config, transposed",
    [
        (mosaic.Config(columns=64), False),
        (mosaic.Config(rows=128, columns=64, stages=2), True),
    ],
)
def test_groups(config, transposed):
    k, n = 128, 64
    a = _random(ROWS, k).at[sum(SIZES) :].set(jnp.nan)
    b = _random(len(SIZES), *((k, n) if transposed else (n, k)), seed=1)
    a_outer = 1 + jnp.abs(_random(ROWS, dtype=jnp.float32, seed=2))
    b_outer = 1 + jnp.abs(_random(len(SIZES), dtype=jnp.float32, seed=3))
    run = jax.jit(lambda *args: mosaic.multiply(*args, out_dtype=jnp.float32, transposed=transposed, config=config, **HOST))
    got = np.asarray(run(a, b, jnp.asarray(SIZES), a_outer, b_outer))
    want = np.zeros((ROWS, n))
    for e, rows in enumerate(_groups(SIZES)):
        w = _float64(b[e]) if transposed else _float64(b[e]).T
        want[rows] = _float64(a)[rows] @ w * _float64(a_outer)[rows, None] * float(b_outer[e])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert np.all(got[sum(SIZES) :] == 0)


FP8_CONFIGS = {
    "one group": mosaic.Config(columns=64, stages=2),
    "groups": mosaic.Config(columns=64, stages=2),
    "groups, wide, four chunks": mosaic.Config(rows=128, columns=128, stages=2, chunks=4),
}


@pytest.mark.parametrize("name", FP8_CONFIGS)
def test_e4m3_with_an_end_of_k(name):
    k, n = 144, 192  # a step of 128 and 16 more; three tiles of columns
    sizes = (ROWS,) if name == "one group" else SIZES
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((ROWS, k), (len(sizes), n, k)))
    a_outer, b_outer = (2.0 ** rng.integers(-2, 3, count).astype(np.float32) for count in (ROWS, len(sizes)))
    want = np.zeros((ROWS, n), np.float32)
    for e, rows in enumerate(_groups(sizes)):
        want[rows] = a[rows] @ b[e].T * a_outer[rows, None] * b_outer[e]
    a[sum(sizes) :] = np.nan
    group_sizes = None if len(sizes) == 1 else jnp.asarray(sizes)
    run = jax.jit(lambda *args: mosaic.multiply(*args, out_dtype=jnp.float32, config=FP8_CONFIGS[name], **HOST))
    got = run(*(jnp.asarray(each, jnp.float8_e4m3fn) for each in (a, b)), group_sizes, a_outer, b_outer)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_sum_over_rows():
    n, k = 64, 128
    g, x = (_random(ROWS, width, seed=width).at[sum(SIZES) :].set(jnp.nan) for width in (n, k))
    config = mosaic.Config(columns=128, stages=2)
    run = jax.jit(lambda g, x, sizes: mosaic.multiply_transposed(g, x, sizes, config=config, **HOST))
    got = np.asarray(run(g, x, jnp.asarray(SIZES)))
    want = [_float64(g)[rows].T @ _float64(x)[rows] for rows in _groups(SIZES)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert np.all(got[1] == 0)


@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_cover_every_row_of_their_group_and_no_other(rows):
    rng = np.random.default_rng(0)
    cut = jax.jit(mosaic.row_tiles, static_argnums=(1, 2))
    for trial in range(20):
        num_rows = 1000
        sizes = rng.multinomial(num_rows - rng.integers(0, 2) * 77, rng.dirichlet(np.full(12, 0.3)))
        group, start, length, count = (np.asarray(each) for each in cut(jnp.asarray(sizes, jnp.int32), num_rows, rows))
        owner = np.repeat(np.arange(13), [*sizes, num_rows - sizes.sum()])
        covered = np.zeros(num_rows, bool)
        for tile in range(count[0]):
            for part in (2 * tile, 2 * tile + 1):
                mine = slice(start[part], start[part] + length[part])
                assert np.all(owner[mine] == group[tile]), trial
                if length[part]:
                    assert mine.stop <= num_rows
                covered[mine] = True
        assert covered.all()


def test_what_is_not_built_is_refused():
    with pytest.raises(NotImplementedError, match=r"\(8, 96\)"):
        mosaic.multiply(_random(8, 96), _random(1, 64, 96))
    with pytest.raises(NotImplementedError, match="float32 x bfloat16"):
        mosaic.multiply(_random(8, 64, dtype=jnp.float32), _random(1, 64, 64))
    e4m3 = functools.partial(_random, dtype=jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="K of 16"):
        mosaic.multiply(e4m3(8, 72), e4m3(1, 64, 72))
    with pytest.raises(NotImplementedError, match="forward"):
        mosaic.multiply(e4m3(8, 64), e4m3(1, 64, 64), transposed=True)
    with pytest.raises(NotImplementedError, match="forward"):
        mosaic.multiply_transposed(e4m3(8, 64), e4m3(8, 64))
