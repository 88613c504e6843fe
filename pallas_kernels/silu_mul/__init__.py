"""SwiGLU's gate: silu(gate) * up."""

from pallas_kernels.silu_mul.api import silu_mul, silu_mul_quantize

__all__ = ["silu_mul", "silu_mul_quantize"]
