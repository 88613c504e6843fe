"""RMS norm in plain jnp: the specification of the kernels."""

import jax.numpy as jnp

from pallas_kernels.numerics import blocked_sum, reciprocal_sqrt, round_to, separate_product
from pallas_kernels.rows import map_row_tiles, tile_sums


def _inverse_rms(x32_RD, eps):
    width = x32_RD.shape[-1]
    # eps goes into the sum, not the mean: a multiplication followed by an add could be contracted.
    mean_R = (blocked_sum(separate_product(x32_RD * x32_RD)) + eps * width) * (1.0 / width)
    return reciprocal_sqrt(mean_R)[:, None]


def rms_norm(x_MD, weight_D, *, eps):
    def body(x_RD):
        x32_RD = x_RD.astype(jnp.float32)
        return round_to(x32_RD * _inverse_rms(x32_RD, eps) * weight_D[None, :], x_RD.dtype)

    return map_row_tiles(body, x_MD)


def add_rms_norm(x_MD, y_MD, weight_D, *, eps):
    """The sum, rounded to the type of x, and its norm."""
    sum_MD = round_to(x_MD.astype(jnp.float32) + y_MD.astype(jnp.float32), x_MD.dtype)
    return sum_MD, rms_norm(sum_MD, weight_D, eps=eps)


def rms_norm_backward(x_MD, weight_D, g_MD, addend_MD=None, *, eps):
    """Gradient of x in its type, and the sums over tiles of rows [tiles, D] whose sum is the weight's gradient.

    An addend is what x has of gradient from elsewhere: the two are added before the one rounding.
    """
    x32_MD, g32_MD = x_MD.astype(jnp.float32), g_MD.astype(jnp.float32)
    inverse_M1 = _inverse_rms(x32_MD, eps)
    unit_MD = x32_MD * inverse_M1
    dunit_MD = separate_product(g32_MD * weight_D[None, :])
    mean_M = blocked_sum(separate_product(dunit_MD * unit_MD)) * (1.0 / x_MD.shape[-1])
    dx_MD = inverse_M1 * (dunit_MD - separate_product(unit_MD * mean_M[:, None]))
    if addend_MD is not None:
        dx_MD = separate_product(dx_MD) + addend_MD.astype(jnp.float32)
    return round_to(dx_MD, x_MD.dtype), tile_sums(separate_product(g32_MD * unit_MD))
