"""Made `llama` and `qwen3_mixed` beside this file: small random models of transformers 5.24 (torch 2.14), and what it computes.

    python tests/data/huggingface/make_models.py

Eager attention in float32 on weights that are bfloat16 numbers; the hidden states are the embedding, what each layer but the last
gives, and what the final norm gives. `qwen3_dense` and `qwen3_moe` were made in the same way. Not part of the test-suite: other
versions may write other files.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_SHAPE = dict(
    vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    rms_norm_eps=1e-5, attention_bias=True, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=8.0, original_max_position_embeddings=16)


def _models():
    llama = LlamaConfig(**_SHAPE, num_hidden_layers=2, intermediate_size=48, tie_word_embeddings=True, rope_parameters=_LLAMA3)
    # Layers 1 and 3 have experts by their step, 1 is dense all the same; 12 experts, so that "10" sorts before "2".
    mixed = Qwen3MoeConfig(
        **_SHAPE, num_hidden_layers=4, intermediate_size=48, moe_intermediate_size=16, num_experts=12, num_experts_per_tok=3,
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1], tie_word_embeddings=False, rope_parameters=_YARN,
    )  # fmt: skip
    return {"llama": (LlamaForCausalLM, llama, 10**9), "qwen3_mixed": (Qwen3MoeForCausalLM, mixed, 20_000)}


@torch.no_grad()
def main():
    for name, (kind, config, max_shard_size) in _models().items():
        torch.manual_seed(7)
        folder = Path(__file__).parent / name
        model = kind(config).eval()
        for parameter in model.parameters():
            matrix = parameter.ndim > 1
            parameter.normal_(0.0 if matrix else 0.5, parameter.shape[-1] ** -0.5 if matrix else 0.3)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        ids = torch.randint(0, config.vocab_size, (2, 23))
        out = model(ids, output_hidden_states=True)
        hidden = {f"hidden_{i}": each.numpy() for i, each in enumerate(out.hidden_states)}
        np.savez(folder / "expected.npz", input_ids=ids.numpy().astype(np.int32), logits=out.logits.numpy(), **hidden)


if __name__ == "__main__":
    main()
