"""Matmul of sorted rows with one weight matrix per group (MoE experts), and its two gradients."""

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad

__all__ = ["grouped_matmul", "grouped_matmul_dgrad", "grouped_matmul_wgrad"]
