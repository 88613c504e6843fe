"""The random Hadamard transform along 16s, which spreads outliers over their block before a weight gradient
is quantised.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4; the signs are
TransformerEngine's.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.numerics import round_to_bfloat16
from pallas_kernels.nvfp4 import formats

HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def random_hadamard(
    x: Float[Array, "*batch K"], signs: tuple[int, ...] | None = None
) -> Float[Array, "*batch K"]:
    """y = x @ (diag(signs) @ H / 4) for each 16 numbers of the last axis, H being Sylvester's matrix of order
    16.

    The transform is orthogonal: applied to both operands of a product over this axis, it leaves the product
    unchanged but for rounding. bfloat16 numbers are added in float32 in a fixed order, and the result is
    rounded to bfloat16.

    Args:
      x: float32 (rounded to bfloat16 first) or bfloat16 [..., K], K a multiple of 16.
      signs: 16 numbers +1 or -1; None takes TransformerEngine's.

    Returns:
      bfloat16 [..., K].

    Raises:
      ValueError: K is not a multiple of 16, or signs are not 16 times +-1.
    """
    signs_16 = _checked_signs(x, signs)
    return round_to_bfloat16(_butterflies(_as_blocks(x) * signs_16).reshape(x.shape) * 0.25)


def inverse_random_hadamard(
    y: Float[Array, "*batch K"], signs: tuple[int, ...] | None = None
) -> Float[Array, "*batch K"]:
    """The inverse of `random_hadamard`, y @ (H @ diag(signs) / 4), with the same arguments and errors."""
    signs_16 = _checked_signs(y, signs)
    return round_to_bfloat16((_butterflies(_as_blocks(y)) * signs_16).reshape(y.shape) * 0.25)


def _checked_signs(x, signs):
    signs = HADAMARD_SIGNS if signs is None else tuple(signs)
    if len(signs) != formats.BLOCK or any(s not in (1, -1) for s in signs):
        raise ValueError(f"signs={signs}: must be 16 numbers, each +1 or -1")
    if x.shape[-1] % formats.BLOCK:
        raise ValueError(f"the transform works on 16s of the last axis, got {x.shape}; pad it with zeros")
    return np.array([signs], np.float32)


def _as_blocks(x):
    return round_to_bfloat16(x).astype(jnp.float32).reshape(-1, formats.BLOCK)


def _butterflies(x):
    """x @ H for rows of 16, by four rounds of sums and differences (each product with +-1 is exact)."""
    half = formats.BLOCK // 2
    while half:
        pairs = x.reshape(-1, 2, half)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half //= 2
    return x.reshape(-1, formats.BLOCK)
