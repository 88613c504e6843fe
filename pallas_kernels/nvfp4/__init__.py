"""The NVFP4 format: 4-bit E2M1 codes, an E4M3 scale per 16 of them, and a float32 outer scale.

    rule = nvfp4.ScaleRule.fp8_exact(outer="row")
    q = nvfp4.quantize(x, rule)     # x float32 or bfloat16 [..., M, K]; q an Nvfp4Array
    x_again = nvfp4.dequantize(q)

Source of the format: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 2.
"""

from pallas_kernels.nvfp4.api import dequantize, expand, quantize, quantize_expanded, quantize_operand
from pallas_kernels.nvfp4.array import Nvfp4Array, block_scale_values, block_values, pack_codes, unpack_codes
from pallas_kernels.nvfp4.expanded import ExpandedArray
from pallas_kernels.nvfp4.formats import E2M1_VALUES
from pallas_kernels.nvfp4.fp8_exact import FP8_EXACT_SCALES, FP8_EXACT_SCALES_UP_TO_4, is_fp8_exact
from pallas_kernels.nvfp4.hadamard import HADAMARD_SIGNS, inverse_random_hadamard, random_hadamard
from pallas_kernels.nvfp4.rules import ScaleRule

__all__ = [
    "E2M1_VALUES",
    "ExpandedArray",
    "FP8_EXACT_SCALES",
    "FP8_EXACT_SCALES_UP_TO_4",
    "HADAMARD_SIGNS",
    "Nvfp4Array",
    "ScaleRule",
    "block_scale_values",
    "block_values",
    "dequantize",
    "expand",
    "inverse_random_hadamard",
    "is_fp8_exact",
    "pack_codes",
    "quantize",
    "quantize_expanded",
    "quantize_operand",
    "random_hadamard",
    "unpack_codes",
]
