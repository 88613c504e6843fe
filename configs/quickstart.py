"""The quick start: a quarter-million-parameter Qwen3-MoE learns the sum of five digits modulo 10, in NVFP4, on a CPU.

    make quickstart
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

What to expect on two cores: see README.md, "Quick start". Phases: supervised warm-up on a mixture of direct answers (75 %) and
answers with the working (25 %), then 80 GRPO updates of 32 prompts x 8 samples.
"""

import ml_collections


def _optimizer(**fields) -> dict:
    common = dict(decay_steps=0, final_fraction=0.1, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    return common | fields


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            seed=0,
            # A workdir whose warm-up this run starts from instead of its own; "" for none.
            init_from="",
            # A workdir that the plots show beside this run; "" for none.
            plot_beside="",
            model=dict(
                vocab_size=256,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=0,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                norm_topk_prob=True,
                rope_theta=1e4,
                rms_norm_eps=1e-6,
                tie_word_embeddings=False,
            ),  # fmt: skip
            # Leading and trailing layers in plain precision; -1: as the recipe says.
            recipe=dict(name="nvfp4", first_plain=-1, last_plain=-1),
            task=dict(name="digit_sum", num_digits=5, working_share=0.25),
            sft=dict(
                steps=400,
                batch_size=128,
                # Warm-up goes on by 100 steps, at its last learning rate, until this share of the sampled completions that show
                # the trait are right, for at most `extra_steps`.
                until_trait="working",
                until_accuracy=0.93,
                extra_steps=400,
                optimizer=_optimizer(learning_rate=3e-3, warmup_steps=20, decay_steps=400, weight_decay=0.01),
            ),
            rl=dict(
                steps=80,
                prompts=32,
                reward="task",  # or "random": a coin per sample, the control
                normalize_advantages=True,
                clip_low=0.2,
                clip_high=0.2,
                # A large eps: Adam then follows the gradient's size. With 1e-8 it blows noise up to full steps, and random
                # rewards alone walk the mixture of styles about.
                optimizer=_optimizer(learning_rate=5e-4, warmup_steps=10, eps=1e-2),
            ),
            sampler=dict(engine="aligned", samples=8, temperature=1.0, top_p=1.0, top_k=0, max_tokens=8),
            learner=dict(micro_batches=1, remat=False),
            eval=dict(every_sft=100, every_rl=20, prompts=512),
            checkpoint=dict(every=20, keep=2),
            tensorboard=False,
        )
    )
