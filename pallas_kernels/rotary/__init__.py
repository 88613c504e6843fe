"""Rotary position embedding."""

from pallas_kernels.rotary.api import rotary, rotary_table

__all__ = ["rotary", "rotary_table"]
