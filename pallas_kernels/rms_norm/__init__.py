"""Root mean square layer norm."""

from pallas_kernels.rms_norm.api import (
    add_rms_norm,
    add_rms_norm_backward,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_quantize,
)

__all__ = ["add_rms_norm", "add_rms_norm_backward", "add_rms_norm_quantize", "rms_norm", "rms_norm_quantize"]
