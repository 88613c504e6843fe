"""NVFP4 folders that other tools wrote: scales of all of E4M3, divisors, a quantised cache."""

import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from nvfp4_models import LAYOUTS, assert_same_bits

import minite_jax as mt
from minite_jax.checkpoint import CheckpointError
from minite_jax.checkpoint.nvfp4_files import layouts, packing
from minite_jax.checkpoint.nvfp4_files.filling import is_fp8_exact
from pallas_kernels import nvfp4, operands
from pallas_kernels.nvfp4.expanded import ExpandedArray


def test_scales_of_all_of_e4m3_are_kept_and_multiplied_as_bfloat16(policies, folder, edit_json):
    policy = policies("nvfp4_te")
    out = folder("modelopt", "nvfp4_te")
    assert mt.load_nvfp4(out).recipe.name == "nvfp4_te"
    edit_json(out / "config.json", minite_jax=None)  # as another tool would have written it
    read = mt.load_nvfp4(out)
    assert read.recipe == mt.recipe("nvfp4_46", matmuls=read.recipe.matmuls)
    assert set(read.recipe.matmuls) == set(policy.recipe.matmuls)
    assert_same_bits(read.weights, policy.weights)
    weight = read.weights["layers"][0]["qkv"]
    assert not weight.fp8_exact
    rows = ExpandedArray(jnp.zeros((1, 32), jnp.float8_e4m3fn), jnp.ones(1))
    assert operands.product_dtype(rows, weight) == jnp.bfloat16
    chosen = mt.load_nvfp4(out, mt.recipe("nvfp4"))  # rows by our rule beside weights by theirs
    assert chosen.recipe == mt.recipe("nvfp4") and not chosen.weights["layers"][0]["qkv"].fp8_exact
    assert_same_bits(chosen.weights, policy.weights)


def test_scales_of_the_fp8_exact_set_are_found(policies, folder, edit_json):
    out = folder("modelopt")
    edit_json(out / "config.json", minite_jax=None)
    read = mt.load_nvfp4(out)
    assert read.recipe.name == "nvfp4"
    assert_same_bits(read.weights, policies("nvfp4").weights)
    x = ExpandedArray(jnp.zeros((1, 32), jnp.float8_e4m3fn), jnp.ones(1))
    assert operands.product_dtype(x, read.weights["layers"][0]["qkv"]) == jnp.float8_e4m3fn


def test_membership_of_the_set_is_that_of_the_kernels():
    """Every scale, with codes up to 4 and up to 6."""
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    for byte, scale in enumerate(scales):
        for code in (0x06, 0x07, 0x60, 0x70, 0xE0, 0xF0):
            codes = np.zeros((1, 8), np.uint8)
            codes[0, 3] = code
            block_scale = np.full((1, 1), scale)
            exact = is_fp8_exact(codes, block_scale)
            top = 4 if code in (0x06, 0x60, 0xE0) else 6
            in_set = float(scale) in nvfp4.FP8_EXACT_SCALES
            assert exact is (in_set or top == 4 and float(scale) in nvfp4.FP8_EXACT_SCALES_UP_TO_4), (byte, code)


def test_divisors_that_are_no_reciprocals(policies, folder, tmp_path):
    with pytest.raises(CheckpointError, match="parameter layers.* no float32 divisor's reciprocal.* write the modelopt layout"):
        folder("compressed-tensors", "nvfp4_te")
    assert os.listdir(tmp_path) == []
    exact = np.exp2(np.arange(-100, 100), dtype=np.float32)
    np.testing.assert_array_equal(layouts.COMPRESSED.to_file(exact, ""), 1 / exact)
    divisors = np.float32(2688) / np.linspace(0.01, 3, 1000, dtype=np.float32)
    factors = layouts.COMPRESSED.from_file(divisors)  # what a reader multiplies by comes back, whatever divisor says it
    np.testing.assert_array_equal(layouts.COMPRESSED.from_file(layouts.COMPRESSED.to_file(factors, "")), factors)


def test_both_layouts_of_one_matrix_are_the_same_numbers(folder, contents, rewrite, edit_json):
    """H05, as other tools write it: 0.5, 1, -6, 2 are the bytes 0x21 0x4F; amax / 2688 multiplies, 2688 / amax divides."""
    module, amax = "model.layers.0.self_attn.o_proj", np.float32(1.5)
    read = {}
    for layout in LAYOUTS:
        path = folder(layout) / "model.safetensors"
        tensors, names = contents(path), layouts.LAYOUTS[layout].suffixes
        codes, scales, outer = (f"{module}.{names[part]}" for part in ("codes", "block_scale", "outer_scale"))
        number = np.float32(2688) / amax if layout == "compressed-tensors" else amax / np.float32(2688)
        tensors[outer] = ("F32", tensors[outer][1], number.tobytes())
        tensors[codes] = ("U8", tensors[codes][1], bytes([0x21, 0x4F]) + tensors[codes][2][2:])
        tensors[scales] = ("F8_E4M3", tensors[scales][1], bytes([0x38]) + tensors[scales][2][1:])  # 1.0
        rewrite(path, tensors)
        edit_json(path.parent / "config.json", minite_jax=None)
        read[layout] = mt.load_nvfp4(path.parent).weights["layers"][0]["o"]
    assert_same_bits(*read.values())
    first = np.asarray(packing._dequantize(read["modelopt"]))[0, :4]
    np.testing.assert_array_equal(first, np.array([0.5, 1, -6, 2], np.float32) * np.float32(amax / np.float32(2688)))


def test_scales_of_a_quantised_cache_are_left_alone(policies, folder, contents, rewrite):
    path = folder("modelopt") / "model.safetensors"
    one = ("F32", (), np.float32(1).tobytes())
    rewrite(path, contents(path) | {f"model.layers.0.self_attn.{part}_proj.{part}_scale": one for part in "kv"})
    assert_same_bits(mt.load_nvfp4(path.parent), policies("nvfp4"))
