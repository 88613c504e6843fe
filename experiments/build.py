"""From a configuration to the objects that a run is made of. Wrong values end in one line that names the field."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import minite_jax as mt
from experiments.baselines import choices
from minite_jax.errors import UserError
from minite_jax.learner import OptimizerConfig, grpo_loss, make_optimizer, make_update, negative_log_likelihood
from minite_jax.model.policy import check_recipe
from minite_jax.sampler import Rollouts, SamplingParams
from minite_jax.sampler.requests import pad_prompts
from minite_jax.sampler.sampling import generate
from minite_jax.tasks import TASKS, Task
from pallas_kernels.log_prob import Truncation

# What samples: the aligned policy, an engine of its own, or the aligned policy at another level of alignment.
ENGINES = ("aligned", "naive", *choices.LEVELS)
REWARDS = ("task", "random")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of. See `build`."""

    model: mt.ModelConfig
    recipe: "mt.precision.Recipe"
    task: Task
    sampling: SamplingParams
    engine: str
    sft_optimizer: object
    rl_optimizer: object
    sft_update: Callable
    rl_update: Callable


def _section(config, name: str, make: Callable):
    """Calls `make` with the fields of a section, such as "sft.optimizer"; what it refuses is reported with the section's name."""
    for part in name.split("."):
        config = config[part]
    try:
        return make(**dict(config))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"--config.{name}: {error}") from error


def _choice(name: str, value: str, choices) -> str:
    if value not in choices:
        raise UserError(f"--config.{name}={value}: choose one of {', '.join(choices)}")
    return value


def _between(name: str, value: float, low: float, high: float = math.inf, why: str = "") -> None:
    if low <= value <= high and (isinstance(value, int) or math.isfinite(value)):
        return
    if high < math.inf:
        allowed = f"must lie between {low} and {high}"
    else:
        allowed = f"must be {'' if isinstance(value, int) else 'finite and '}at least {low}"
    raise UserError(f"--config.{name}={value}: {allowed}{why}")


def _check_ranges(config, task: Task) -> None:
    """Refuses numbers that would end the run only when they are used, after minutes of warm-up perhaps."""
    _between("seed", config.seed, 0, 2**32 - 1)
    for name in ("steps", "extra_steps"):
        _between(f"sft.{name}", config.sft[name], 0)
    _between("rl.steps", config.rl.steps, 0)
    if config.sft.steps == config.rl.steps == 0:
        raise UserError("--config.sft.steps=0 and --config.rl.steps=0: there is nothing to do, one must be at least 1")
    for name, value, split in (
        ("sft.batch_size", config.sft.batch_size, "sft"),
        ("rl.prompts", config.rl.prompts, "rl"),
        ("eval.prompts", config.eval.prompts, "heldout"),
    ):
        _between(name, value, 1, task.size(split), f", the problems of split {split!r}")
    for name in ("every_sft", "every_rl"):
        _between(f"eval.{name}", config.eval[name], 0, why=" (0: only at the end of a phase)")
    for name in ("every", "keep"):
        _between(f"checkpoint.{name}", config.checkpoint[name], 1)
    for name in ("clip_low", "clip_high"):
        _between(f"rl.{name}", config.rl[name], 0)
    longest = task.max_completion_tokens
    _between("sampler.max_tokens", config.sampler.max_tokens, longest, why=", the length of the task's demonstrations")
    _choice("sft.until_trait", config.sft.until_trait, task.traits(task.encode(task.example("sft", 0).demonstration)))


