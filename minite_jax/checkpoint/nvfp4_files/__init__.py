"""Folders of NVFP4 models in ModelOpt's and compressed-tensors' layouts, in and out.

    policy = mt.load_nvfp4("Qwen3-30B-A3B-NVFP4")          # the stored codes and scales: nothing is quantised again
    policy = mt.prepare_huggingface("Qwen3-30B-A3B", mt.recipe("nvfp4"))
    mt.save_nvfp4("out", policy, layout="modelopt", like="Qwen3-30B-A3B")

`layouts` says what the two are, `blocks` which tensor is which part of a policy's weights; `reader` and `writer` move codes and
scales as they are, and `packing` makes them, a matrix at a time.
"""

from minite_jax.checkpoint.nvfp4_files.layouts import LAYOUTS, is_nvfp4
from minite_jax.checkpoint.nvfp4_files.packing import pack_params, prepare_huggingface, unpack_params
from minite_jax.checkpoint.nvfp4_files.reader import Nvfp4Folder, load_nvfp4, open_nvfp4, read_input_scales
from minite_jax.checkpoint.nvfp4_files.writer import nvfp4_contents, read_like, save_nvfp4

__all__ = [
    "LAYOUTS", "Nvfp4Folder", "is_nvfp4", "load_nvfp4", "nvfp4_contents", "open_nvfp4", "pack_params", "prepare_huggingface",
    "read_input_scales", "read_like", "save_nvfp4", "unpack_params",
]  # fmt: skip
