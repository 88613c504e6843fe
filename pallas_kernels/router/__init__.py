"""MoE router: logits, softmax, top-k."""

from pallas_kernels.router.api import router

__all__ = ["router"]
