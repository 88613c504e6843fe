"""Comparing engines: how large the gap is, and where it comes from."""

from minite_jax.diagnostics.certify import Certificate, certify, order_dependence
from minite_jax.diagnostics.gap import gap_metrics
from minite_jax.diagnostics.record import MatmulOperands, matmul_names, record_matmuls

__all__ = ["Certificate", "MatmulOperands", "certify", "gap_metrics", "matmul_names", "order_dependence", "record_matmuls"]
