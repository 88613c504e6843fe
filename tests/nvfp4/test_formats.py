"""The two small formats, their packing, and the arithmetic of `fp8_exact`: all codes, all bytes."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import formats

MAGNITUDES = np.array(nvfp4.E2M1_VALUES[:8], np.float32)


def test_all_e4m3_bytes_decode():
    every_byte = np.arange(256, dtype=np.uint8)
    decoded = np.asarray(formats.e4m3_to_float32(jnp.asarray(every_byte)))
    expected = every_byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)  # NaN equals NaN here
    np.testing.assert_array_equal(np.signbit(decoded[expected == 0]), [False, True])
    for byte, value in {0: 0.0, 1: 2.0**-9, 7: 0.013671875, 8: 2.0**-6, 0x38: 1.0, 0x7E: 448.0}.items():
        assert decoded[byte] == value
    assert np.isnan(decoded[[0x7F, 0xFF]]).all()


def test_e4m3_rounds_to_nearest_even_and_saturates():
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    rounded = np.asarray(formats.float32_to_e4m3(jnp.asarray(x)))
    np.testing.assert_array_equal(rounded, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    # A cast gives NaN above 464; a scale must saturate.
    above = jnp.asarray([448.0, 464.0, 465.0, 1e4, 3e38], jnp.float32)
    np.testing.assert_array_equal(np.asarray(formats.float32_to_e4m3(above)), 0x7E)


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 1.25, 48.0, 0.40625])
def test_e2m1_rounds_to_nearest_even(scale):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.concatenate([ties, [0.2500001, 4.999, 5.001, 7.0, 100.0]]).astype(np.float32)
    expected = [0, 1, 1, 2, 2, 4, 4, 0.5, 4, 6, 6, 6]
    index = formats.float32_to_e2m1_magnitude(jnp.asarray(x * np.float32(scale)), scale)
    np.testing.assert_array_equal(MAGNITUDES[np.asarray(index)], expected)


def test_e2m1_agrees_with_the_cast_of_ml_dtypes():
    x = np.random.default_rng(0).uniform(0, 7, 4096).astype(np.float32)
    index = np.asarray(formats.float32_to_e2m1_magnitude(jnp.asarray(x)))
    np.testing.assert_array_equal(MAGNITUDES[index], x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_e2m1_codes_decode():
    decoded = np.asarray(formats.e2m1_to_float32(jnp.arange(16, dtype=jnp.uint8)))
    np.testing.assert_array_equal(decoded, np.float32(nvfp4.E2M1_VALUES))
    np.testing.assert_array_equal(np.signbit(decoded), np.arange(16) >= 8)


def test_first_element_is_in_the_low_nibble():
    codes = jnp.asarray([1, 2, 15, 4], jnp.uint8)  # 0.5, 1, -6, 2
    packed = nvfp4.pack_codes(codes)
    np.testing.assert_array_equal(np.asarray(packed), [0x21, 0x4F])
    np.testing.assert_array_equal(np.asarray(nvfp4.unpack_codes(packed)), np.asarray(codes))


def test_odd_number_of_codes_cannot_be_packed():
    with pytest.raises(ValueError, match="must be even"):
        nvfp4.pack_codes(jnp.zeros((2, 3), jnp.uint8))


def is_e4m3(x):
    return np.array_equal(x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), x)


@pytest.mark.parametrize("scale", nvfp4.FP8_EXACT_SCALES)
def test_code_times_scale_is_an_e4m3_number(scale):
    assert is_e4m3(MAGNITUDES * np.float32(scale))
    assert is_e4m3(np.float32([scale]))


def test_the_set_has_34_scales_and_no_others_work():
    assert len(set(nvfp4.FP8_EXACT_SCALES)) == 34
    all_scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    in_range = all_scales[(all_scales >= 2.0**-5) & (all_scales <= 448 / 6)]
    working = [s for s in in_range if is_e4m3(MAGNITUDES * s)]
    assert working == list(nvfp4.FP8_EXACT_SCALES)
    assert not is_e4m3(MAGNITUDES * np.float32(1.75))


@pytest.mark.parametrize("scale", nvfp4.FP8_EXACT_SCALES_UP_TO_4)
def test_the_two_largest_scales_need_codes_of_at_most_4(scale):
    assert is_e4m3(MAGNITUDES[:7] * np.float32(scale))
    assert not is_e4m3(MAGNITUDES[7:] * np.float32(scale))


@pytest.mark.parametrize(("scale", "largest", "allowed"), [
    (64.0, 6.0, True), (80.0, 4.0, True), (80.0, 6.0, False), (96.0, 4.0, True), (112.0, 4.0, False),
    (1.75, 1.0, False), (0.0, 0.0, False), (2.0**-6, 1.0, False),
])  # fmt: skip
def test_is_fp8_exact_looks_at_scales_and_codes(scale, largest, allowed):
    codes = jnp.zeros((2, 16), jnp.uint8).at[1, 3].set(8 + list(nvfp4.E2M1_VALUES).index(largest))
    q = nvfp4.Nvfp4Array(nvfp4.pack_codes(codes), jnp.asarray([[1.0], [scale]], jnp.float8_e4m3fn), jnp.ones(2, jnp.float32))
    assert bool(nvfp4.is_fp8_exact(q)) == allowed
