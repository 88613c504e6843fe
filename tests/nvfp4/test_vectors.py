"""Equal bits with independent implementations: TransformerEngine's quantiser, and a plain one of `fp8_exact`.

The data were made by TransformerEngine's reference quantiser (2.20) and by an implementation of our own rule that
was checked against a float64 one.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4

DATA = pathlib.Path(__file__).parents[1] / "data"
TE = dict(np.load(DATA / "nvfp4_quantize.npz"))
FP8_EXACT = dict(np.load(DATA / "fp8_exact.npz"))

TE_RULES = {
    "tensor_1x16": nvfp4.ScaleRule.te("matrix"),
    "row_1x16": nvfp4.ScaleRule.te("row"),
    "tensor_16x16": nvfp4.ScaleRule.te("matrix", block=(16, 16)),
    "tensor_1x16_46_mae_256": nvfp4.ScaleRule.te("matrix", four_over_six="mae", bound=256),
    "row_1x16_46_mae_256": nvfp4.ScaleRule.te("row", four_over_six="mae", bound=256),
    "row_1x16_46_mse_448": nvfp4.ScaleRule.te("row", four_over_six="mse"),
    "tensor_16x16_46_mae_448": nvfp4.ScaleRule.te("matrix", block=(16, 16), four_over_six="mae"),
}


def inputs_of(data):
    return sorted({name.split("/")[0] for name in data})


def assert_same(q, scales, codes, name):
    np.testing.assert_array_equal(np.asarray(q.block_scale).view(np.uint8), scales, err_msg=name)
    np.testing.assert_array_equal(np.asarray(q.codes), codes, err_msg=name)


@pytest.mark.parametrize("mode", TE_RULES)
def test_transformer_engine(shared, mode):
    rule = TE_RULES[mode]
    for name in inputs_of(TE):
        q = shared.quantize(TE[f"{name}/x"], rule)
        assert_same(q, TE[f"{name}/{mode}/scales"], TE[f"{name}/{mode}/codes"], name)
        amax = TE[f"{name}/{mode}/amax"]
        outer = np.where(amax == 0, np.float32(1), amax / np.float32(6 * rule.bound))
        np.testing.assert_array_equal(np.asarray(q.outer_scale).reshape(-1), outer, err_msg=name)


@pytest.mark.slow  # op by op, each operation compiles alone
@pytest.mark.parametrize("mode", TE_RULES)
def test_transformer_engine_eager(mode):
    # All inputs of one shape go in one stack.
    names = [name for name in inputs_of(TE) if TE[f"{name}/x"].shape == (32, 64)]
    stack = {array: np.stack([TE[f"{name}/{array}"] for name in names]) for array in
             ("x", f"{mode}/scales", f"{mode}/codes")}  # fmt: skip
    q = nvfp4.quantize(jnp.asarray(stack["x"]), TE_RULES[mode])
    assert_same(q, stack[f"{mode}/scales"], stack[f"{mode}/codes"], str(names))


def test_transformer_engine_hadamard(shared):
    transform = jax.jit(nvfp4.random_hadamard)
    for name in inputs_of(TE):
        x_t = transform(jnp.asarray(TE[f"{name}/x"].T))
        q = shared.quantize(x_t, nvfp4.ScaleRule.te("matrix"))
        expected = f"{name}/rht_columnwise_bf16"
        assert np.abs(np.asarray(x_t, np.float32)).max() == TE[f"{expected}/amax"][0], name
        assert_same(q, TE[f"{expected}/scales"], TE[f"{expected}/codes"], name)


@pytest.mark.parametrize("name", inputs_of(FP8_EXACT))
def test_fp8_exact(shared, name):
    q = shared.quantize(FP8_EXACT[f"{name}/x"], nvfp4.ScaleRule.fp8_exact())
    np.testing.assert_array_equal(np.asarray(q.outer_scale), FP8_EXACT[f"{name}/outer"])
    assert_same(q, FP8_EXACT[f"{name}/scales"], FP8_EXACT[f"{name}/codes"], name)


@pytest.mark.slow
def test_fp8_exact_eager():
    names = [name for name in inputs_of(FP8_EXACT) if FP8_EXACT[f"{name}/x"].shape == (32, 64)]
    stack = {array: np.concatenate([FP8_EXACT[f"{name}/{array}"] for name in names])
             for array in ("x", "scales", "codes", "outer")}  # fmt: skip
    q = nvfp4.quantize(jnp.asarray(stack["x"]), nvfp4.ScaleRule.fp8_exact())
    np.testing.assert_array_equal(np.asarray(q.outer_scale), stack["outer"])
    assert_same(q, stack["scales"], stack["codes"], str(names))
    assert nvfp4.is_fp8_exact(q)


def test_bfloat16_input_is_read_exactly(shared):
    x = jnp.asarray(FP8_EXACT["bf16/x"]).astype(jnp.bfloat16)
    q = shared.quantize(x, nvfp4.ScaleRule.fp8_exact())
    np.testing.assert_array_equal(np.asarray(q.codes), FP8_EXACT["bf16/codes"])


def test_transformer_engine_scales_are_not_fp8_exact(shared):
    q = shared.quantize(TE["gauss/x"], TE_RULES["row_1x16"])
    assert not nvfp4.is_fp8_exact(q)
