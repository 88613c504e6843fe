"""Causal grouped-query attention: packed sequences with their gradient, and tokens that read a cache of pages."""

from pallas_kernels.attention.api import attention, key_block, paged_attention

__all__ = ["attention", "key_block", "paged_attention"]
