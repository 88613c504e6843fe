"""Comparing engines: how large the gap is, and where it comes from."""

from minite_jax.diagnostics.gap import gap_metrics

__all__ = ["gap_metrics"]
