"""Where do pairs of engines part, by how much, and which operation explains it? Table: engine_pairs.

    python -m experiments.engine_pairs --checkpoint=runs/quickstart                 # on a CPU: half an hour
    python -m experiments.engine_pairs --random_model=qwen3_30b_a3b --suffix=h200   # random weights, full width, on a GPU
    python -m experiments.engine_pairs --random_model=tiny_moe --random_tokens=8 --prompts=4 --pairs=attention   # tiny
    python -m experiments.tables --table=engine_pairs

The strict engine answers prompts. Both engines of a pair then score its tokens, as a learner does, each in a program of its own:
that is the gap and the price. Both are traced: that is the first difference. Last, the first engine runs with operations of the
second swapped in, by `minite_jax.diagnostics.attribute`: what that explains of the gap, and in which layers.

An engine is a set of `experiments.baselines.choices` and a way to compile. The file is written after every pair; `--minutes`
starts no pair after that time. What the file has of the same subject, device and revision is kept: run it again to go on.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import cli
from experiments.baselines import choices
from experiments.baselines.swaps import Swaps
from experiments.build import sample_prompts
from experiments.growing import GrowingTable
from experiments.subject import Subject, subject
from minite_jax.diagnostics.attribute import Attribution, attribute
from minite_jax.diagnostics.compare import Difference, first_difference
from minite_jax.diagnostics.gap import GAP, gap_metrics
from minite_jax.diagnostics.trace import trace_learner
from minite_jax.errors import UserError
from minite_jax.model import scored_tokens
from minite_jax.model.taps import PARTS, tensor_names
from minite_jax.sampler import Rollouts
from pallas_kernels import gpu

EXCESS = "xla_allow_excess_precision"


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine: our forward with choices on everywhere, in a program of its own.

    Attributes:
      choices: names out of `choices.CHOICES`.
      excess: whether XLA may leave roundings out; None: XLA's default, which is that it may.
    """

    choices: tuple[str, ...] = ()
    excess: bool | None = None

    @property
    def compiler_options(self) -> dict:
        return {} if self.excess is None else {EXCESS: self.excess}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two engines.

    Attributes:
      about: one line.
      first, second: the engines.
      swapped: choices of which the gap may be made; empty: those that the second has and the first has not.
    """

    about: str
    second: Engine
    first: Engine = Engine()
    swapped: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return self.swapped or tuple(name for name in self.second.choices if name not in self.first.choices)


def _strict_against(level: str) -> Pair:
    names = choices.LEVELS[level]
    about = choices.CHOICES[names[0]].about if len(names) == 1 else ", ".join(names)
    return Pair(f"strict, and {about}", Engine(names))


_XLA = choices.LEVELS["xla"]
PAIRS: dict[str, Pair] = {
    # What the operations are, and the roundings between them that XLA leaves out of such a program.
    "bf16 XLA": Pair("strict, and all operations by XLA in bfloat16", Engine(_XLA), swapped=(*_XLA, "excess_precision")),
    "fp8 operands": _strict_against("bf16_operands"),
    "attention": _strict_against("attention"),
    "bf16 router": _strict_against("bf16_router"),
    "K order": _strict_against("k_order"),
    "split K": _strict_against("split_k"),
    "scales": _strict_against("scales"),
    "TE scales": Pair(
        "TransformerEngine's plain rule for activations, one scale a row, and one for the batch",
        Engine(("te_scales", "tensor_scales")), Engine(("te_scales",)),
    ),
    "bf16 quantiser": _strict_against("bf16_quantiser"),
    "TE bf16 quantiser": Pair(
        "TransformerEngine's plain rule for activations, and the same with quotients in bfloat16",
        Engine(("te_scales", "bf16_quantiser")), Engine(("te_scales",)),
    ),
    "roundings left out": _strict_against("excess_precision"),
    "excess precision": Pair(
        "strict, compiled with XLA's excess precision forbidden, and allowed",
        Engine(excess=True), Engine(excess=False), ("excess_precision",),
    ),
    "XLA excess precision": Pair(
        "bf16 XLA, compiled with excess precision forbidden, and allowed",
        Engine(_XLA, excess=True), Engine(_XLA, excess=False), ("excess_precision",),
    ),
}  # fmt: skip

_PAIRS = flags.DEFINE_list("pairs", list(PAIRS), "Which pairs.")
_PROMPTS = cli.prompts_flag()  # answered once each; 256, or 16 of a random model
_ROUNDS = cli.rounds_flag()  # 3

COLUMNS = [
    {"key": "pair", "label": "pair", "unit": ""},
    {"key": "about", "label": "engines", "unit": ""},
    {"key": "gap", "label": "gap, mean", "unit": "nats"},
    {"key": "gap_max", "label": "largest", "unit": "nats"},
    {"key": "exact", "label": "tokens of equal bits", "unit": "%"},
    {"key": "k3", "label": "k3", "unit": "nats"},
    {"key": "first", "label": "first difference", "unit": ""},
    {"key": "traced", "label": "traced runs have the same log-probs", "unit": ""},
    {"key": "share", "label": "swapping explains", "unit": "%"},
    {"key": "low", "label": "95 % interval, from", "unit": "%"},
    {"key": "high", "label": "to", "unit": "%"},
    {"key": "selected", "label": "one after the other", "unit": ""},
    {"key": "time", "label": "time of the second, first = 1", "unit": ""},
]


@functools.cache
def _program(excess: bool | None):
    options = Engine(excess=excess).compiler_options
    score = lambda policy, tokens, truncation: scored_tokens(policy, tokens, truncation)[0]  # noqa: E731
    return jax.jit(score, static_argnums=2, compiler_options=options or None)


@dataclasses.dataclass
class Study:
    """One subject, the tokens that the strict engine gave, and what was found of engines so far.

    Attributes:
      tokens, mask: [B, T] of whole sequences, and [B, T - 1] of the sampled ones, as `Rollouts.sequences` has them.
    """

    subject: Subject
    rollouts: Rollouts

    def __post_init__(self):
        tokens_BT, mask_BT, _ = self.rollouts.sequences()
        self.tokens, self.mask = np.asarray(tokens_BT), np.asarray(mask_BT)
        length_B = np.asarray(self.rollouts.prompt_length) + np.asarray(self.rollouts.mask).sum(axis=1)
        self.present = np.arange(self.tokens.shape[1]) < length_B[:, None]
        self._known: tuple[Engine, tuple] | None = None

    def policy(self, engine: Engine):
        return choices.policy_with(engine.choices, self.subject.policy, self.subject.params)

    def run(self, engine: Engine) -> jax.Array:
        """Log-probs [B, T - 1] of the tokens by an engine."""
        return self.scored_as(engine, self.policy(engine))

    def scored_as(self, engine: Engine, policy) -> jax.Array:
        """Log-probs [B, T - 1] of the tokens by a policy, compiled as this engine is."""
        return _program(engine.excess)(policy, jnp.asarray(self.tokens), self.subject.sampling.truncation)

    def look(self, engine: Engine):
        """Log-probs and trace of an engine. Those of the last first engine are kept: most pairs have the same."""
        if self._known is None or self._known[0] != engine:
            log_probs = np.asarray(self.run(engine))
            names = [name for name in tensor_names(self.subject.policy) if name not in ("final/logits", "final/entropy")]
            if not gpu.multiplies_codes():  # there operands have no codes, and the trace would make some of its own
                names = [name for name in names if not name.endswith(PARTS)]
            trace = trace_learner(
                self.policy(engine), self.tokens, patterns=names, mask=self.present, hash_weights=False,
                truncation=self.subject.sampling.truncation, compiler_options=engine.compiler_options,
            )  # fmt: skip
            return log_probs, trace
        return self._known[1]

    def findings(self, pair: Pair) -> Iterator[dict]:
        """The row of a pair, piece by piece."""
        first = self.look(pair.first)
        self._known = (pair.first, first)
        second = self.look(pair.second)
        gap = gap_metrics(jnp.asarray(first[0]), jnp.asarray(second[0]), jnp.asarray(self.mask))
        yield {
            "about": pair.about, "gap": float(gap[f"{GAP}/mean"]), "gap_max": float(gap[f"{GAP}/max"]),
            "exact": 100 * float(gap[f"{GAP}/exact_fraction"]), "k3": float(gap["gen_kl_error"]),
        }  # fmt: skip
        yield {
            "first": place(first_difference(first[1], second[1])),
            "traced": " and ".join("yes" if self.traced_alike(*each) else "no" for each in (first, second)),
        }
        yield {"time": self.price(pair)}
        if float(gap[f"{GAP}/max"]) == 0:
            yield {"share": "", "low": "", "high": "", "selected": "no gap"}
            return
        found = self.attribute(pair, first[0], second[0])
        if found is None:
            yield {"share": "", "low": "", "high": "", "selected": "nothing swapped: the second's bits"}
            return
        low, high = found.everything.interval
        yield {"share": 100 * found.everything.share, "low": 100 * low, "high": 100 * high, "selected": selection(found)}

    def traced_alike(self, log_probs, trace) -> bool:
        """Whether the program that hands its tensors out gives the log-probs of the one that does not."""
        return np.array_equal(trace.read("final/log_prob")[0], log_probs[self.present[:, 1:]])

    def attribute(self, pair: Pair, first, second) -> Attribution | None:
        """What the second engine's operations explain, swapped into the first; None where the program that can be swapped has the
        second's bits with nothing swapped, so that its compiler explains all."""
        # What both have stays on.
        kept = tuple(name for name in pair.first.choices if name not in pair.groups)
        swaps = Swaps(
            self.subject.policy, self.subject.params, self.rollouts, self.subject.sampling.truncation,
            list(dict.fromkeys((*kept, *pair.groups))), lambda policy, *_: self.scored_as(pair.first, policy),
        )  # fmt: skip
        always = frozenset(part for name in kept for part in swaps.groups.get(name, ()))
        groups = {name: swaps.groups[name] for name in pair.groups if name in swaps.groups}
        ours = swaps(always)
        if np.array_equal(ours[self.mask], second[self.mask]):
            print("  nothing swapped: bits of the second engine", flush=True)
            return None
        off = np.abs(ours - first)[self.mask]
        same = np.array_equal(ours[self.mask], first[self.mask])
        print(f"  nothing swapped: {'bits' if same else f'within {off.mean():.2g} nats'} of the first engine", flush=True)
        return attribute(lambda parts: swaps(parts | always), second, self.mask, groups)

    def price(self, pair: Pair) -> float:
        """Time of the second engine's program over that of the first."""
        ratios = []
        for _ in range(_ROUNDS.value or 3):
            seconds = []
            for engine in (pair.first, pair.second):
                start = time.perf_counter()
                jax.block_until_ready(self.run(engine))
                seconds.append(time.perf_counter() - start)
            ratios.append(seconds[1] / seconds[0])
        return float(np.median(ratios))


