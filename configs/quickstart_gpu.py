"""The quick start's task on a GPU: a larger model, six digits, prompts of 7 to 119 tokens, 240 updates of 512 rollouts.

    python -m experiments.train --config=configs/quickstart_gpu.py --workdir=runs/quickstart_gpu

A Qwen3-MoE of 8 layers and 32 experts (about 280 million parameters, more than half of them embeddings), with the head dimension
and the vocabulary of Qwen3-30B-A3B: ids beyond the task's 256 stay in the softmax and are never right. Prompts begin with up to
seven solved problems, so that they have many lengths and attention has one to three blocks of keys. The gap between rollout and
update is 0 in every update, as on a CPU; see docs/benchmarks.md.
"""

import ml_collections

from configs import quickstart


def get_config() -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.model.update(
        vocab_size=151_936,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
    )
    config.task.update(num_digits=6, max_shots=7)
    config.sft.optimizer.learning_rate = 1e-3
    config.rl.update(steps=240, prompts=32)
    config.rl.optimizer.learning_rate = 2e-4
    config.sampler.update(samples=16, max_tokens=9)
    config.eval.update(every_sft=200, every_rl=40)
    config.checkpoint.every = 120
    return config
