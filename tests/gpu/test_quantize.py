"""The quantising kernels against the jnp reference, bit for bit, under XLA's default flags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import ScaleRule
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from pallas_kernels.silu_mul import silu_mul, silu_mul_quantize

pytestmark = pytest.mark.gpu

RULES = {
    "fp8_exact": ScaleRule.fp8_exact(),
    "te": ScaleRule.te(outer="row"),
    "four_over_six_mae": ScaleRule.te(outer="row", four_over_six="mae", bound=256),
    "four_over_six_mse": ScaleRule.te(outer="row", four_over_six="mse", bound=448),
}
ROWS = (1, 2, 7, 16, 17, 64, 127, 128, 129, 130, 4096)


def _data(m: int, k: int, dtype, seed: int = 0):
    """Rows of very different sizes, with outliers, zeros of both signs, subnormal numbers, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (m, k)) * np.exp2(rng.integers(-40, 40, (m, 1)))
    x[:, :: k // 5 + 1] *= 30
    if m > 12:
        x[3] = 0
        x[4] = -0.0
        x[5, 7 % k] = np.inf
        x[6, 5 % k] = np.nan
        x[7] *= 2.0**-90
        x[8, : k // 2] *= 1e-30
        x[9] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 1e-40, -1e-40, 384, 4, 8.25, 7.0], k // 16)
    return jnp.asarray(x.astype(dtype))


def _bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def _assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = np.asarray(x), np.asarray(y)
        nan = np.isnan(y.astype(np.float32))
        assert np.array_equal(np.isnan(x.astype(np.float32)), nan)
        np.testing.assert_array_equal(_bits(x)[~nan], _bits(y)[~nan])


def _reference(x, rule, **kwargs):
    """Where subnormal numbers are flushed, on the CPU, and there eagerly."""
    with jax.default_device(jax.devices("cpu")[0]):
        return nvfp4.quantize(jax.device_put(x, jax.devices("cpu")[0]), rule, implementation="reference", **kwargs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("k", [16, 80, 144, 768, 2048, 12288])
def test_codes_and_scales_are_those_of_the_reference(k, rule, dtype):
    x = _data(257, k, dtype)
    ours = nvfp4.quantize(x, rule, implementation="triton")
    _assert_equal(ours, _reference(x, rule))
    _assert_equal(ours, jax.jit(lambda x: nvfp4.quantize(x, rule, implementation="reference"))(x))
    expanded = nvfp4.quantize_expanded(x, rule, implementation="triton")
    values = np.asarray(expanded.values.astype(jnp.float32))
    np.testing.assert_array_equal(_bits(values), _bits(nvfp4.block_values(ours)))
    _assert_equal(expanded.outer_scale, ours.outer_scale)


def test_every_bfloat16_number_under_every_scale():
    """The shortcut of the kernel for bfloat16, a product with 1 / scale, decides as comparisons with thresholds do."""
    bits = np.arange(0x0080, 0x7F80, dtype=np.uint16)  # all positive normal numbers
    numbers = bits.view(jnp.bfloat16).astype(np.float32)
    blocks = []
    for amax in np.float32([m * 2.0**e for e in range(-3, 9) for m in np.linspace(1, 1.99, 97)]):
        amax = np.float32(amax.astype(jnp.bfloat16))
        near = numbers[(numbers <= amax) & (numbers >= amax / 64)]
        near = near[: len(near) // 15 * 15].reshape(-1, 15)
        blocks.append(np.concatenate([np.full((len(near), 1), amax, np.float32), near], axis=1))
    blocks = np.concatenate(blocks)
    blocks = blocks[: len(blocks) // 7 * 7].reshape(-1, 112)
    x = jnp.asarray(np.concatenate([np.full((len(blocks), 16), 384, np.float32), blocks], axis=1).astype(jnp.bfloat16))
    rule = RULES["fp8_exact"]
    _assert_equal(nvfp4.quantize(x, rule, implementation="triton"), _reference(x, rule))


@pytest.mark.parametrize("k", [80, 768, 2048])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-85])
def test_ties_between_the_candidates(k, scale):
    """Where errors have equal sums, the float32 sums of the reference may still differ: tiny numbers among multiples of 1/4."""
    rng = np.random.default_rng(k)
    x = rng.integers(-24, 25, (4096, k)) / 4
    x[:, ::16] = 6
    tiny = rng.standard_normal(x.shape) * np.exp2(rng.integers(-30, -11, x.shape))
    x = jnp.asarray((np.where(rng.random(x.shape) < 0.3, tiny, x) * scale).astype(jnp.bfloat16))
    rule = RULES["fp8_exact"]
    ours = nvfp4.quantize(x, rule, implementation="triton")
    _assert_equal(ours, _reference(x, rule))
    expanded = nvfp4.quantize_expanded(x, rule, implementation="triton")
    np.testing.assert_array_equal(_bits(expanded.values.astype(jnp.float32)), _bits(nvfp4.block_values(ours)))


@pytest.mark.parametrize("k", [144, 2048])
def test_rows_do_not_depend_on_their_number_or_neighbours(k):
    rule = RULES["fp8_exact"]
    x = _data(4096, k, jnp.bfloat16)
    whole = nvfp4.quantize(x, rule, implementation="triton")
    for m in ROWS:
        start = min(1000, 4096 - m)
        part = nvfp4.quantize(x[start : start + m], rule, implementation="triton")
        _assert_equal(part, jax.tree.map(lambda leaf, s=start, m=m: leaf[s : s + m], whole))


def test_weights_share_an_outer_scale():
    rule = ScaleRule.fp8_exact(outer="matrix")
    x = _data(3 * 48, 80, jnp.float32).reshape(3, 48, 80)
    _assert_equal(nvfp4.quantize(x, rule, implementation="triton"), _reference(x, rule))
    finite = jnp.nan_to_num(x, nan=1.0, posinf=2.0)
    _assert_equal(nvfp4.quantize(finite, rule, implementation="triton"), _reference(finite, rule))


@pytest.mark.parametrize("rule", [ScaleRule.fp8_exact(), ScaleRule.te(outer="row")], ids=["fp8_exact", "te"])
def test_a_given_amax(rule):
    x = _data(40, 144, jnp.bfloat16, seed=3)
    amax = jnp.where(jnp.arange(40) % 2, 0.3, 3.0) * jnp.max(jnp.abs(jnp.nan_to_num(x.astype(jnp.float32))), axis=1)
    _assert_equal(nvfp4.quantize(x, rule, amax=amax, implementation="triton"), _reference(x, rule, amax=amax))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16], ids=lambda d: d.__name__)
