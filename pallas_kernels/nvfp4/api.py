"""Quantise to NVFP4 and back."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, gpu, numerics
from pallas_kernels.nvfp4 import formats
from pallas_kernels.nvfp4.array import Nvfp4Array, block_scale_values, unpack_codes
from pallas_kernels.nvfp4.blocks import outer_scale_shape
from pallas_kernels.nvfp4.expanded import ExpandedArray, check_expandable, expand_reference
from pallas_kernels.nvfp4.fp8_exact import quantize_fp8_exact
from pallas_kernels.nvfp4.rules import ScaleRule
from pallas_kernels.nvfp4.te import quantize_te


def quantize(
    x: Float[Array, "..."],
    rule: ScaleRule,
    *,
    key: jax.Array | None = None,
    amax: Float[Array, "..."] | None = None,
    implementation: str | None = None,
) -> Nvfp4Array:
    """Quantises to NVFP4 along the last axis.

    The bits of the result depend on x and the rule alone: they are the same eagerly, under jit, inside a
    gradient, and for a row alone or in a batch (with one outer scale per row). Gradients do not flow through:
    put a straight-through rule around.

    Args:
      x: float32 or bfloat16 [..., M, K], K a multiple of 16; M too where the rule has 16x16 blocks. Subnormal
        numbers count as zero, and so does a row (or matrix) whose largest magnitude is below 2^-100. Infinity
        or NaN makes the outer scale of its row (or matrix) NaN, and no other.
      rule: how scales are chosen; static.
      key: a JAX random key for stochastic rounding of the codes; None rounds to nearest even. With
        `fp8_exact` no element saturates, so the rounding is unbiased. With "te" the scales are those of
        nearest rounding, and an element above 6 x its scale saturates, as in TransformerEngine.
      amax: float32 [..., M] or [...] (as the rule's outer scale): use these largest magnitudes in place of
        x's own, for a matrix of which x is one shard. Larger elements saturate.
      implementation: see `pallas_kernels.dispatch.resolve`. The kernels round to nearest in blocks of 1x16; stochastic rounding
        and 16x16 blocks have the reference only.

    Raises:
      ValueError: a shape or dtype that the format cannot hold, or `key` with `four_over_six`.
    """
    _check(x, rule, key, amax)
    x = lax.stop_gradient(x)
    if _resolve("quantize", rule, key, implementation) == "triton":
        from pallas_kernels.nvfp4 import triton

        return triton.quantize(x, rule, amax)
    x = x.astype(jnp.float32)
    if rule.family == "fp8_exact":
        return quantize_fp8_exact(x, rule, key, amax)
    return quantize_te(x, rule, key, amax)


def _resolve(op: str, rule: ScaleRule, key, implementation: str | None) -> str:
    """The kernels do not do everything: say which case runs as what."""
    if key is not None:
        return dispatch.resolve(f"{op}, stochastic rounding", implementation, ("reference",))
    if rule.block != (1, 16):
        return dispatch.resolve(f"{op}, 16x16 blocks", implementation, ("reference",))
    return dispatch.resolve(op, implementation)


def quantize_expanded(
    x: Float[Array, "..."],
    rule: ScaleRule,
    *,
    amax: Float[Array, "..."] | None = None,
    implementation: str | None = None,
) -> ExpandedArray:
    """`expand(quantize(x, rule))` in one pass: the numbers as a GPU without FP4 units multiplies them.

    Args:
      x, rule, amax, implementation: see `quantize`.

    Returns:
      Values in float8_e4m3fn for an `fp8_exact` rule, else in bfloat16, and the outer scales.

    Raises:
      ValueError: as `quantize`.
    """
    _check(x, rule, None, amax)
    dtype = jnp.float8_e4m3fn if rule.family == "fp8_exact" else jnp.bfloat16
    if _resolve("quantize_expanded", rule, None, implementation) == "triton":
        from pallas_kernels.nvfp4 import triton

        return triton.quantize_expanded(lax.stop_gradient(x), rule, dtype, amax)
    return expand_reference(quantize(x, rule, amax=amax, implementation="reference"), dtype)


@dispatch.replaceable
def quantize_operand(
    x: Float[Array, "..."], rule: ScaleRule, *, implementation: str | None = None
) -> Nvfp4Array | ExpandedArray:
    """Quantises activations into what the matmul of this device reads best: `quantize`, or on a GPU without FP4 units
    `quantize_expanded`. The numbers are the same.
    """
    if gpu.multiplies_codes():
        return quantize(x, rule, implementation=implementation)
    return quantize_expanded(x, rule, implementation=implementation)


def expand(q: Nvfp4Array, dtype=jnp.float8_e4m3fn, *, implementation: str | None = None) -> ExpandedArray:
    """Multiplies codes and block scales out, exactly.

    Args:
      q: NVFP4 array of shape [..., M, K].
      dtype: float8_e4m3fn (one byte a number; `fp8_exact` tensors only) or bfloat16.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Raises:
      ValueError: a type that would round the values.
    """
    check_expandable(q.fp8_exact, dtype)
    if dispatch.resolve("expand", implementation) == "triton":
        from pallas_kernels.nvfp4 import triton

        return triton.expand(q, dtype)
    return expand_reference(q, dtype)


def _check(x, rule: ScaleRule, key, amax) -> None:
    """Raises ValueError for what `quantize` does not take."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"quantize takes float32 or bfloat16, got {x.dtype}; cast it first")
    if x.ndim < 2 or x.shape[-1] == 0 or x.shape[-1] % formats.BLOCK:
        raise ValueError(f"quantize needs [..., M, K], K a multiple of 16, got {x.shape}; pad K with zeros")
    if x.size == 0:
        raise ValueError(f"quantize got no numbers: shape {x.shape}; leave the call out where there is nothing to quantise")
    if x.shape[-2] % rule.block[0]:
        raise ValueError(f"16x16 blocks need M to be a multiple of 16, got {x.shape}; use block=(1, 16)")
    outer_shape = outer_scale_shape(x.shape, rule)
    if amax is not None and jnp.shape(amax) != outer_shape:
        raise ValueError(f"amax has shape {jnp.shape(amax)}, outer={rule.outer!r} needs {outer_shape}")
    if key is not None and rule.four_over_six is not None:
        raise ValueError("four_over_six compares errors of nearest rounding; leave it or the key out")


def dequantize(q: Nvfp4Array, dtype=jnp.float32) -> Float[Array, "..."]:
    """code x (block_scale x outer_scale), in float32, in that order.

    Args:
      q: NVFP4 array of shape [..., M, K].
      dtype: float32, or bfloat16 (rounded to nearest even at the end; exact where outer scales are powers of
        two).

    Raises:
      ValueError: another dtype.
    """
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dequantize gives float32 or bfloat16, not {jnp.dtype(dtype)}")
    block_scale = block_scale_values(q)
    outer = q.outer_scale[..., None] if q.outer_per_row else q.outer_scale[..., None, None]
    scale = block_scale * outer
    codes = formats.e2m1_to_float32(unpack_codes(q.codes)).reshape(*scale.shape, formats.BLOCK)
    # The caller may add something to these products, which must not become multiply-adds.
    x = numerics.separate_product(codes * scale[..., None]).reshape(q.shape)
    return x if dtype == jnp.float32 else numerics.round_to_bfloat16(x)
