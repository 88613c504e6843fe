"""GGUF files, llama.cpp's format: one file with the weights, mostly quantised, the tokenizer and the chat template.

    config, params = mt.load_gguf("model.gguf")                # float32 masters, dequantised
    tokenizer = mt.Tokenizer.from_gguf("model.gguf")

`file` says what a GGUF file is, `config` what its metadata mean, `names` which tensor is which part of our parameter tree;
`reader` moves the numbers. Architectures `llama`, `qwen3` and `qwen3moe`. There is no export to GGUF.
"""

from minite_jax.checkpoint.gguf.file import is_gguf
from minite_jax.checkpoint.gguf.reader import GgufFile, load_gguf, open_gguf

__all__ = ["GgufFile", "is_gguf", "load_gguf", "open_gguf"]
