"""RMS norm in plain jnp: the specification of the kernels."""

from jax import lax

from pallas_kernels.numerics import ordered_sum, round_to
from pallas_kernels.rows import map_row_tiles


def rms_norm(x_MD, weight_D, *, eps):
    width = x_MD.shape[-1]

    def body(x_RD):
        x32_RD = x_RD.astype("float32")
        # eps goes into the sum, not the mean: a multiplication followed by an add could be contracted.
        mean_R = (ordered_sum(x32_RD * x32_RD) + eps * width) * (1.0 / width)
        return round_to(x32_RD * lax.rsqrt(mean_R)[:, None] * weight_D[None, :], x_RD.dtype)

    return map_row_tiles(body, x_MD)
