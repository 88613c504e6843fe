"""SwiGLU's gate: silu(gate) * up."""

from pallas_kernels.silu_mul.api import silu_mul

__all__ = ["silu_mul"]
