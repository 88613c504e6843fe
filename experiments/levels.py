"""Table 2: alignment levels between "strict" and "independent engines", each with its gap and its price in the same run.

    python -m experiments.levels --checkpoint=runs/quickstart --results_dir=docs/benchmarks
    python -m experiments.tables --table=alignment_levels

Takes the weights of a finished run and samples the same held-out problems with every level of `experiments.baselines.choices`,
and with the naive engine; the strict policy scores what each sampled, as the learner would. Time is that of a whole sampling
call a sampled token, levels in turns, the median of the rounds against the strict level's in the same round. Each level is one
`--config.sampler.engine` of `experiments.train`. Writes alignment_levels.json. Ten minutes on two cores, nearly all of it
compiling.
"""

import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.baselines import choices
from experiments.build import sample_prompts
from experiments.evaluation import held_out_prompts
from experiments.training import finished_run
from minite_jax.diagnostics.gap import GAP, gap_metrics
from minite_jax.metrics.provenance import provenance
from minite_jax.metrics.results import write_results

_CHECKPOINT = cli.checkpoint_flag()
_PROMPTS = flags.DEFINE_integer("problems", 32, "Held-out problems, each answered config.sampler.samples times.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each level is timed.", lower_bound=1)
_LEVELS = flags.DEFINE_list("levels", [*choices.LEVELS, "naive"], "Which levels.")
_RESULTS = cli.results_dir_flag()

NAME = "alignment_levels"
COLUMNS = [
    {"key": "level", "label": "level", "unit": ""},
    {"key": "differs", "label": "what differs from the learner", "unit": ""},
    {"key": "gap", "label": "gap, mean", "unit": "nats"},
    {"key": "gap_max", "label": "largest", "unit": "nats"},
    {"key": "exact", "label": "tokens of equal bits", "unit": "%"},
    {"key": "k3", "label": "k3", "unit": "nats"},
    {"key": "tokens", "label": "tokens", "unit": ""},
    {"key": "time", "label": "time a token, strict = 1", "unit": ""},
    {"key": "time_h200", "label": "time on an H200, strict = 1", "unit": ""},
]


def differs(level: str, model: mt.ModelConfig, recipe) -> str:
    """What a level does differently, in words."""
    if level == "naive":
        return "all of `independent`, and an engine of its own: another cache, other loops"
    names = choices.applicable(choices.LEVELS[level], model, recipe)
    if len(names) == 1:
        return choices.CHOICES[names[0]].about
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def main(argv):
    del argv
    folder, levels = Path(_CHECKPOINT.value), list(dict.fromkeys((choices.STRICT, *_LEVELS.value)))
    run = finished_run(folder)
    setup, params = run.setup, run.state.train.params
    policy = mt.prepare(params, setup.model, setup.recipe)
    for level in levels:
        if level != "naive":
            choices.check_level(level, setup.model, setup.recipe)
    prompts = held_out_prompts(setup, _PROMPTS.value)
    key = jax.random.key(run.config.seed)

    def sample(level):
        start = time.perf_counter()
        rollouts = jax.block_until_ready(sample_prompts(setup, policy, params, prompts, key, setup.sampling, level))
        return rollouts, (time.perf_counter() - start) / int(np.asarray(rollouts.mask).sum())

    rows = []
    for level in levels:
        tokens_BT, mask_BT, sampled_BT = sample(level)[0].sequences()
        gap = gap_metrics(mt.token_log_probs(policy, tokens_BT, setup.sampling.truncation), sampled_BT, mask_BT)
        rows.append(
            {
                "level": level, "differs": differs(level, setup.model, setup.recipe), "gap": float(gap[f"{GAP}/mean"]),
                "gap_max": float(gap[f"{GAP}/max"]), "exact": 100 * float(gap[f"{GAP}/exact_fraction"]),
                "k3": float(gap["gen_kl_error"]), "tokens": int(gap["tokens_compared"]), "time": None, "time_h200": None,
            }
        )  # fmt: skip
        print("{level}: mean gap {gap:.3g}, {exact:.3g} % of {tokens} tokens exact".format(**rows[-1]), flush=True)
    ratios = {level: [] for level in levels}
    for _ in range(_ROUNDS.value):
        seconds = {level: sample(level)[1] for level in levels}
        for level in levels:
            ratios[level].append(seconds[level] / seconds[choices.STRICT])
    for row in rows:
        row["time"] = float(np.median(ratios[row["level"]]))

    sampling, folder = setup.sampling, Path(_RESULTS.value or "docs/benchmarks")
    write_results(
        folder / f"{NAME}.json",
        name=NAME,
        columns=COLUMNS,
        rows=rows,
        provenance=provenance(),
        title="Table 2: alignment levels, their gap and their price",
        notes=f"The trained quick-start model (recipe {setup.recipe.name}), {_PROMPTS.value} held-out problems, {sampling.n} "
        f"answers each at temperature {sampling.temperature}. Each level samples for itself; the gap is that of the strict "
        "policy's log-probs of these tokens to the level's own. Time: whole sampling calls, the median of "
        f"{_ROUNDS.value} rounds of all levels in turns, on a machine with other load: differences of a tenth mean nothing. On a "
        "CPU strict alignment is bought with loops over tiles of rows, so what levels gain here says nothing about a GPU.",
    )
    print(f"written: {folder}/{NAME}.json")


if __name__ == "__main__":
    cli.run(main, required=("checkpoint",))
