"""What the tests of the operations share: exact operands, and the check that a row's bits depend on the row alone."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pallas_kernels import nvfp4

NUM_ROWS = 130

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of the E2M1 codes 0..7; bit 3 is the sign


def _assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.tobytes() != b.tobytes():
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
            raise AssertionError("equal numbers, but other bits: signed zeros or NaN payloads")


def _lattice(seed: int, num_rows: int, width: int) -> np.ndarray:
    """Float32 [num_rows, width] of E2M1 numbers with a 6 in every block of 16: NVFP4 holds it without loss.

    Products of two such matrices are multiples of 0.25 below 2^17, so float32 sums them exactly in any order.
    """
    rng = np.random.default_rng(seed)
    x = rng.choice(_MAGNITUDES, (num_rows, width)) * rng.choice([-1, 1], (num_rows, width))
    blocks = x.reshape(num_rows, -1, 16)
    np.put_along_axis(blocks, rng.integers(0, 16, (*blocks.shape[:2], 1)), np.float32(6), axis=2)
    return x.astype(np.float32)


def _nvfp4(values, block_scale, outer_scale) -> nvfp4.Nvfp4Array:
    """An NVFP4 array of numpy arrays, from code values [..., M, K], block scales [..., M, K / 16] and outer scales."""
    codes = np.searchsorted(_MAGNITUDES, np.abs(values)).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 3)
    block_scale = np.broadcast_to(block_scale, (*values.shape[:-1], values.shape[-1] // 16))
    return nvfp4.Nvfp4Array(
        codes=codes[..., 0::2] | (codes[..., 1::2] << 4),
        block_scale=block_scale.astype(ml_dtypes.float8_e4m3fn),
        outer_scale=np.asarray(outer_scale, np.float32),
    )


def _lattice_nvfp4(x: np.ndarray, outer_shape: tuple[int, ...]) -> nvfp4.Nvfp4Array:
    """A matrix of the lattice as `fp8_exact` holds it: block scales 64, outer scales 1 / 64."""
    return _nvfp4(x, np.float32(64), np.full(outer_shape, 1 / 64))


def _random_nvfp4(seed: int, shape: tuple[int, ...], outer_shape: tuple[int, ...]):
    """A random NVFP4 array and its numbers in float64: all codes, `fp8_exact` block scales, powers of two outside."""
    rng = np.random.default_rng(seed)
    values = rng.choice(_MAGNITUDES, shape) * rng.choice(np.float32([-1, 1]), shape)
    scales = rng.choice(np.float32(nvfp4.FP8_EXACT_SCALES), (*shape[:-1], shape[-1] // 16))
    outer = 2.0 ** rng.integers(-9, -3, outer_shape)
    numbers = values.astype(np.float64) * np.repeat(scales, 16, axis=-1)
    per_row = len(outer_shape) == len(shape) - 1
    return _nvfp4(values, scales, outer), numbers * (outer[..., None] if per_row else outer[..., None, None])


def _unchanged(x):
    """Equal to x, by operations that a compiler would like to fuse into what reads them."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return (jnp.where(x == x, x, 0) * 2) * 0.5
    return x


def _consume(results):
    """Something that reads every result, as the next layer of a model would."""
    floats = [x.astype(jnp.float32) for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.tanh(x * 1.5 + 1.0)) for x in floats)


def _part(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def _surrounded(op, rows):
    results = op(jax.tree.map(_unchanged, rows))
    return results, _consume(results)


def _inside_vjp(op, rows, *, backward):
    """Results of the forward of `jax.vjp`, and what the backward makes of cotangents of 1."""
    leaves, structure = jax.tree.flatten(rows)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def of_floats(floats):
        floats = iter(floats)
        merged = [next(floats) if f else x for x, f in zip(leaves, is_float, strict=True)]
        return op(jax.tree.unflatten(structure, merged))

    results, pullback = jax.vjp(of_floats, [x for x, f in zip(leaves, is_float, strict=True) if f])
    if not backward:
        return results, ()
    cotangents = jax.tree.map(
        lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0), results
    )
    return results, pullback(cotangents)


def _check_rows(op, rows, *, differentiable=True, thorough=False):
    """Asserts that row i of ``op(rows)`` has the same bits alone, in any batch, at any place and in any surrounding program.

    Every kind of program gets another number of rows, since compiling is what takes the time.

    Args:
      op: function of a pytree of arrays [M, ...] that returns a pytree of arrays [M, ...].
      rows: its argument, with M = NUM_ROWS.
      differentiable: whether to run it as the forward of `jax.vjp` too.
      thorough: more programs.
    """
    rows = jax.tree.map(np.asarray, rows)  # numpy cuts and permutes rows without a compilation for each cut
    jitted = jax.jit(op)
    whole = jax.tree.map(np.asarray, jitted(rows))

    for i in range(NUM_ROWS):
        _assert_same_bits(jitted(_part(rows, slice(i, i + 1))), _part(whole, slice(i, i + 1)))
    permutation = np.random.default_rng(0).permutation(NUM_ROWS)
    _assert_same_bits(jitted(_part(rows, permutation)), _part(whole, permutation))
    for count in (2, 7, 16, 17, 33) if thorough else ():
        _assert_same_bits(jitted(_part(rows, slice(count))), _part(whole, slice(count)))

    # Fewer rows than one tile: a loop of one trip is what XLA would inline into its surroundings.
    surrounded = jax.jit(functools.partial(_surrounded, op))
    for count in (2, 7, 33) if thorough else (7,):
        _assert_same_bits(surrounded(_part(rows, slice(count)))[0], _part(whole, slice(count)))

    sixteens = jax.tree.map(lambda x: x[:128].reshape(8, 16, *x.shape[1:]), rows)
    _, scanned = jax.jit(lambda xs: lax.scan(lambda carry, x: (carry + 1, _surrounded(op, x)[0]), 0, xs))(sixteens)
    _assert_same_bits(jax.tree.map(lambda x: np.asarray(x).reshape(128, *x.shape[2:]), scanned), _part(whole, slice(128)))

    if differentiable:
        inside_vjp = jax.jit(functools.partial(_inside_vjp, op, backward=thorough))
        _assert_same_bits(inside_vjp(_part(rows, slice(17)))[0], _part(whole, slice(17)))


@pytest.fixture(scope="session")
def assert_same_bits():
    return _assert_same_bits


@pytest.fixture(scope="session")
def lattice():
    return _lattice


@pytest.fixture(scope="session")
def lattice_nvfp4():
    return _lattice_nvfp4


@pytest.fixture(scope="session")
def random_nvfp4():
    return _random_nvfp4


@pytest.fixture(params=["quick", pytest.param("thorough", marks=pytest.mark.slow)])
def check_rows(request):
    return functools.partial(_check_rows, thorough=request.param == "thorough")
