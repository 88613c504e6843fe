"""The quantising kernels in Triton's interpreter against the reference, and compiled for GPUs that are not here."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

KS = (80, 192)  # idle lanes; three tiles, in two programs
CASES = [f"{kind}-{k}" for kind in ("packed", "expanded") for k in KS] + [
    "given-80", "silu_mul-192", "rms_norm-80", "rms_norm_keep-80", "add_rms_norm-80", "add_rms_norm_keep-80",
    "float32-80", "te-80", "four_over_six-80", "expand-80", "dequantize-80",
]  # fmt: skip

# The two candidates' errors have equal sums, but not the float32 sums of the reference.
TIE = [2.0**-23, 2.5, 5.75, 3.75, 6, 3, 4.25, 5.75, 1.75, 4.25, 6, 1.25, 3.5, 1.75, 0.75, 2.0**-23]


def _data(m, k, dtype):
    """Rows of very different sizes, with zeros of both signs, ties, subnormal numbers, infinity and NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, (m, k)) * np.exp2(rng.integers(-20, 20, (m, 1)))
    x[1], x[2, :9], x[3] = 0, 1e-39, x[3] * 1e-30
    x[4] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, 1e-40, -1e-40, 384, 4, 8.25, 7], k // 16)
    x[5, :16] = -0.0
    x[6, 7], x[7, 8] = np.inf, np.nan
    x[8] = np.tile(TIE, k // 16)
    return jnp.asarray(x.astype(dtype))


def _packed(q):
    return [np.asarray(q.codes), np.asarray(q.outer_scale), np.asarray(q.block_scale).view(np.uint8)]


def _expanded(q):
    from pallas_kernels import nvfp4

    values = nvfp4.expand(q)
    return [np.asarray(values.values), np.asarray(values.outer_scale)]


def _interpreted():
    from pallas_kernels import nvfp4
    from pallas_kernels.nvfp4 import ScaleRule, triton, triton_quantize
    from pallas_kernels.rms_norm import add_rms_norm
    from pallas_kernels.rms_norm import triton_quantize as norm
    from pallas_kernels.silu_mul import silu_mul
    from pallas_kernels.silu_mul import triton_quantize as gate

    rule, none, m = ScaleRule.fp8_exact(), np.zeros(1, np.int32), 9
    for k in KS:
        x = _data(m, k, jnp.bfloat16)
        q = nvfp4.quantize(x, rule)
        yield f"packed-{k}", triton_quantize.quantize_launch(m, k, given_rows=0, expanded=False), (x, none, m), _packed(q)
        yield f"expanded-{k}", triton_quantize.quantize_launch(m, k, given_rows=0, expanded=True), (x, none, m), _expanded(q)
    k, pair = KS[1], jnp.concatenate([x, x[::-1]], axis=1)
    expected = _packed(nvfp4.quantize(silu_mul(pair), rule))
    yield f"silu_mul-{k}", gate.silu_mul_quantize_launch(m, k, expanded=False), (pair, m), expected
    k, x = 80, _data(m, 80, jnp.bfloat16)
    amax = jnp.where(jnp.arange(m) % 2, 0.3, 3.0) * jnp.max(jnp.abs(jnp.nan_to_num(x.astype(jnp.float32), posinf=1)), axis=1)
    given, given_rows = triton._given_bits(x, rule, amax)
    expected = _packed(nvfp4.quantize(x, rule, amax=amax))
    yield f"given-{k}", triton_quantize.quantize_launch(m, k, given_rows=given_rows, expanded=False), (x, given, m), expected
    weight = jnp.linspace(0.5, 2, k)
    for add, keep in itertools.product((False, True), (False, True)):
        y = x[::-1].at[4].set(1) if add else None  # a CPU flushes sums that are subnormal
        total, normed = add_rms_norm(x, y, weight, eps=1e-6)
        expected = [np.asarray(total)] * add + [np.asarray(normed)] * keep + _packed(nvfp4.quantize(normed, rule))
        launch = norm.rms_norm_quantize_launch(m, k, 1e-6, expanded=False, add=add, keep=keep)
        inputs = (x, *([y] * add), norm.streams(weight), m)
        yield f"{'add_' * add}rms_norm{'_keep' * keep}-{k}", launch, inputs, expected
    others = {
        "float32": rule,
        "te": ScaleRule.te(outer="row"),
        "four_over_six": ScaleRule.te(outer="row", four_over_six="mse", bound=256),
    }
    for name, each in others.items():
        x = _data(m, k, jnp.float32)
        q = nvfp4.quantize(x, each)
        yield f"{name}-{k}", triton.quantize_launch(m, k, each, given_rows=0), (x, none, m), _packed(q)
    q = nvfp4.quantize(jnp.nan_to_num(x, posinf=1), each)
    inputs = q.codes, np.asarray(q.block_scale).view(np.uint8), q.outer_scale, m * k // 16
    launch = triton.expand_launch(m * k // 16, (m, k), jnp.float32)
    yield f"expand-{k}", launch, inputs, [np.asarray(nvfp4.block_values(q))]
    launch = triton.expand_launch(m * k // 16, (m, k), jnp.float32, sharing=k // 16)
    yield f"dequantize-{k}", launch, inputs, [np.asarray(nvfp4.dequantize(q))]


def _compiled():
    from pallas_kernels.nvfp4 import triton_quantize
    from pallas_kernels.rms_norm import triton_quantize as norm

    array, m, k = jax.ShapeDtypeStruct, 8192, 2048
    launch = triton_quantize.quantize_launch(m, k, given_rows=0, expanded=True)
    x = array((m, k), jnp.bfloat16)
    yield "quantize", launch, (x, array((1,), jnp.int32), m)
    launch = norm.rms_norm_quantize_launch(m, k, 1e-6, expanded=True, add=True, keep=True)
    yield "add_rms_norm_keep", launch, (x, x, array((4, k // 4), jnp.float32), m)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_references(child, case):
    results = child("interpret")[case]
    assert results == [0] * len(results)


@pytest.mark.parametrize("kernel", ["quantize", "add_rms_norm_keep"])
def test_compiled(child, kernel):
    for found in child("compile")[kernel].values():
        assert found["atomics"] == 0
        assert found["wide_loads"] > 0  # 16 bytes a lane


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
