"""TransformerEngine's NVFP4 rules, in its order of operations, to the bit.

They are needed to read, write and compare with what other stacks quantise. The steps are those of
TransformerEngine's reference quantiser (version 2.20), with three helpers where XLA would otherwise bend
them: divisions that stay divisions, casts to E4M3 and E2M1 by integer work, and squares that are not
  contracted with the sum that follows.

The bits agree with TransformerEngine wherever no subnormal float32 number occurs on the way; largest
magnitudes below 2^-100 and subnormal inputs count as zero here.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import divide, ordered_sum
from pallas_kernels.nvfp4 import array, blocks, formats, stochastic
from pallas_kernels.nvfp4.rules import ScaleRule

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
_ONE_BITS = 127 << 23


def quantize_te(
    x: jax.Array, rule: ScaleRule, key: jax.Array | None, amax: jax.Array | None
) -> "array.Nvfp4Array":
    """`nvfp4.quantize` for these rules; x is float32 [..., M, K] of a shape that was checked.

    * encode = 6 x bound / amax, decode = 1 / encode. The stored outer scale is amax / (6 x bound), which is
      what a reader multiplies by.
    * Plain: block scale = E4M3(block_amax x (encode x 1/6)); code = E2M1(x x 1 / (block scale x decode)),
      saturating.
    * Four over six: block_amax / 6 x encode, and 1.5 times that, which sends the largest number to 4. The
      second wins where its error, absolute or squared, is strictly lower; errors are those of (code x scale)
      x amax / (6 x bound) and are added in the order of the elements, in a 16x16 tile row by row and then
      halves of rows to halves.
    * A block whose scale rounds to zero keeps codes of +-6 where x is not zero, as TransformerEngine's does;
      they dequantise to 0.
    * A negative zero, or a negative number that vanishes, has code 0. All zero: codes 0, block scales 0,
      outer scale 1.
    * Where amax is not finite the outer scale is NaN and all codes are 0.
    """
    x_blocks = blocks.to_blocks(x, rule)
    bits = blocks.magnitude_bits(x_blocks)
    block_max_bits = blocks.block_maximum(bits)
    outer_max_bits = blocks.outer_maximum(block_max_bits, rule, amax)
    finite = outer_max_bits < blocks.INFINITY_BITS
    live = finite & (outer_max_bits >= blocks.SMALLEST_AMAX_BITS)
    magnitude = blocks.float_from_bits(jnp.where(live, bits, 0))
    block_max = blocks.float_from_bits(jnp.where(live, block_max_bits, 0))
    outer_max = blocks.float_from_bits(jnp.where(live, outer_max_bits, _ONE_BITS))

    largest = jnp.float32(formats.E2M1_MAX * rule.bound)
    encode = divide(largest, outer_max)
    decode = divide(jnp.float32(1.0), encode)
    if rule.four_over_six is None:
        byte = formats.float32_to_e4m3(block_max * (encode * jnp.float32(1 / 6)))
        scaled = _scaled(magnitude, byte, decode)
        if key is None:
            codes = formats.float32_to_e2m1_magnitude(scaled)
        else:
            codes = stochastic.stochastic_magnitudes(scaled, jnp.float32(1.0), key)
    else:
        base = divide(block_max, jnp.float32(formats.E2M1_MAX)) * encode
        candidates = [formats.float32_to_e4m3(base * maps_to) for maps_to in (1.0, 1.5)]
        error_six, error_four = (
            _error(magnitude, byte, decode, outer_max, largest, squared=rule.four_over_six == "mse")
            for byte in candidates
        )
        byte = jnp.where(error_four < error_six, candidates[1], candidates[0])
        scaled = _scaled(magnitude, byte, decode)
        codes = formats.float32_to_e2m1_magnitude(scaled)
    codes = blocks.signed_codes(codes, (formats.float32_bits(x_blocks) < 0) & (scaled > 0))

    byte = jnp.broadcast_to(byte, (*x_blocks.shape[:-1], 1))
    outer_scale = jnp.where(live, divide(outer_max, largest), jnp.where(finite, 1.0, jnp.nan))
    return array.Nvfp4Array(
        codes=array.pack_codes(blocks.from_blocks(codes, x.shape)),
        block_scale=formats.bytes_to_e4m3(blocks.from_blocks(byte, x.shape)),
        outer_scale=outer_scale.astype(jnp.float32).reshape(blocks.outer_scale_shape(x.shape, rule)),
    )


def _scaled(magnitude, byte, decode):
    """|x| in units of its block's scales, clipped to 6. A zero scale inverts to the largest float32."""
    encode_block = divide(jnp.float32(1.0), formats.e4m3_to_float32(byte) * decode)
    return jnp.minimum(magnitude * jnp.minimum(encode_block, _FLOAT32_MAX), formats.E2M1_MAX)


def _error(magnitude, byte, decode, outer_max, largest, *, squared: bool):
    """Sum of each block's errors under one candidate: [..., M / r, r, Q, 16] -> [..., M / r, 1, Q, 1]."""
    codes = formats.float32_to_e2m1_magnitude(_scaled(magnitude, byte, decode))
    value = formats.e2m1_to_float32(codes.astype(jnp.uint8)) * formats.e4m3_to_float32(byte)
    error = jnp.abs(divide(value * outer_max, largest) - magnitude)
    if squared:
        square = error * error
        # The comparison keeps the square out of a multiply-add. An overflow must stay infinite: two of them
        # are a tie.
        error = jnp.where(square == square, square, 0.0)
    row_error = error[..., 0]
    for i in range(1, formats.BLOCK):
        row_error = row_error + error[..., i]
    return ordered_sum(row_error, axis=-2)[..., None, :, None]
