"""Hugging Face folders (config.json and safetensors files) of Qwen3, Qwen3-MoE and Llama-type models, in and out.

    config, params = mt.load_huggingface("folder")
    mt.save_huggingface("other", params, config, like="folder")    # equal to "folder" byte for byte, where nothing was trained

`names` says which tensor is which part of our parameter tree, `config` what config.json means, `files` what a safetensors file
is; `reader` and `writer` move the numbers, a piece of a tensor at a time.
"""

from minite_jax.checkpoint.huggingface.config import from_json, read_config, to_json
from minite_jax.checkpoint.huggingface.names import Placement, placements
from minite_jax.checkpoint.huggingface.reader import Folder, load_huggingface, open_folder
from minite_jax.checkpoint.huggingface.writer import open_like, save_huggingface

__all__ = [
    "Folder", "Placement", "from_json", "load_huggingface", "open_folder", "open_like", "placements", "read_config",
    "save_huggingface", "to_json",
]  # fmt: skip
