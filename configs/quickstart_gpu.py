"""The quick start's task on a GPU: a model four hundred times as large, six digits, 240 updates of 1,024 rollouts.

    python -m experiments.train --config=configs/quickstart_gpu.py --workdir=runs/quickstart_gpu

A Qwen3-MoE of 8 layers and 32 experts (about 110 million parameters), with the kernels and head dimensions of the large models.
The gap between rollout and update is 0 in every update, as on a CPU; see docs/benchmarks.md.
"""

import ml_collections

from configs import quickstart


def get_config() -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.model.update(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
    )
    config.task.num_digits = 6
    config.sft.optimizer.learning_rate = 1e-3
    config.rl.update(steps=240, prompts=64)
    config.rl.optimizer.learning_rate = 2e-4
    config.sampler.update(samples=16, max_tokens=9)
    config.eval.update(every_sft=200, every_rl=40)
    config.checkpoint.every = 120
    return config
