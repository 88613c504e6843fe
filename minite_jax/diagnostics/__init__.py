"""Comparing engines: how large the gap is, and where it comes from."""

from minite_jax.diagnostics.calibrate import calibrate
from minite_jax.diagnostics.certify import FLOAT32, HOPPER_FP8, Accumulator, Certificate, certify, order_dependence
from minite_jax.diagnostics.gap import EXACT, THRESHOLDS, Threshold, TokenGap, gap_metrics, gap_warnings, token_gap, worst_tokens
from minite_jax.diagnostics.record import MatmulOperands, matmul_names, record_matmuls

__all__ = [
    "EXACT",
    "FLOAT32",
    "HOPPER_FP8",
    "THRESHOLDS",
    "Accumulator",
    "Certificate",
    "MatmulOperands",
    "Threshold",
    "TokenGap",
    "calibrate",
    "certify",
    "gap_metrics",
    "gap_warnings",
    "matmul_names",
    "order_dependence",
    "record_matmuls",
    "token_gap",
    "worst_tokens",
]