def build(config) -> Setup:
    """Makes model shape, recipe, task, sampling parameters, optimisers and the two updates of a configuration.

    Raises:
      UserError: a value that does not fit; one line that names the field.
    """
    model = _section(config, "model", mt.ModelConfig)
    for name in ("first_plain", "last_plain"):
        _between(f"recipe.{name}", config.recipe.get(name, -1), -1, why=" (-1: as the recipe says)")
    own = {name: value for name, value in dict(config.recipe).items() if value != -1}  # -1: as the recipe says
    recipe = _section(dict(recipe=own), "recipe", mt.recipe)
    task_fields = dict(config.task)
    _choice("task.name", task_fields.pop("name"), TASKS)
    task = _section(dict(task=task_fields), "task", TASKS[config.task.name])
    sampler = dict(config.sampler)
    engine = _choice("sampler.engine", sampler.pop("engine"), ENGINES)
    sampler["n"] = sampler.pop("samples")
    sampling = _section(dict(sampler=sampler | dict(stop_ids=task.stop_ids)), "sampler", SamplingParams)
    _choice("rl.reward", config.rl.reward, REWARDS)
    _check_ranges(config, task)
    try:
        check_recipe(model, recipe)
    except ValueError as error:
        raise UserError(f"--config.recipe: {error}") from error
    if engine in choices.LEVELS:
        try:
            choices.check_level(engine, model, recipe)
        except UserError as error:
            raise UserError(f"--config.sampler.engine={engine}: {error}") from error
    if model.vocab_size < task.vocab_size:
        raise UserError(f"--config.model.vocab_size={model.vocab_size}: the task's tokenizer has {task.vocab_size} tokens")

    sft_optimizer = _section(config, "sft.optimizer", OptimizerConfig)
    rl_optimizer = _section(config, "rl.optimizer", OptimizerConfig)
    learner = dict(config.learner)
    micro_batches = learner["micro_batches"]
    for name, rows in (
        ("sft.batch_size", config.sft.batch_size),
        ("rl.prompts * sampler.samples", config.rl.prompts * sampling.n),
    ):
        if micro_batches < 1 or rows % micro_batches:
            raise UserError(f"--config.learner.micro_batches={micro_batches}: must divide {name}={rows}")
    return Setup(
        model=model,
        recipe=recipe,
        task=task,
        sampling=sampling,
        engine=engine,
        sft_optimizer=make_optimizer(sft_optimizer),
        rl_optimizer=make_optimizer(rl_optimizer),
        sft_update=_sft_update(sft_optimizer, **learner),
        rl_update=_rl_update(rl_optimizer, config.rl.clip_low, config.rl.clip_high, sampling.truncation, **learner),
    )


# Cached, so that several runs in one process (a study over seeds, a resumed run in a test) compile their updates once.
@functools.cache
def _sft_update(optimizer: OptimizerConfig, **learner):
    return make_update(make_optimizer(optimizer), lambda log_probs, _: negative_log_likelihood(log_probs), **learner)


@functools.cache
def _rl_update(optimizer: OptimizerConfig, clip_low: float, clip_high: float, truncation: Truncation, **learner):
    def loss(log_probs, batch):
        return grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages, clip_low=clip_low, clip_high=clip_high)

    return make_update(make_optimizer(optimizer), loss, truncation=truncation, **learner)


def sample_prompts(
    policy, params, prompts: list[list[int]], key, sampling: SamplingParams, engine: str, room: int = 0
) -> Rollouts:
    """Samples with the aligned sampler (from `policy`), at a level of alignment, or with the naive engine (from the float32
    `params`, which some levels read, too). `room`: see `pad_prompts`; with a task's longest prompt a run compiles one sampler.
    """
    tokens_PL, length_P = pad_prompts(prompts, policy.config.vocab_size, room)
    request_P = jnp.asarray(np.arange(len(prompts), dtype=np.uint32))
    if engine == "aligned":
        return generate(policy, tokens_PL, length_P, request_P, key, sampling)
    if engine in choices.LEVELS:
        policy = choices.level_policy(engine, policy, params)
        return generate(policy, tokens_PL, length_P, request_P, key, sampling)
    from experiments.baselines import naive_engine

    return naive_engine.generate(params, policy.config, policy.recipe, tokens_PL, length_P, request_P, key, sampling)
