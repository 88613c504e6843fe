"""minite_jax: reinforcement learning for large language models in native NVFP4, in JAX.

Arrays inside functions end in their shape, one letter for each axis, from this one key:

    B  rollouts (batch rows)      P  prompts                G  samples per prompt
    T  time (tokens)              S  cache time (keys)      V  vocabulary
    D  model width                F  feed-forward width     H  query heads
    N  key/value heads            K  head width             E  experts
    k  experts chosen per token   Q  16-element blocks of the number format

So `logits_BTV` has shape [batch, time, vocabulary]. Pytrees, scalars and configurations carry no suffix.

Names are loaded when they are first used, so `import minite_jax` takes milliseconds and pulls in neither a
GPU library nor a plotting one.
"""

import importlib

__version__ = "0.1.0"

# Public name -> the module that defines it.
_NAMES: dict[str, str] = {
    "load_gguf": "minite_jax.checkpoint.gguf",
    "load_huggingface": "minite_jax.checkpoint.huggingface",
    "save_huggingface": "minite_jax.checkpoint.huggingface",
    "load_nvfp4": "minite_jax.checkpoint.nvfp4_files",
    "prepare_huggingface": "minite_jax.checkpoint.nvfp4_files",
    "save_nvfp4": "minite_jax.checkpoint.nvfp4_files",
    "provenance": "minite_jax.metrics.provenance",
    "ModelConfig": "minite_jax.model.config",
    "forward": "minite_jax.model.forward",
    "token_log_probs": "minite_jax.model.forward",
    "init_params": "minite_jax.model.params",
    "num_params": "minite_jax.model.params",
    "Policy": "minite_jax.model.policy",
    "prepare": "minite_jax.model.policy",
    "recipe": "minite_jax.precision.recipe",
    "Rollouts": "minite_jax.sampler.sampling",
    "SamplingParams": "minite_jax.sampler.requests",
    "sample": "minite_jax.sampler.sampling",
    "stream": "minite_jax.sampler.sampling",
    "Tokenizer": "minite_jax.text.tokenizer",
}
_SUBMODULES = ("checkpoint", "diagnostics", "learner", "metrics", "model", "precision", "sampler", "tasks", "text")

__all__ = [*_NAMES, *_SUBMODULES]


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
