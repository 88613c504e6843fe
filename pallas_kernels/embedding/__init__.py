"""Embedding of tokens, with a gradient whose sums have an order."""

from pallas_kernels.embedding.api import embed

__all__ = ["embed"]
