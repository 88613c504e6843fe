"""Weighted sum of a token's expert outputs."""

from pallas_kernels.combine.api import combine

__all__ = ["combine"]
