"""Matmuls on packed weights on a GPU: the bits of the kernel for many rows, whatever the rows, the groups and the tiles."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from equal_bits import GROUP_SIZES, assert_same

from pallas_kernels import gpu, nvfp4
from pallas_kernels.grouped_matmul import reference

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 64, 127, 128, 129, 130)
OTHER_SCALES = np.float32([0.875, 1, 1.125, 1.75])  # not of the `fp8_exact` set; sums of few products stay exact
INNERS = ("fp8", "bf16")


def _random(seed, shape, inner, outer_shape):
    """All codes, scales of the set (fp8) or others (bf16), outer scales that are no powers of two."""
    rng = np.random.default_rng(seed)
    scales = np.float32(nvfp4.FP8_EXACT_SCALES) if inner == "fp8" else OTHER_SCALES
    return nvfp4.Nvfp4Array(
        codes=jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)), jnp.uint8),
        block_scale=jnp.asarray(rng.choice(scales, (*shape[:-1], shape[-1] // 16)).astype(ml_dtypes.float8_e4m3fn)),
        outer_scale=jnp.asarray(rng.uniform(0.5, 2, outer_shape), jnp.float32),
        fp8_exact=inner == "fp8",
    )


def _operands(inner, M, N, K, E=1):
    return _random(1, (M, K), inner, (M,)), _random(2, (E, N, K), inner, (E,))


def _expand(x, inner):
    return nvfp4.expand(x, jnp.float8_e4m3fn if inner == "fp8" else jnp.bfloat16)


def _packed(x, w, sizes, inner, **options):
    from pallas_kernels.grouped_matmul import triton_packed

    return triton_packed.grouped_matmul(_expand(x, inner), w, jnp.asarray(sizes, jnp.int32), inner=inner, **options)


def _many_rows(x, w, sizes, **options):
    from pallas_kernels.grouped_matmul import triton

    inner = "fp8" if w.fp8_exact else "bf16"
    return triton.grouped_matmul(_expand(x, inner), _expand(w, inner), jnp.asarray(sizes, jnp.int32), **options)


@pytest.mark.parametrize("N, K", [(24, 16), (136, 80), (200, 144), (513, 768), (1024, 2048)])
@pytest.mark.parametrize("inner", INNERS)
def test_dense_has_the_bits_of_the_kernel_for_many_rows(inner, N, K):
    x, w = _operands(inner, 130, N, K)
    expected = _many_rows(x, w, [130], out_dtype=jnp.float32)
    for M in (1, 17, 130):
        part = jax.tree.map(lambda leaf, M=M: leaf[:M], x)
        assert_same(_packed(part, w, [M], inner, out_dtype=jnp.float32), expected[:M])
    if inner == "bf16" and K <= 144:  # every sum fits float32
        exact = jax.jit(reference.grouped_matmul, static_argnames="out_dtype")
        assert_same(expected, exact(x, w, np.int32([130]), out_dtype=jnp.float32))


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("inner", INNERS)
def test_groups(inner, sizes):
    x, w = _operands(inner, 257, 200, 768, E=8)
    last = sum(sizes)
    poisoned = x.replace(outer_scale=x.outer_scale.at[last:].set(jnp.nan))
    ours = _packed(poisoned, w, sizes, inner)
    assert_same(ours[:last], _many_rows(x, w, sizes)[:last])
    assert not np.asarray(ours)[last:].view(np.uint16).any()


@pytest.mark.parametrize("inner", INNERS)
def test_rows_do_not_depend_on_their_number_or_neighbours(inner):
    x, w = _operands(inner, 4096, 384, 768)
    whole = _packed(x, w, [4096], inner)
    for M in ROWS:
        part = jax.tree.map(lambda leaf, M=M: leaf[1000 : 1000 + M], x)
        assert_same(_packed(part, w, [M], inner), whole[1000 : 1000 + M])


@pytest.mark.parametrize("inner", INNERS)
def test_bits_do_not_depend_on_the_tiles(inner):
    from pallas_kernels.grouped_matmul.triton_packed import Tiles

    x, w = _operands(inner, 257, 200, 768, E=8)
    first = _packed(x, w, GROUP_SIZES["hot"], inner, out_dtype=jnp.float32)
    for features, tokens, depth, unroll, warps, stages in (
        (64, 16, 128, 1, 4, 3), (64, 16, 256, 1, 4, 3), (64, 16, 128, 4, 4, 2), (128, 16, 256, 1, 4, 3), (128, 16, 128, 2, 8, 4),
        (64, 32, 64, 1, 4, 3), (64, 64, 128, 2, 4, 3), (128, 64, 128, 1, 8, 3), (64, 128, 128, 1, 4, 3),
    ):  # fmt: skip
        tiles = Tiles(features, tokens, depth, unroll, num_warps=warps, num_stages=stages)
        assert_same(_packed(x, w, GROUP_SIZES["hot"], inner, out_dtype=jnp.float32, tiles=tiles), first)
    for features, depth, unroll, stages in ((16, 128, 2, 3), (32, 256, 1, 3), (64, 128, 1, 3)):
        tiles = Tiles(features, 64, depth, unroll, SWAPPED=True, num_stages=stages)
        assert_same(_packed(x, w, GROUP_SIZES["hot"], inner, out_dtype=jnp.float32, tiles=tiles), first)


@pytest.mark.parametrize("features, warps", [(64, 4), (128, 4), (128, 8)])
@pytest.mark.parametrize("inner", INNERS)
def test_expansion_of_every_scale_and_code(inner, features, warps):
    """The product with the identity is the weights: with assembler, without, and what they have to be."""
    from pallas_kernels.grouped_matmul import triton_packed

    if inner == "fp8":
        scales = np.float32([*nvfp4.FP8_EXACT_SCALES, *nvfp4.FP8_EXACT_SCALES_UP_TO_4])
    else:
        scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    K, N = 256, 16 * len(scales)
    codes = ((np.arange(N)[:, None] + np.arange(K)[None, :] * 3) % 16).astype(np.uint8)
    block_scale = np.stack([np.repeat(np.roll(scales, i), 16) for i in range(16)], axis=1)
    if inner == "fp8":
        codes = np.where((np.repeat(block_scale, 16, axis=1) > 64) & ((codes & 7) == 7), codes - 1, codes)
    w = nvfp4.Nvfp4Array(
        codes=nvfp4.pack_codes(jnp.asarray(codes))[None],
        block_scale=jnp.asarray(block_scale.astype(ml_dtypes.float8_e4m3fn))[None],
        outer_scale=jnp.ones(1, jnp.float32),
        fp8_exact=inner == "fp8",
    )
    identity = jnp.eye(K, dtype=jnp.float8_e4m3fn if inner == "fp8" else jnp.bfloat16)
    ones = jnp.ones(K, jnp.float32)
    expected = np.asarray(nvfp4.block_values(w))[0].T + np.float32(0)  # a sum has no -0
    tiles = triton_packed.Tiles(BLOCK_FEATURES=features, BLOCK_TOKENS=32, UNROLL=1, num_warps=warps)
    for plain in (False, True):
        launch = triton_packed.packed_launch(K, N, K, 1, inner=inner, out_dtype=jnp.float32, tiles=tiles, plain=plain)
        inputs = identity, ones, ones, w.codes, w.block_scale, w.outer_scale, jnp.full((1,), K, jnp.int32), K
        assert_same(gpu.run(launch, *inputs)[0], expected)


@pytest.mark.parametrize("inner", INNERS)
def test_forty_runs(inner):
    x, w = _operands(inner, 257, 200, 768, E=8)
    run = jax.jit(lambda x, w: _packed(x, w, GROUP_SIZES["hot"], inner))
    first = run(x, w)
    for _ in range(39):
        assert_same(run(x, w), first)


def test_operands_of_the_wrong_type_are_refused():
    from pallas_kernels.grouped_matmul import triton_packed

    x, w = _operands("fp8", 2, 64, 32)
    sizes = jnp.full((1,), 2, jnp.int32)
    with pytest.raises(TypeError, match="'fp8' reads x as an ExpandedArray of float8_e4m3fn, not Nvfp4Array"):
        triton_packed.grouped_matmul(x, w, sizes, inner="fp8")
    with pytest.raises(TypeError, match="'bf16' reads x as an ExpandedArray of bfloat16, not float8_e4m3fn"):
        triton_packed.grouped_matmul(nvfp4.expand(x), w, sizes, inner="bf16")