def place(difference: Difference | None) -> str:
    """A first difference in words."""
    if difference is None:
        return "none"
    return f"{difference.name}: {100 * difference.differing:.3g} % of the numbers, relative {difference.relative:.2g}"


def selection(found: Attribution) -> str:
    """The forward selection in words, and the layers of what it chose."""
    steps = [f"{names} {100 * effect.share:.3g} %" for names, effect in found.steps()]
    span = lambda names: " .. ".join(dict.fromkeys((names[0], names[-1])))  # noqa: E731
    parts = [f"{span(each.names)} {100 * each.share:.3g} %" for located in found.parts.values() for each in located]
    return "; ".join(steps) + (f" (of its effect: {', '.join(parts)})" if parts else "") if steps else "nothing beyond chance"


def notes_of(study: Study, same: bool) -> str:
    """What a reader of the table has to know."""
    tokens, subject_ = int(study.mask.sum()), study.subject
    return (
        f"{subject_.about}. {tokens} tokens of {len(study.tokens)} answers, sampled by the strict engine at temperature "
        f"{subject_.sampling.temperature}; the strict learner has {'their bits' if same else 'NOT their bits'}. Both engines "
        "of a pair score them, in programs of their own. First difference: of traces of all these tokens and their prompts; "
        "numbers count, not their codes. Swapping: 1 - gap left / gap, with operations of the second engine in the first. That "
        "is a third program, compiled with the first's options; it need not explain all where XLA makes other sums of it. One "
        "after the other: forward selection, with the share of all chosen so far; of the effect of a chosen one, the share by "
        f"layer. Time: scoring programs, the median of {_ROUNDS.value or 3} turns; on a CPU no measure of a GPU."
    )


