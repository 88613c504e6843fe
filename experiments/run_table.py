"""A finished run's figures as a result file: what each stretch of its updates came to.

    python -m experiments.run_table --workdir=runs/quickstart_gpu --name=quickstart_gpu --results_dir=docs/benchmarks

Reads the run's configuration and `metrics.jsonl`; writes NAME.json, from which `experiments.tables` makes the table. Call it
where the run was made: the device and the versions beside the figures are those of this process.
"""

from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from experiments.training import stored_run
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.results import write_results
from minite_jax.metrics.writer import read_metrics

_WORKDIR = cli.workdir_flag()
_NAME = flags.DEFINE_string("name", None, "Name of the result file; without it, the workdir's.")
_TITLE = flags.DEFINE_string("title", None, "Title of the table; without it, the model, the recipe and the task.")
_EVERY = flags.DEFINE_integer("every", 20, "Updates that are a row.", lower_bound=1)
_RESULTS = cli.results_dir_flag()
cli.revision_flag()

COLUMNS = [
    {"key": "updates", "label": "updates", "unit": ""},
    {"key": "tokens", "label": "tokens compared", "unit": "tokens"},
    {"key": "gap_max", "label": "largest gap", "unit": "nats"},
    {"key": "exact", "label": "equal bits", "unit": "share"},
    {"key": "reward", "label": "mean reward", "unit": ""},
    {"key": "entropy", "label": "entropy", "unit": "nats"},
    {"key": "grad_norm", "label": "gradient norm, largest", "unit": ""},
    {"key": "greedy", "label": "held out, greedy", "unit": "share"},
    {"key": "sampled", "label": "held out, T = 1", "unit": "share"},
    {"key": "sampler", "label": "sampler, median", "unit": "tokens/s"},
    {"key": "learner", "label": "learner, median", "unit": "tokens/s"},
]


def stretches(rows: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """A row of the table for each `every` updates, and one for all of them.

    Args:
      rows: of `read_metrics`; those of reinforcement learning count.
      every: updates of a row.
    """
    updates = [row for row in rows if row[names.PHASE] == "rl"]
    warmup = [row for row in rows if row[names.PHASE] == "sft" and names.ACCURACY_GREEDY in row][-1:]
    parts = [updates[start : start + every] for start in range(0, len(updates), every)]
    told = [_row(" to ".join(dict.fromkeys(str(row[names.STEP]) for row in (part[0], part[-1]))), part) for part in parts]
    before = [dict.fromkeys((c["key"] for c in COLUMNS), "") | _accuracies(warmup) | {"updates": "none yet"}] if warmup else []
    return [*before, *told, _row("all", updates)]


def _row(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = [row[names.TOKENS_COMPARED] for row in rows]

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    def median(name: str) -> float:
        values = sorted(row[name] for row in rows)
        return (values[len(values) // 2] + values[(len(values) - 1) // 2]) / 2

    return {
        "updates": what,
        "tokens": int(sum(tokens)),
        "gap_max": max(row[names.GAP_MAX] for row in rows),
        "exact": sum(row[names.GAP_EXACT_FRACTION] * n for row, n in zip(rows, tokens, strict=True)) / sum(tokens),
        "reward": mean(names.REWARD_MEAN),
        "entropy": mean(names.ENTROPY),
        "grad_norm": max(row[names.GRAD_NORM] for row in rows),
        "sampler": median(names.SAMPLER_SPEED),
        "learner": median(names.LEARNER_SPEED),
    } | _accuracies(rows)


def _accuracies(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the last step that evaluated."""
    keys = {"greedy": names.ACCURACY_GREEDY, "sampled": names.ACCURACY_SAMPLED}
    return {key: next((row[name] for row in reversed(rows) if name in row), "") for key, name in keys.items()}


def main(argv):
    del argv
    folder = Path(_WORKDIR.value)
    run, rows = stored_run(folder), read_metrics(folder)
    if not any(row[names.PHASE] == "rl" for row in rows):
        raise UserError(f"--workdir={folder}: the run has no update of reinforcement learning yet: train on")
    name, model, config = _NAME.value or folder.resolve().name, run.setup.model, run.config
    path = Path(_RESULTS.value or "docs/benchmarks") / f"{name}.json"
    write_results(
        path,
        name=name,
        title=_TITLE.value or f"GRPO in {run.setup.recipe.name}: the gap between sampler and learner",
        columns=COLUMNS,
        rows=stretches(rows, _EVERY.value),
        provenance=cli.origin(),
        notes=f"{model.num_hidden_layers} layers of width {model.hidden_size}, {model.num_experts} experts, head dimension "
        f"{model.head_dim}, {model.vocab_size:,} words; task {config.task.name}; {config.rl.prompts} prompts x "
        f"{config.sampler.samples} samples an update. Gap: |log-prob when sampled - log-prob in the update|. Held out: what the "
        "last evaluation of a row's updates gave.",
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main, required=("workdir",))
