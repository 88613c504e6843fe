"""Causal grouped-query attention, one code for a full pass, a chunk and a single token against a cache."""

from pallas_kernels.attention.api import KEY_BLOCK, attention

__all__ = ["KEY_BLOCK", "attention"]
