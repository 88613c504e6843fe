"""Where the time of a learner's update and of one decoded token goes, kernel by kernel.

A model of full width and few layers runs the programs of training themselves: `minite_jax.learner.make_update` and
`minite_jax.sampler`'s `generate`. The clock gives the time of a whole step, the profiler the kernels' shares of it.
"""

import collections
import dataclasses
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minite_jax as mt
from experiments.kernels import operations, trace
from minite_jax.learner import Batch, OptimizerConfig, grpo_loss, init_state, make_optimizer, make_update
from minite_jax.metrics.plots import new_figure, save_figure
from minite_jax.model.config import ModelConfig
from minite_jax.sampler.requests import pad_prompts
from minite_jax.sampler.sampling import generate

COLUMNS = (
    dict(key="program", label="program", unit=""),
    dict(key="part", label="part of the model", unit=""),
    dict(key="kernel", label="kernel", unit=""),
    dict(key="launches", label="launches", unit=""),
    dict(key="time", label="time", unit="us"),
    dict(key="share", label="share of the step", unit="%"),
)
NOTES = (
    "Each program is a table. The first rows are the whole step by the clock and the time in which no kernel ran; parts of the "
    "model are the sums of their kernels, and the kernels that take most stand below. `pack` quantises the new weights. On a "
    "Hopper GPU NVFP4 matmuls are fp8 or bfloat16 arithmetic on 4-bit values."
)
_KERNELS_SHOWN = 14
_IDLE = "no kernel runs"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      rows: sequences of the learner's batch.
      length: tokens of each.
      decode_rows: sequences that are decoded together.
      context: tokens of each prompt.
      steps: (a, b) new tokens of the two runs whose difference is the time of b - a decoded tokens.
      repeats: measurements of a time; the median counts.
      remat: recompute layers in the backward.
    """

    rows: int = 16
    length: int = 1024
    decode_rows: int = 64
    context: int = 1024
    steps: tuple[int, int] = (16, 48)
    repeats: int = 5
    remat: bool = False


TINY = Settings(rows=2, length=16, decode_rows=2, context=8, steps=(1, 3), repeats=1)


def in_words(settings: Settings) -> str:
    """What an update and a decoded token are, for a title."""
    first, last = (settings.context + new for new in settings.steps)
    return f"updates of {settings.rows} x {settings.length:,} tokens, decoded tokens behind {first:,} to {last:,} others"


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: seconds by the clock and, by (part, kernel), launches and seconds; `busy`: seconds in which a kernel ran."""

    program: str
    seconds: float
    busy: float
    kernels: dict[tuple[str, str], tuple[float, float]]
    tokens: int


def measure(config: ModelConfig, recipe: Any, settings: Settings) -> Iterator[Step]:
    """The learner's step and the decode step of a model with random weights in a recipe."""
    params = jax.jit(lambda key: mt.init_params(config, key))(jax.random.key(0))
    policy = mt.prepare(params, config, recipe)
    yield _decode(policy, settings)
    yield _learner(params, policy, settings)