def main(argv):
    del argv
    start = time.perf_counter()
    unknown = [name for name in _PAIRS.value if name not in PAIRS]
    if unknown:
        raise UserError(f"--pairs={unknown[0]}: there is no such pair, there are {', '.join(PAIRS)}")
    asked = subject(_PROMPTS.value or (16 if flags.FLAGS.random_model else 256), samples=1)
    policy = asked.policy
    wanted = {each for each in _PAIRS.value if choices.applicable(PAIRS[each].groups, policy.config, policy.recipe)}
    rollouts = sample_prompts(policy, asked.params, asked.prompts, asked.key, asked.sampling, "aligned")
    study = Study(asked, rollouts)
    same = np.array_equal(np.asarray(study.run(Engine()))[study.mask], np.asarray(rollouts.sequences()[2])[study.mask])
    print(f"{int(study.mask.sum())} tokens; their bits are {'' if same else 'NOT '}the strict learner's", flush=True)

    table = GrowingTable(
        "engine_pairs", columns=COLUMNS, notes=notes_of(study, same), start=start,
        title="Engine pairs: gap, first difference, attribution",
    )  # fmt: skip
    return table.fill([each for each in PAIRS if each in wanted], lambda each: study.findings(PAIRS[each]))


if __name__ == "__main__":
    cli.run(main)