def test_expand_is_exact(dtype):
    x = _data(129, 144, jnp.float32)
    q = nvfp4.quantize(x, RULES["fp8_exact"], implementation="triton")
    ours, reference = (nvfp4.expand(q, dtype, implementation=name) for name in ("triton", "reference"))
    _assert_equal(ours, reference)
    other = nvfp4.quantize(x, RULES["four_over_six_mae"], implementation="triton")
    ours, reference = (nvfp4.expand(other, jnp.bfloat16, implementation=name) for name in ("triton", "reference"))
    _assert_equal(ours, reference)
    with pytest.raises(ValueError, match="not fp8_exact"):
        nvfp4.expand(other)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rule", [RULES["four_over_six_mae"], ScaleRule.te(outer="matrix")], ids=["row", "matrix"])
def test_dequantize_rounds_as_the_reference(rule, dtype):
    from pallas_kernels.nvfp4 import triton

    q = nvfp4.quantize(jnp.nan_to_num(_data(129, 144, jnp.float32), posinf=1.0), rule)
    _assert_equal(triton.dequantize(q, dtype), nvfp4.dequantize(q, dtype))


def test_forty_runs():
    x = _data(512, 2048, jnp.bfloat16)
    run = jax.jit(lambda x: nvfp4.quantize(x, RULES["fp8_exact"]))
    first = run(x)
    for _ in range(40):
        _assert_equal(run(x), first)


@pytest.mark.parametrize("k", [16, 80, 768, 2048, 12288])
def test_gate_and_quantise_in_one_kernel(k):
    x = _data(130, 2 * k, jnp.bfloat16)
    fused = silu_mul_quantize(x, RULES["fp8_exact"])
    _assert_equal(fused, nvfp4.quantize_expanded(silu_mul(x), RULES["fp8_exact"]))
    _assert_equal(fused, jax.jit(lambda x: silu_mul_quantize(x, RULES["fp8_exact"], implementation="reference"))(x))


@pytest.mark.parametrize("k", [16, 80, 768, 2048, 4096, 12288])
def test_norm_and_quantise_in_one_kernel(k):
    x, weight = _data(130, k, jnp.bfloat16), _data(1, k, jnp.float32, seed=5)[0]
    fused = rms_norm_quantize(x, weight, RULES["fp8_exact"], eps=1e-6)
    _assert_equal(fused, nvfp4.quantize_expanded(rms_norm(x, weight, eps=1e-6), RULES["fp8_exact"]))
    reference = jax.jit(lambda x: rms_norm_quantize(x, weight, RULES["fp8_exact"], eps=1e-6, implementation="reference"))
    _assert_equal(fused, reference(x))


@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("k", [16, 80, 768, 2048, 4096, 8192, 12288])
def test_add_norm_and_quantise_in_one_kernel(k, keep):
    x, y, weight = _data(130, k, jnp.bfloat16), _data(130, k, jnp.bfloat16, seed=4), _data(1, k, jnp.float32, seed=5)[0]

    def run(x, y, weight, implementation):
        rule = RULES["fp8_exact"]
        return add_rms_norm_quantize(x, y, weight, rule, eps=1e-6, keep=keep, implementation=implementation)

    for each in (y, None):
        total, normed = add_rms_norm(x, each, weight, eps=1e-6, implementation="triton")
        expected = total, normed if keep else None, nvfp4.quantize_expanded(normed, RULES["fp8_exact"])
        fused = run(x, each, weight, "triton")
        _assert_equal(fused, expected)
        _assert_equal(fused, jax.jit(run, static_argnames="implementation")(x, each, weight, implementation="reference"))


def test_rows_that_are_added_normed_and_quantised_do_not_depend_on_their_number_or_neighbours():
    x, y, weight = _data(4096, 2048, jnp.bfloat16), _data(4096, 2048, jnp.bfloat16, seed=4), jnp.linspace(0.5, 2, 2048)
    run = lambda part: add_rms_norm_quantize(x[part], y[part], weight, RULES["fp8_exact"], eps=1e-6, keep=True)  # noqa: E731
    whole = run(slice(None))
    for m in ROWS:
        part = slice(min(1000, 4096 - m), min(1000, 4096 - m) + m)
        _assert_equal(run(part), jax.tree.map(lambda leaf, part=part: leaf[part], whole))
