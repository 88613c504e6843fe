"""A run's figures as a result file: what each stretch of its updates came to.

    python -m experiments.run_table --workdir=runs/quickstart_gpu --results_dir=docs/benchmarks

Reads the run's configuration and `metrics.jsonl`; writes a JSON file with the name of the run's folder, from which
`experiments.tables` makes the table. Call it where the run was made: the device and the versions beside the figures are those of
this process. Of a run that goes on it tells the updates so far, and says how many there will be.
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import cli
from experiments.build import build
from experiments.training import stored_config
from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.metrics.results import write_results
from minite_jax.metrics.summary import run_gap
from minite_jax.metrics.writer import read_metrics

_WORKDIR = cli.workdir_flag()
_TITLE = flags.DEFINE_string("title", None, "Title of the table; without it, the recipe is named.")
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
NEEDED = (
    names.TOKENS_COMPARED, names.GAP_MAX, names.GAP_EXACT_FRACTION, names.REWARD_MEAN, names.ENTROPY, names.GRAD_NORM,
    names.SAMPLER_SPEED, names.LEARNER_SPEED,
)  # fmt: skip


def stretches(rows: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """A row of the table for each `every` updates, and one for all of them.

    Args:
      rows: of `read_metrics`; those of reinforcement learning count.
      every: updates of a row.
    """
    updates = _updates(rows)
    warmup = [row for row in rows if row.get(names.PHASE) == "sft" and names.ACCURACY_GREEDY in row][-1:]
    parts = [updates[start : start + every] for start in range(0, len(updates), every)]
    told = [_row(" to ".join(dict.fromkeys(str(row[names.STEP]) for row in (part[0], part[-1]))), part) for part in parts]
    before = [dict.fromkeys((c["key"] for c in COLUMNS), "") | _accuracies(warmup) | {"updates": "none yet"}] if warmup else []
    return [*before, *told, _row("all", updates)]


def _updates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get(names.PHASE) == "rl"]


def _row(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    def column(name: str) -> np.ndarray:
        return np.asarray([row[name] for row in rows], np.float64)

    gap = run_gap(rows)
    # NumPy's, because a NaN must not vanish: Python's `max` and `sorted` order it by chance.
    return {
        "updates": what,
        "tokens": gap.tokens,
        "gap_max": gap.largest,
        "exact": gap.equal_bits if gap.tokens else "",
        "reward": float(column(names.REWARD_MEAN).mean()),
        "entropy": float(column(names.ENTROPY).mean()),
        "grad_norm": float(column(names.GRAD_NORM).max()),
        "sampler": float(np.median(column(names.SAMPLER_SPEED))),
        "learner": float(np.median(column(names.LEARNER_SPEED))),
    } | _accuracies(rows)


def _accuracies(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the last step that evaluated."""
    keys = {"greedy": names.ACCURACY_GREEDY, "sampled": names.ACCURACY_SAMPLED}
    return {key: next((row[name] for row in reversed(rows) if name in row), "") for key, name in keys.items()}


def _checked(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics.

    Raises:
      UserError: there are none of reinforcement learning, or an update lacks some.
    """
    rows = read_metrics(folder)
    if not _updates(rows):
        raise UserError(f"--workdir={folder}: the run has no update of reinforcement learning yet: train on")
    for row in _updates(rows):
        if missing := [name for name in NEEDED if not isinstance(row.get(name), int | float)]:
            raise UserError(
                f"--workdir={folder}: the metrics of step {row[names.STEP]} have no number {missing[0]}: another version of the "
                "project wrote them, make the table with that one"
            )
    return rows


def _progress(updates: list[dict[str, Any]], steps: int) -> str:
    """What a reader has to know about the run's updates; "" where it made all."""
    skipped = sum(row.get("update_applied", 1.0) == 0 for row in updates)
    words = [f"The run goes on: {len(updates)} of {steps} updates."] if len(updates) < steps else []
    words += [f"Updates not applied, because a gradient or a new weight was not finite: {skipped}."] if skipped else []
    return "".join(f" {each}" for each in words)


def main(argv):
    del argv
    folder = Path(_WORKDIR.value)
    rows, config = _checked(folder), stored_config(folder)
    setup = build(config)
    name, model = folder.resolve().name, setup.model
    path = Path(_RESULTS.value or "docs/benchmarks") / f"{name}.json"
    write_results(
        path,
        name=name,
        title=_TITLE.value or f"GRPO in {setup.recipe.name}: the gap between sampler and learner",
        columns=COLUMNS,
        rows=stretches(rows, _EVERY.value),
        provenance=cli.origin(),
        notes=f"{model.num_hidden_layers} layers of width {model.hidden_size}, {model.num_experts} experts, head dimension "
        f"{model.head_dim}, {model.vocab_size:,} words; task {config.task.name}; {config.rl.prompts} prompts x "
        f"{config.sampler.samples} samples an update. Gap: |log-prob when sampled - log-prob in the update|. Held out: what the "
        f"last evaluation of a row's updates gave.{_progress(_updates(rows), config.rl.steps)}",
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main, required=("workdir",))
