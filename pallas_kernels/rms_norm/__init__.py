"""Root mean square layer norm."""

from pallas_kernels.rms_norm.api import rms_norm, rms_norm_quantize

__all__ = ["rms_norm", "rms_norm_quantize"]
