"""Dense matmul over NVFP4 or plain operands, and its two gradients."""

from pallas_kernels.matmul.api import matmul, matmul_dgrad, matmul_wgrad

__all__ = ["matmul", "matmul_dgrad", "matmul_wgrad"]
