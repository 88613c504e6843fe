"""Dense and grouped matmuls, forward and backward, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_bits import GROUP_SIZES, assert_same

from minite_jax.diagnostics import HOPPER_FP8, certify
from pallas_kernels import nvfp4, tuning
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad
from pallas_kernels.nvfp4 import ScaleRule

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 64, 127, 128, 129, 130, 4096)
ACTIVATIONS, WEIGHTS = ScaleRule.fp8_exact(outer="row"), ScaleRule.fp8_exact(outer="matrix")
OTHER_ACTIVATIONS = ScaleRule.te(outer="row", four_over_six="mae", bound=256)
OTHER_WEIGHTS = ScaleRule.te(outer="matrix", four_over_six="mae", bound=256)
# Hopper's fp8 units align the products of one instruction and the accumulator to the largest of them and keep about 13 bits below
# it. Measured (docs/kernels.md): at most 3.1e-4 of sum |x w| for K up to 12288; this is half as much again.
FP8_BOUND = 2.0**-11


def _normal(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _float64(operand):
    if isinstance(operand, nvfp4.Nvfp4Array):
        values = np.asarray(nvfp4.block_values(operand), np.float64)
        outer = np.asarray(operand.outer_scale, np.float64)
        return values * (outer[..., None] if operand.outer_per_row else outer[..., None, None])
    return np.asarray(operand.astype(jnp.float32), np.float64)


def _operands(kind, m, n, k, *, groups=None):
    shape = (n, k) if groups is None else (groups, n, k)
    x, w = _normal((m, k), 1, jnp.bfloat16), _normal(shape, 2)
    if kind == "fp8":
        return nvfp4.quantize(x, ACTIVATIONS), nvfp4.quantize(w, WEIGHTS)
    if kind == "nvfp4_as_bf16":
        return nvfp4.quantize(x, OTHER_ACTIVATIONS), nvfp4.quantize(w, OTHER_WEIGHTS)
    dtype = {"bf16": jnp.bfloat16, "fp32": jnp.float32}[kind]
    return x.astype(dtype), w.astype(dtype)


def _rows(operand, index):
    return jax.tree.map(lambda leaf: leaf[index], operand)


KINDS = ("fp8", "nvfp4_as_bf16", "bf16", "fp32")


@pytest.mark.parametrize("n, k", [(24, 16), (200, 80), (136, 144), (513, 768), (1024, 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_is_right(kind, n, k):
    x, w = _operands(kind, 130, n, k)
    ours = np.asarray(matmul(x, w, out_dtype=jnp.float32), np.float64)
    x64, w64 = _float64(x), _float64(w)
    exact, magnitude = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
    # float32 sums of k exact products in some order: each of the k additions errs by at most 2^-24 of a partial sum.
    bound = FP8_BOUND if kind == "fp8" else k * 2.0**-24
    assert (np.abs(ours - exact) <= bound * magnitude).all(), np.max(np.abs(ours - exact) / magnitude)
    if kind == "nvfp4_as_bf16" and k <= 144:
        # Sums of so few products of 12 bits each fit float32: any order is exact.
        sums = np.asarray(nvfp4.block_values(x), np.float64) @ np.asarray(nvfp4.block_values(w), np.float64).T
        outer = np.asarray(x.outer_scale)[:, None]
        np.testing.assert_array_equal(ours.astype(np.float32), sums.astype(np.float32) * outer * np.asarray(w.outer_scale))


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize("k", [16, 32, 64, 256])
def test_what_is_proven_for_hoppers_fp8_units_is_exact(k, implementation):
    """The model of the accumulator (13 bits below the largest term) against the machine: numbers of few bits, signs at random."""
    rng = np.random.default_rng(k)
    # Products of 1 to 6 bits, whose sums need about as many bits as the units keep.
    x, w = (jnp.asarray(rng.integers(-7, 8, shape), jnp.float8_e4m3fn) for shape in ((130, k), (192, k)))
    x = nvfp4.ExpandedArray(x, jnp.ones(130, jnp.float32))
    w = nvfp4.ExpandedArray(w, jnp.ones((), jnp.float32))
    certificate = certify(x, w, accumulator=HOPPER_FP8)
    assert certificate.fraction_proven > 0.9
    ours = np.asarray(matmul(x, w, out_dtype=jnp.float32, implementation=implementation))
    true = np.asarray(x.values.astype(jnp.float32), np.float64) @ np.asarray(w.values.astype(jnp.float32), np.float64).T
    np.testing.assert_array_equal(ours[certificate.proven], true.astype(np.float32)[certificate.proven])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_number_or_neighbours(kind):
    x, w = _operands(kind, 4096, 384, 768)
    whole = matmul(x, w)
    for m in ROWS:
        start = min(1000, 4096 - m)
        assert_same(matmul(_rows(x, slice(start, start + m)), w), whole[start : start + m])


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_bits_do_not_depend_on_the_tile(kind):
    x, w = _operands(kind, 257, 384, 768)
    op = "multiply_float8_e4m3fn" if kind == "fp8" else "multiply_bfloat16"
    first = matmul(x, w, out_dtype=jnp.float32)
    for block_m, block_n, block_k, warps in (
        (64, 64, 64, 4), (64, 256, 64, 4), (128, 128, 64, 8), (128, 128, 128, 4), (128, 64, 32, 4), (256, 128, 64, 8),
    ):  # fmt: skip
        tile = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=2)
        with tuning.override(op, tile):
            assert_same(matmul(x, w, out_dtype=jnp.float32, implementation="triton"), first)


def test_packed_and_expanded_operands_give_the_same_bits():
    x, w = _operands("fp8", 130, 200, 144)
    expected = matmul(x, w)
    assert_same(matmul(nvfp4.expand(x), w), expected)
    assert_same(matmul(nvfp4.expand(x), nvfp4.expand(w)), expected)
    assert_same(matmul(nvfp4.quantize_expanded(_normal((130, 144), 1, jnp.bfloat16), ACTIVATIONS), w), expected)


@pytest.mark.parametrize("rules", [(ACTIVATIONS, OTHER_WEIGHTS), (OTHER_ACTIVATIONS, WEIGHTS)], ids=["weights", "activations"])
def test_one_operand_outside_of_the_fp8_exact_set(rules):
    """Foreign weights under our activations, and the other way round: bfloat16 products, packed or expanded, few rows or many."""
    x, w = nvfp4.quantize(_normal((130, 144), 1, jnp.bfloat16), rules[0]), nvfp4.quantize(_normal((200, 144), 2), rules[1])
    expected = matmul(nvfp4.expand(x, jnp.bfloat16), nvfp4.expand(w, jnp.bfloat16))
    one_by_one = lambda q: nvfp4.expand(q, jnp.float8_e4m3fn if q.fp8_exact else jnp.bfloat16)  # noqa: E731
    for left in (x, one_by_one(x)):
        for right in (w, one_by_one(w)):
            assert_same(matmul(left, right), expected)
            assert_same(matmul(_rows(left, slice(0, 7)), right), expected[:7])


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_equals_dense_row_by_row(kind, sizes):
    x, w = _operands(kind, 257, 200, 144, groups=8)
    ours = np.asarray(grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32)))
    start = 0
    for group, size in enumerate(sizes):
        if size:
            assert_same(ours[start : start + size], matmul(_rows(x, slice(start, start + size)), _rows(w, group)))
        start += size
    assert not ours[start:].view(np.uint16).any()


def _relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_gradients(kind):
    x, w = _operands(kind, 257, 200, 144)
    g = _normal((257, 200), 3, jnp.float32 if kind == "fp32" else jnp.bfloat16)
    dx = np.asarray(matmul_dgrad(g, w), np.float64)
    dw = np.asarray(matmul_wgrad(x, g), np.float64)
    g64 = _float64(g)
    # float32 sums of exact products, except where the outer scales are no powers of two and x is rounded to bfloat16 again.
    assert _relative(dx, g64 @ _float64(w)) < 1e-6
    assert _relative(dw, g64.T @ _float64(x)) < (2.0**-8 if kind == "nvfp4_as_bf16" else 1e-6)


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_grouped_gradients(kind, sizes):
    x, w = _operands(kind, 257, 200, 144, groups=8)
    g = _normal((257, 200), 3, jnp.bfloat16)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    dx, dw = np.asarray(grouped_matmul_dgrad(g, w, group_sizes)), np.asarray(grouped_matmul_wgrad(x, g, group_sizes))
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        if size:
            assert_same(dx[rows], matmul_dgrad(g[rows], _rows(w, group)))
            assert_same(dw[group], matmul_wgrad(_rows(x, rows), g[rows]))
            assert _relative(dw[group], _float64(g[rows]).T @ _float64(_rows(x, rows))) < 1e-6
        else:
            assert not dw[group].view(np.uint32).any()
        start += size
    assert not dx[start:].view(np.uint32).any()


def test_what_lies_behind_the_last_group_is_not_read_into_a_gradient():
    x, w = _operands("bf16", 257, 200, 144, groups=8)
    g = _normal((257, 200), 3, jnp.bfloat16)
    sizes = jnp.asarray(GROUP_SIZES["tail"], jnp.int32)
    last = sum(GROUP_SIZES["tail"])
    poisoned = grouped_matmul_wgrad(x.at[last:].set(jnp.nan), g.at[last:].set(jnp.nan), sizes)
    assert_same(poisoned, grouped_matmul_wgrad(x, g, sizes))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_forty_runs(kind):
    x, w = _operands(kind, 1025, 384, 768, groups=8)
    g = _normal((1025, 384), 3, jnp.bfloat16)
    sizes = jnp.asarray([100, 0, 300, 25, 200, 200, 100, 100], jnp.int32)
    run = jax.jit(
        lambda x, w, g: (grouped_matmul(x, w, sizes), grouped_matmul_dgrad(g, w, sizes), grouped_matmul_wgrad(x, g, sizes))
    )
    first = run(x, w, g)
    for _ in range(40):
        jax.tree.map(assert_same, run(x, w, g), first)


def test_types_that_are_not_multiplied_are_named():
    with pytest.raises(NotImplementedError, match="float32 and bfloat16"):
        matmul(_normal((4, 16), 0, jnp.bfloat16), _normal((8, 16), 0))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_index_are_rows_copied(kind):
    x, w = _operands(kind, 100, 192, 128, groups=8)
    sizes = jnp.asarray([64, 0, 100, 65, 128, 200, 1, 41], jnp.int32)
    rows = jnp.asarray(np.random.default_rng(4).integers(0, 100, 599), jnp.int32)
    copied = jax.tree.map(lambda leaf: leaf[rows], x)
    assert_same(grouped_matmul(x, w, sizes, rows=rows), grouped_matmul(copied, w, sizes))
    few = jnp.asarray([3, 0, 4, 0, 0, 2, 0, 0], jnp.int32)  # packed weights where there are any
    assert_same(grouped_matmul(x, w, few, rows=rows[:9]), grouped_matmul(jax.tree.map(lambda leaf: leaf[:9], copied), w, few))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind):
    """Nothing is launched: empty results, and weight gradients of zeros."""
    x, w = _operands(kind, 16, 64, 128, groups=3)
    x, g, sizes = _rows(x, slice(0, 0)), jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    assert matmul(x, _rows(w, 0)).shape == grouped_matmul(x, w, sizes).shape == (0, 64)
    assert matmul_dgrad(g, _rows(w, 0)).shape == grouped_matmul_dgrad(g, w, sizes).shape == (0, 128)
    assert_same(matmul_wgrad(x, g), jnp.zeros((64, 128), jnp.float32))
    assert_same(grouped_matmul_wgrad(x, g, sizes), jnp.zeros((3, 64, 128), jnp.float32))
