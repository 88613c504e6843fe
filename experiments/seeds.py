"""Is the quick start's gain real? Several seeds, each with the task's reward, with random rewards, and supervised instead.

    python -m experiments.seeds --workdir=runs/seeds --seeds=10,11,12,13,14 --results_dir=docs/benchmarks

For each seed: one warm-up; from it GRPO with the task's reward; GRPO with a coin for a reward (the control: what the optimiser
does to the mixture of styles without any signal); and supervised training for as many updates on as many sequences. Finished
runs and their evaluations (`evaluation.json` of each) are kept, so an interrupted study goes on where it stopped, and several
processes can share a workdir if their seeds differ. Writes quickstart_seeds.json, from which `experiments.tables` makes the
table.
"""

import json
from pathlib import Path

from absl import flags

from experiments import cli
from experiments.training import Run, write_json
from minite_jax.checkpoint.config import differing_fields, to_plain
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.provenance import provenance
from minite_jax.metrics.results import write_results
from minite_jax.metrics.summary import run_gap
from minite_jax.metrics.writer import decode_scalar, encode_scalar, read_metrics

_CONFIG = cli.config_flag()
_WORKDIR = cli.workdir_flag()
_SEEDS = flags.DEFINE_list("seeds", ["10", "11", "12", "13", "14"], "Seeds, separated by commas.")
_RESULTS = cli.results_dir_flag()  # for quickstart_seeds.json; none: only run

ARMS = {
    "grpo": "GRPO, the task's reward",
    "random": "GRPO, random rewards",
    "sft": "supervised, equal updates and sequences",
}
COLUMNS = [
    {"key": "seed", "label": "seed", "unit": ""},
    {"key": "arm", "label": "training after the warm-up", "unit": ""},
    {"key": "sampled_before", "label": "T = 1 before", "unit": "share"},
    {"key": "sampled_after", "label": "T = 1 after", "unit": "share"},
    {"key": "gain", "label": "gain", "unit": "share"},
    {"key": "greedy_before", "label": "greedy before", "unit": "share"},
    {"key": "greedy_after", "label": "greedy after", "unit": "share"},
    {"key": "working_before", "label": "with working before", "unit": "share"},
    {"key": "working_after", "label": "with working after", "unit": "share"},
    {"key": "gap_max", "label": "largest gap of all steps", "unit": "nats"},
    {"key": "tokens_compared", "label": "tokens compared", "unit": "tokens"},
]


def arm_config(config, arm: str, seed: int, warmup: Path):
    """The configuration of one run of the study."""
    config = config.copy_and_resolve_references()
    config.seed = seed
    if arm == "warmup":
        config.rl.steps = 0
        return config
    config.init_from = str(warmup)
    if arm == "sft":
        config.sft.steps, config.sft.batch_size = config.rl.steps, config.rl.prompts * config.sampler.samples
        # Goes on as the warm-up ended: at the last rate of its cosine.
        rate = config.sft.optimizer.learning_rate * config.sft.optimizer.final_fraction
        config.sft.optimizer.update(dict(learning_rate=rate, decay_steps=0, warmup_steps=config.rl.optimizer.warmup_steps))
        config.rl.steps = 0
    else:
        config.sft.steps = 0
        config.rl.reward = "random" if arm == "random" else "task"
    config.sft.extra_steps = 0
    return config


def run_seed(config, seed: int, workdir: Path) -> dict[str, dict]:
    """All runs of one seed: "warmup" and each of `ARMS` with its final held-out evaluation. Each run goes on where it stopped."""
    warmup = workdir / f"seed{seed}" / "warmup_run"
    return {
        arm: run_once(arm_config(config, arm, seed, warmup), warmup if arm == "warmup" else workdir / f"seed{seed}" / arm)
        for arm in ("warmup", *ARMS)
    }


def run_once(config, folder: Path) -> dict:
    """Runs to the end and returns the final held-out evaluation, which is kept in the folder for the next call.

    It is reused for the very configuration that it was made with. Under any other, the run itself decides: it goes on, evaluates
    anew, or refuses.

    Raises:
      UserError: a kept evaluation cannot be read.
    """
    kept, plain = folder / "evaluation.json", to_plain(config)
    if kept.exists():
        try:
            content = json.loads(kept.read_text())
            if not differing_fields(content["config"], plain):
                return {name: decode_scalar(value) for name, value in content["evaluation"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{kept} is not what was written: delete it, and the run is evaluated again") from None
    evaluation = Run(config, folder)()
    encoded = {name: encode_scalar(value) for name, value in evaluation.items()}
    write_json(kept, {"config": plain, "evaluation": encoded})
    return evaluation


def summarize(seed: int, evaluations: dict[str, dict], workdir: Path) -> list[dict]:
    """One row per arm, from what `run_seed` returned and the metrics files."""
    before = evaluations["warmup"]
    rows = []
    for arm, label in ARMS.items():
        after = evaluations[arm]
        gap = run_gap(read_metrics(workdir / f"seed{seed}" / arm))
        rows.append(
            {
                "seed": str(seed),
                "arm": label,
                "sampled_before": before[names.ACCURACY_SAMPLED],
                "sampled_after": after[names.ACCURACY_SAMPLED],
                "gain": after[names.ACCURACY_SAMPLED] - before[names.ACCURACY_SAMPLED],
                "greedy_before": before[names.ACCURACY_GREEDY],
                "greedy_after": after[names.ACCURACY_GREEDY],
                "working_before": before["eval/working"],
                "working_after": after["eval/working"],
                "gap_max": None if gap is None else gap.largest,
                "tokens_compared": None if gap is None else gap.tokens or None,
            }
        )
    return rows


def main(argv):
    del argv
    workdir = Path(_WORKDIR.value)
    try:
        seeds = [int(seed) for seed in _SEEDS.value]
    except ValueError:
        raise UserError(f"--seeds={','.join(_SEEDS.value)}: give whole numbers separated by commas") from None
    evaluations = {seed: run_seed(_CONFIG.value, seed, workdir) for seed in seeds}
    if _RESULTS.value is None:
        return
    rows = [row for seed in seeds for row in summarize(seed, evaluations[seed], workdir)]
    write_results(
        Path(_RESULTS.value) / "quickstart_seeds.json",
        name="quickstart_seeds",
        title="Quick start: held-out accuracy before and after, by seed and by what is rewarded",
        columns=COLUMNS,
        rows=rows,
        provenance=provenance(),
        notes="512 held-out problems that no phase saw, at T = 1 eight samples of each. "
        "Gap: |log-prob when sampled - log-prob in the update|.",
    )


if __name__ == "__main__":
    cli.run(main, config="configs/quickstart.py", required=("workdir",))
