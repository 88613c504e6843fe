"""The step between the qkv projection and attention: split, norm of each query and key head, rotation."""

from pallas_kernels.qk_norm_rotary.api import qk_norm_rotary

__all__ = ["qk_norm_rotary"]