def learner(remat: bool) -> tuple[Any, Any]:
    """The optimiser and the jitted update of GRPO, as training has them."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    loss = lambda log_probs, batch: grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages)  # noqa: E731
    return optimizer, make_update(optimizer, loss, remat=remat)


def _learner(params: dict, policy: mt.Policy, settings: Settings) -> Step:
    optimizer, update = learner(settings.remat)
    rng = np.random.default_rng(0)
    shape = (settings.rows, settings.length)
    tokens = jnp.asarray(rng.integers(0, policy.config.vocab_size, shape), jnp.int32)
    batch = Batch(
        tokens=tokens,
        mask=jnp.ones((shape[0], shape[1] - 1), bool),
        sampler_log_probs=mt.token_log_probs(policy, tokens),
        advantages=jnp.asarray(rng.standard_normal(shape[0]), jnp.float32),
    )
    carry = [init_state(params, optimizer), policy]
    program = update.lower(*carry, batch).compile()

    def run():
        carry[0], carry[1], metrics = program(*carry, batch)  # the state is donated
        return jax.block_until_ready(metrics)

    run()
    seconds = statistics.median(_clock(run) for _ in range(settings.repeats))
    found = trace.record(run, program)
    return Step(f"update, {policy.recipe.name}", seconds, found.busy, found.by(_key), tokens.size)


def _decode(policy: mt.Policy, settings: Settings) -> Step:
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, policy.config.vocab_size, (settings.decode_rows, settings.context))
    tokens, lengths = (jnp.asarray(x) for x in pad_prompts(prompts.tolist(), policy.config.vocab_size))
    ids = jnp.arange(len(prompts), dtype=jnp.uint32)
    seconds, traces = [], []
    for steps in settings.steps:
        params = mt.SamplingParams(max_tokens=steps)
        program = generate.lower(policy, tokens, lengths, ids, jax.random.key(0), params).compile()
        run = lambda program=program: jax.block_until_ready(program(policy, tokens, lengths, ids, jax.random.key(0)))  # noqa: E731
        run()
        seconds.append(statistics.median(_clock(run) for _ in range(settings.repeats)))
        traces.append(trace.record(run, program))
    first, second = traces
    count = settings.steps[1] - settings.steps[0]
    kernels = {key: (launches / count, spent / count) for key, (launches, spent) in difference(first, second).items()}
    name = f"decoded token, batch {settings.decode_rows}, {policy.recipe.name}"
    return Step(name, (seconds[1] - seconds[0]) / count, (second.busy - first.busy) / count, kernels, settings.decode_rows)


def difference(first: trace.Trace, second: trace.Trace) -> dict[tuple[str, str], tuple[int, float]]:
    """Launches and seconds by (part, kernel) that the second has and the first, a shorter run of the same, has not."""

    def more(key: Callable[[trace.Kernel], Any]) -> dict:
        less, found, none = first.by(key), second.by(key), (0, 0.0)
        return {k: tuple(b - a for a, b in zip(less.get(k, none), found.get(k, none), strict=True)) for k in less | found}

    # A longer run has no fewer launches: the parts of these kernels were told in one of the two alone, and so are not known.
    unsure = {name for (_, name), (launches, _) in more(_key).items() if launches < 0}
    found = more(lambda kernel: (operations.OTHER if kernel.name in unsure else kernel.part, kernel.name))
    return {key: each for key, each in found.items() if each[0] > 0}


def _key(kernel: trace.Kernel) -> tuple[str, str]:
    return kernel.part, kernel.name


def _clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def parts(step: Step) -> dict[str, float]:
    """Seconds of each part of the model, the longest first."""
    found: dict[str, float] = collections.defaultdict(float)
    for (part, _), (_, seconds) in step.kernels.items():
        found[part] += seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rows(step: Step) -> list[dict]:
    """The rows of a step's table."""

    def row(part, kernel, launches, seconds):
        share = 100 * seconds / step.seconds
        return dict(program=step.program, part=part, kernel=kernel, launches=launches, time=1e6 * seconds, share=share)

    by_time = sorted(step.kernels.items(), key=lambda item: -item[1][1])
    return [
        row(f"whole step, {step.tokens / step.seconds:,.0f} tokens/s", "", "", step.seconds),
        row(_IDLE, "", "", max(0.0, step.seconds - step.busy)),
        *(row(part, "all", "", seconds) for part, seconds in parts(step).items()),
        *(row(part, kernel, launches, seconds) for (part, kernel), (launches, seconds) in by_time[:_KERNELS_SHOWN]),
    ]


def draw(results: Mapping[str, Any], path: Path) -> Path:
    """A bar for each step, cut into the parts of the model.

    Args:
      results: the table (`minite_jax.metrics.results`) of `rows`, so that a picture can be made anew without a GPU.
      path: the PNG to write, under a temporary name first.
    """
    by_program: dict[str, list[dict]] = collections.defaultdict(list)
    for row in results["rows"]:
        by_program[row["program"]].append(row)
    times = {
        program: {row["part"]: row["time"] / 1e3 for row in rows if row["kernel"] == "all" or row["part"] == _IDLE}
        for program, rows in by_program.items()
    }
    in_order = [name for part in (*operations.PARTS, operations.OTHER) for name in (part, f"{part} backward")]
    names = [*(name for name in in_order if any(name in each for each in times.values())), _IDLE]
    # A part and its backward have one colour, the backward is hatched.
    look = {name: dict(color=f"C{in_order.index(name) // 2 % 10}") for name in names if name != _IDLE}
    look[_IDLE] = dict(color="#dddddd")
    for name in names:
        look[name] |= dict(hatch="//" if name.endswith("backward") else "", edgecolor="white", linewidth=0.4)
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for program in times:
        kinds[program.split(",")[0]].append(program)
    with new_figure(figure_figsize=(9, 2.2 + 1.1 * len(times))) as figure:
        origin = results["provenance"]
        revision = origin["revision"][:12] + (" with local changes" if origin.get("dirty") else "")
        title = textwrap.fill(f"{results['title']}, revision {revision}", 90)
        figure.suptitle(title, fontweight="bold", fontsize="medium", x=0.01, ha="left")
        all_axes = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
        for axes, (kind, programs) in zip(all_axes, kinds.items(), strict=True):
            for y, program in enumerate(programs):
                left = 0.0
                for name in names:
                    width = times[program].get(name, 0.0)
                    axes.barh(y, width, left=left, **look[name])
                    left += width
            axes.set_yticks(range(len(programs)), [program.split(", ", 1)[-1] for program in programs])
            axes.invert_yaxis()
            axes.set_title(f"One {kind}" if kind != "update" else "One update of the learner")
            axes.set_xlabel("ms")
            axes.grid(axis="y", visible=False)
        handles = [all_axes[0].barh(0, 0, **look[name]) for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize="small")
        return save_figure(figure, path)
