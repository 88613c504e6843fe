"""Where does the gap of the naive engine come from? Its answers, scored by our forward with its operations swapped in.

    python -m experiments.attribution --checkpoint=runs/quickstart --results_dir=docs/benchmarks

Takes a finished run, lets the naive engine answer held-out problems, and runs our forward over its tokens with one operation
(or several) in place of ours: `minite_jax.diagnostics.attribute`. `--engine` takes a level of alignment in its place, whose
cause is known. `--html=page.html` writes what was found on one page with pictures. Writes attribution_naive.json
(attribution_LEVEL.json), from which `experiments.tables` makes the table. On two cores the one program compiles in three minutes,
a run takes a second.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.baselines import choices
from experiments.baselines.swaps import Swaps
from experiments.build import ENGINES, sample_prompts
from experiments.evaluation import held_out_prompts
from experiments.training import finished_run
from minite_jax.diagnostics.attribute import Attribution, Effect, attribute
from minite_jax.diagnostics.compare import compare
from minite_jax.diagnostics.logs import trace_of_log_probs
from minite_jax.diagnostics.pictures import shares_of
from minite_jax.diagnostics.report import write_report
from minite_jax.errors import UserError
from minite_jax.metrics.results import write_results

_OTHERS = [each for each in ENGINES if each not in ("aligned", choices.STRICT)]
_CHECKPOINT = cli.checkpoint_flag()
_ENGINE = flags.DEFINE_enum("engine", "naive", _OTHERS, "Who sampled.")
_PROMPTS = flags.DEFINE_integer("answers", 512, "Held-out problems, each answered once.", lower_bound=2)
# What the naive engine does, and the casts to bfloat16 that XLA leaves out of it.
_CHOICES = flags.DEFINE_list("choices", [*choices.LEVELS["independent"], "excess_precision"], "What may be swapped.")
_RESULTS = cli.results_dir_flag()
_HTML = cli.html_flag()
cli.revision_flag()

COLUMNS = [
    {"key": "question", "label": "question", "unit": ""},
    {"key": "swapped", "label": "swapped", "unit": ""},
    {"key": "share", "label": "explains", "unit": "%"},
    {"key": "low", "label": "95 % interval, from", "unit": "%"},
    {"key": "high", "label": "to", "unit": "%"},
    {"key": "gap", "label": "gap left, mean", "unit": "nats"},
    {"key": "k3", "label": "k3 left", "unit": "nats"},
    {"key": "exact", "label": "tokens of equal bits", "unit": "%"},
]


def row(question: str, swapped: str, effect: Effect) -> dict:
    """One row of the table."""
    return {
        "question": question, "swapped": swapped, "share": 100 * effect.share, "low": 100 * effect.interval[0],
        "high": 100 * effect.interval[1], "gap": effect.gap, "k3": effect.k3, "exact": 100 * effect.exact,
    }  # fmt: skip


def table(found: Attribution) -> list[dict]:
    """All findings as rows."""
    rows = [row("the gap", "nothing", found.none), row("the gap", "everything", found.everything)]
    rows += [row("alone", each.names[0], each) for each in found.alone]
    rows += [row("everything but", each.names[0], each) for each in found.without]
    rows += [row("one after the other", names, each) for names, each in found.steps()]
    for group, parts in found.parts.items():
        rows += [row(f"of the effect of {group}", " .. ".join(dict.fromkeys((p.names[0], p.names[-1]))), p) for p in parts]
    for pair in found.interactions:
        rows.append(
            dict.fromkeys((column["key"] for column in COLUMNS), "")
            | {
                "question": "a pair, beyond its sum", "swapped": " and ".join(pair.names), "share": 100 * pair.beyond_sum,
                "low": 100 * pair.interval[0], "high": 100 * pair.interval[1],
            }
        )  # fmt: skip
    return rows


def main(argv):
    del argv
    engine = _ENGINE.value
    cli.check_page(_HTML.value)
    unknown = [name for name in _CHOICES.value if name not in choices.CHOICES]
    if unknown:
        raise UserError(f"--choices={unknown[0]}: there is no such choice, there are {', '.join(choices.CHOICES)}")
    run = finished_run(Path(_CHECKPOINT.value))
    setup, params = run.setup, run.state.train.params
    if not choices.applicable(_CHOICES.value, setup.model, setup.recipe):
        given = ",".join(_CHOICES.value)
        raise UserError(f"--choices={given}: none changes anything in this model with recipe {setup.recipe.name}; choose others")
    policy = mt.prepare(params, setup.model, setup.recipe)
    prompts = held_out_prompts(setup, _PROMPTS.value)
    sampling = dataclasses.replace(setup.sampling, n=1)
    rollouts = sample_prompts(policy, params, prompts, jax.random.key(run.config.seed), sampling, engine)

    swaps = Swaps(policy, params, rollouts, sampling.truncation, _CHOICES.value)
    tokens_BT, mask_BT, sampled_BT = rollouts.sequences()
    strict_BT = np.asarray(mt.token_log_probs(policy, tokens_BT, sampling.truncation))
    ours = swaps(frozenset())
    same = np.array_equal(ours[np.asarray(rollouts.mask)], strict_BT[np.asarray(mask_BT)])
    print(f"with nothing swapped, the program has {'the' if same else 'NOT the'} bits of the strict policy")
    found = attribute(swaps, rollouts.log_probs, rollouts.mask, swaps.groups)
    print(found.text())

    name, folder = f"attribution_{engine}", Path(_RESULTS.value or "docs/benchmarks")
    results = write_results(
        folder / f"{name}.json",
        name=name,
        columns=COLUMNS,
        rows=table(found),
        provenance=cli.origin(),
        sections="question",
        title=f"Which operations explain the gap of the {engine} engine",
        notes=f"{found.tokens} tokens of {found.sequences} answers to held-out problems, sampled by the {engine} engine with the "
        f"weights of a finished run (recipe {setup.recipe.name}); our forward scores them with the operations of the column "
        '"swapped" in place of ours. Explained: 1 - gap left / gap with nothing swapped, by the mean |difference of log-probs|; '
        f"intervals by a bootstrap over answers. With nothing swapped the program has {'the' if same else 'not the'} bits of the "
        f"strict policy. The selection ended: {found.stopped}. The program ran {found.runs} times.",
    )
    print(f"written: {folder}/{name}.json")
    if _HTML.value:
        recipe, mask_BT = setup.recipe.name, np.asarray(mask_BT)
        about = dict(recipe=recipe, **{key: results["provenance"][key] for key in ("device", "versions")})
        first, second = (
            trace_of_log_probs(tokens_BT, log_probs, mask_BT, engine=about | dict(name=name, point=point))
            for name, point, log_probs in (("strict", "learner", strict_BT), (engine, "sampler", sampled_BT))
        )
        comparison, decode = compare(first, second), setup.task.tokenizer.decode
        write_report(_HTML.value, first, second, [], comparison, attribution=shares_of(results), decode=decode)
        print(f"written: {_HTML.value}")


if __name__ == "__main__":
    cli.run(main, required=("checkpoint",))
