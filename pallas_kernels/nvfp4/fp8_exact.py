"""The `fp8_exact` rule: NVFP4 whose products code x scale are E4M3 numbers, quantised by steps that no
compiler can bend.

Block scales come from {1, 1.25, 1.5} x 2^e, e = -5..5, and 64; 80 and 96 where the block's largest code is 4.
For these, code x scale is an E4M3 number for every code, so a GPU without FP4 units can multiply such tensors
on its fp8 units, and one with FP4 units reads them as the ordinary NVFP4 tensors that they are.

Every step is a comparison, an addition in a fixed order, a multiplication by a power of two, or integer work
on bits. There is no division, no multiply-add that rounds, and no narrowing cast, so the result is the same
bits eagerly, under jit, inside a larger program, and on every kind of device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from pallas_kernels.numerics import exact_exp2
from pallas_kernels.nvfp4 import array, blocks, formats, stochastic
from pallas_kernels.nvfp4.rules import ScaleRule

FP8_EXACT_SCALES = (*(m * 2.0**e for e in range(-5, 6) for m in (1.0, 1.25, 1.5)), 64.0)
# Scales for blocks that use no code above 4: 6 x 80 and 6 x 96 would exceed 448.
FP8_EXACT_SCALES_UP_TO_4 = (80.0, 96.0)

_FRACTION_MASK = (1 << 23) - 1
_SMALLEST_SCALE_BYTE = 0x10  # 2^-5
_LARGEST_SCALE_BYTE = 0x68  # 64
_LARGEST_SCALE_BYTE_UP_TO_4 = 0x6C  # 96


def _fraction_bits(significand: float) -> int:
    return round((significand - 1.0) * (1 << 23))


def _scale_byte(exponent, fraction, bottom: int, steps, largest: int, *, inclusive: bool):
    """The E4M3 byte of a block scale, from the exponent and the fraction bits of the block's largest
    magnitude.

    Within one binade of that magnitude the scale climbs through three neighbours in the set. As bytes, 1 ->
    1.25 -> 1.5 -> 2 are steps of 2, 2 and 4.

    Args:
      exponent, fraction: int32, floor(log2) of the magnitude and its 23 fraction bits.
      bottom: byte of the scale at the lower end of the binade whose exponent is 0.
      steps: (significand, step) pairs: from this significand on (`inclusive`), or above it, the byte is
        larger by `step`.
      largest: largest byte allowed.
    """
    byte = (exponent << 3) + bottom
    for significand, step in steps:
        threshold = _fraction_bits(significand)
        passed = fraction >= threshold if inclusive else fraction > threshold
        byte += jnp.where(passed, step, 0)
    return jnp.clip(byte, _SMALLEST_SCALE_BYTE, largest)


def _nearest_scale_to_sixth(exponent, fraction):
    """Nearest member of the set to amax / 6, ties to the larger: steps at 6 x 1.125, 1.375 and 1.75."""
    steps = ((8.25 / 8, 2), (10.5 / 8, 4), (6.75 / 4, 2))
    return _scale_byte(exponent, fraction, (4 << 3) + 2, steps, _LARGEST_SCALE_BYTE, inclusive=True)


def _nearest_scale_to_quarter(exponent, fraction):
    """Nearest member of the larger set to amax / 4, ties to the larger: steps at 4 x 1.125, 1.375, 1.75."""
    steps = ((4.5 / 4, 2), (5.5 / 4, 2), (7.0 / 4, 4))
    return _scale_byte(exponent, fraction, 5 << 3, steps, _LARGEST_SCALE_BYTE_UP_TO_4, inclusive=True)


def _smallest_covering_scale(exponent, fraction):
    """Smallest member of the set with 6 x scale >= amax: steps above 6 x 1, 6 x 1.25 and 6 x 1.5."""
    steps = ((9.0 / 8, 4), (6.0 / 4, 2), (7.5 / 4, 2))
    return _scale_byte(exponent, fraction, (4 << 3) + 4, steps, _LARGEST_SCALE_BYTE, inclusive=False)


def _scale_value(byte):
    """E4M3 bytes of normal numbers as float32."""
    return blocks.float_from_bits((byte << 20) + ((127 - 7) << 23))


def _error(magnitude, scale, thresholds: int):
    """Sum over each block of | |y| - code x scale |, with codes of at most `thresholds` steps up."""
    value = jnp.zeros(jnp.broadcast_shapes(magnitude.shape, scale.shape), jnp.float32)
    for i in range(thresholds):
        threshold = formats.E2M1_MIDPOINTS[i] * scale
        passed = magnitude >= threshold if i % 2 else magnitude > threshold
        value = jnp.where(passed, formats.E2M1_VALUES[i + 1], value)
    # The product has at most 6 significant bits, so a multiply-add rounds as the subtraction alone does.
    return blocks.block_sum(jnp.abs(magnitude - value * scale))


def quantize_fp8_exact(
    x: jax.Array, rule: ScaleRule, key: jax.Array | None, amax: jax.Array | None
) -> "array.Nvfp4Array":
    """`nvfp4.quantize` for this rule; x is float32 [..., M, K] of a shape that was checked.

    * Outer scale: the smallest power of two with amax <= 384 x outer; y = x / outer. Where amax < 2^-100:
      outer 1, and all zero.
    * Candidates: the scale nearest to block_amax / 6, with codes up to 6, and the one nearest to block_amax /
      4, with codes up to 4; ties to the larger. Codes to nearest even. The second wins where its sum of
      absolute errors is strictly lower.
    * A smaller block, a zero one too, takes the smallest scale, so that no scale is zero. The sign of a zero
      is kept.
    * Stochastic rounding (`key`): one candidate, the smallest scale with 6 x scale >= block_amax, so that
      nothing saturates.
    * Where amax is not finite the outer scale is NaN and all codes are 0.
    """
    x_blocks = blocks.to_blocks(x, rule)
    bits = blocks.magnitude_bits(x_blocks)
    block_max = blocks.block_maximum(bits)
    outer_max = blocks.outer_maximum(block_max, rule, amax)
    finite = outer_max < blocks.INFINITY_BITS
    live = finite & (outer_max >= blocks.SMALLEST_AMAX_BITS)

    # amax = significand x 2^e: 384 = 1.5 x 2^8, so outer is 2^(e - 8), or twice that for a significand above
    # 1.5.
    above = ((outer_max & _FRACTION_MASK) > _fraction_bits(1.5)).astype(jnp.int32)
    outer_exponent = jnp.where(live, (outer_max >> 23) - 127 - 8 + above, 0)
    magnitude = blocks.float_from_bits(jnp.where(live, bits, 0)) * exact_exp2(-outer_exponent)

    # A dead block's exponent is far below the smallest scale's, whatever it holds.
    exponent = jnp.where(live, (block_max >> 23) - 127 - outer_exponent, -127)
    fraction = block_max & _FRACTION_MASK
    if key is None:
        byte, codes = _nearest(magnitude, exponent, fraction)
    else:
        byte = _smallest_covering_scale(exponent, fraction)
        codes = stochastic.stochastic_magnitudes(magnitude, _scale_value(byte), key)
    codes = lax.optimization_barrier(blocks.signed_codes(codes, live & (formats.float32_bits(x_blocks) < 0)))

    byte = jnp.broadcast_to(byte, (*x_blocks.shape[:-1], 1)).astype(jnp.uint8)
    outer_scale = jnp.where(finite, exact_exp2(outer_exponent), jnp.float32(jnp.nan))
    return array.Nvfp4Array(
        codes=array.pack_codes(blocks.from_blocks(codes, x.shape)),
        block_scale=formats.bytes_to_e4m3(blocks.from_blocks(byte, x.shape)),
        outer_scale=outer_scale.reshape(blocks.outer_scale_shape(x.shape, rule)),
        fp8_exact=True,
    )


def _nearest(magnitude, exponent, fraction):
    """Scale bytes and code magnitudes of the better of the two candidates."""
    byte_six = _nearest_scale_to_sixth(exponent, fraction)
    byte_four = _nearest_scale_to_quarter(exponent, fraction)
    # The barriers here and above change no bit. They keep XLA from working out again, for every element and
    # every use, what was worked out once: 3840 x 64 on one CPU core take 1.5 ms and not 3 with jax 0.11.
    magnitude, scale_six, scale_four = lax.optimization_barrier(
        (magnitude, _scale_value(byte_six), _scale_value(byte_four))
    )
    error_six, error_four = lax.optimization_barrier(
        (_error(magnitude, scale_six, 7), _error(magnitude, scale_four, 6))
    )
    four_wins = error_four < error_six
    byte = jnp.where(four_wins, byte_four, byte_six)
    scale, largest_code = lax.optimization_barrier((_scale_value(byte), jnp.where(four_wins, 6, 7)))
    codes = jnp.minimum(formats.float32_to_e2m1_magnitude(magnitude, scale), largest_code)
    return byte, codes


def is_fp8_exact(q: "array.Nvfp4Array") -> Bool[Array, ""]:
    """Whether every code x block scale in `q` is an E4M3 number because the scales keep to this rule's set.

    That is: each block scale is in `FP8_EXACT_SCALES`, or in `FP8_EXACT_SCALES_UP_TO_4` where no code of its
    block exceeds 4. A single bool, False if any block breaks the rule.
    """
    scale = array.block_scale_values(q)
    magnitudes = (array.unpack_codes(q.codes) & 7).reshape(*scale.shape, formats.BLOCK)
    up_to_four = (magnitudes <= 6).all(axis=-1)
    allowed = jnp.isin(scale, jnp.array(FP8_EXACT_SCALES))
    allowed_up_to_four = jnp.isin(scale, jnp.array(FP8_EXACT_SCALES_UP_TO_4))
    return (allowed | (allowed_up_to_four & up_to_four)).all()
