"""Table 2: alignment levels between "strict" and "independent engines", each with its gap and its price in the same run.

    python -m experiments.levels --checkpoint=runs/quickstart --results_dir=docs/benchmarks    # ten minutes on two cores
    python -m experiments.levels --random_model=qwen3_30b_a3b --suffix=h200 --minutes=8        # random weights, on a GPU
    python -m experiments.tables --table=alignment_levels

Every level of `experiments.baselines.choices`, and the naive engine, answer the same prompts with the weights of one model; the
strict policy scores what each sampled, as the learner would. Time is that of a whole sampling call a sampled token, in turns with
the strict level: the median of the ratios. Each level is one `--config.sampler.engine` of `experiments.train`. Writes
alignment_levels.json, after every level; `--minutes` begins no level after that time. Nearly all of the time is compiling.
"""

import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.baselines import choices
from experiments.build import sample_prompts
from experiments.growing import GrowingTable
from experiments.subject import Subject, subject
from minite_jax.diagnostics.gap import GAP, gap_metrics
from minite_jax.errors import UserError

_PROMPTS = flags.DEFINE_integer("problems", 32, "Prompts, each answered as often as the run did.", lower_bound=1)
_ROUNDS = cli.rounds_flag()  # 5
_LEVELS = flags.DEFINE_list("levels", [*choices.LEVELS, "naive"], "Which levels.")

COLUMNS = [
    {"key": "level", "label": "level", "unit": ""},
    {"key": "differs", "label": "what differs from the learner", "unit": ""},
    {"key": "gap", "label": "gap, mean", "unit": "nats"},
    {"key": "gap_max", "label": "largest", "unit": "nats"},
    {"key": "exact", "label": "tokens of equal bits", "unit": "%"},
    {"key": "k3", "label": "k3", "unit": "nats"},
    {"key": "tokens", "label": "tokens", "unit": ""},
    {"key": "time", "label": "time a token, strict = 1", "unit": ""},
]


def differs(level: str, model: mt.ModelConfig, recipe) -> str:
    """What a level does differently, in words."""
    if level == "naive":
        return "all of `independent`, and an engine of its own: another cache, other loops"
    names = choices.applicable(choices.LEVELS[level], model, recipe)
    if len(names) == 1:
        return choices.CHOICES[names[0]].about
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def sampled(asked: Subject, level: str):
    """What a level samples, and its seconds a token."""
    start = time.perf_counter()
    rollouts = sample_prompts(asked.policy, asked.params, asked.prompts, asked.key, asked.sampling, level)
    rollouts = jax.block_until_ready(rollouts)
    return rollouts, (time.perf_counter() - start) / int(np.asarray(rollouts.mask).sum())


def findings(asked: Subject, level: str) -> Iterator[dict]:
    """The row of a level, piece by piece."""
    policy = asked.policy
    yield {"differs": differs(level, policy.config, policy.recipe)}
    tokens_BT, mask_BT, sampled_BT = sampled(asked, level)[0].sequences()
    gap = gap_metrics(mt.token_log_probs(policy, tokens_BT, asked.sampling.truncation), sampled_BT, mask_BT)
    yield {
        "gap": float(gap[f"{GAP}/mean"]), "gap_max": float(gap[f"{GAP}/max"]),
        "exact": 100 * float(gap[f"{GAP}/exact_fraction"]), "k3": float(gap["gen_kl_error"]),
        "tokens": int(gap["tokens_compared"]),
    }  # fmt: skip
    ratios = []
    for _ in range(_ROUNDS.value or 5):
        strict = sampled(asked, choices.STRICT)[1]
        ratios.append(sampled(asked, level)[1] / strict)
    yield {"time": float(np.median(ratios))}


def main(argv):
    del argv
    start = time.perf_counter()
    if not _LEVELS.value:
        raise UserError(f"--levels is empty: choose from {', '.join(choices.LEVELS)}, naive")
    asked, levels = subject(_PROMPTS.value), list(dict.fromkeys((choices.STRICT, *_LEVELS.value)))
    for level in levels:
        if level != "naive":
            choices.check_level(level, asked.policy.config, asked.policy.recipe)
    sampling = asked.sampling
    table = GrowingTable(
        "alignment_levels", columns=COLUMNS, start=start, title="Table 2: alignment levels, their gap and their price",
        notes=f"{asked.about}. {len(asked.prompts)} prompts, {sampling.n} answers each at temperature {sampling.temperature}. "
        "Each level samples for itself; the gap is that of the strict policy's log-probs of these tokens to the level's own. "
        f"Time: whole sampling calls, in turns with the strict level, the median of {_ROUNDS.value or 5} ratios; on a machine "
        "with other load differences of a tenth mean nothing. On a CPU strict alignment is bought with loops over tiles of rows, "
        "so what levels gain there says nothing about a GPU.",
    )  # fmt: skip
    return table.fill(levels, lambda level: findings(asked, level))


if __name__ == "__main__":
    cli.run(main)
