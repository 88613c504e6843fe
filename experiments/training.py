"""The training run: supervised warm-up, then GRPO, with checkpoints, evaluation and metrics. `train.py` and `sft.py` call it."""

import json
import os
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.build import Setup, build, sample_prompts
from experiments.console import Console, Interrupt
from experiments.evaluation import evaluate
from minite_jax import checkpoint
from minite_jax.checkpoint.config import differing_fields, to_plain
from minite_jax.diagnostics import EXACT, THRESHOLDS, gap_warnings, token_gap
from minite_jax.errors import UserError
from minite_jax.files import replaced
from minite_jax.learner import TrainState, init_state
from minite_jax.metrics import names
from minite_jax.metrics.plots import plot_metrics
from minite_jax.metrics.summary import run_gap
from minite_jax.metrics.writer import FILE_NAME, make_writer, read_metrics
from minite_jax.model import init_params, pack
from minite_jax.optional import require
from minite_jax.rollout import choose_problems, demonstration_batch, reward_rollouts, rollout_batch

SFT, RL = 0, 1

# Fields that a resumed run may change: they touch no number of the steps already done, nor the bits of those to come. Not
# eval.prompts: what an evaluation finds decides whether the warm-up is extended.
_MAY_CHANGE_ON_RESUME = ("rl.steps", "eval.every_sft", "eval.every_rl", "checkpoint", "tensorboard", "plot_beside")
# A warm-up serves any run of the same model, recipe and task.
_MAY_DIFFER_FROM_WARMUP = (
    "seed",
    "init_from",
    "plot_beside",
    "sft",
    "rl",
    "sampler",
    "learner",
    "eval",
    "checkpoint",
    "tensorboard",
)
# How often an extended warm-up looks whether it is good enough.
_EXTEND_BY = 100


@flax.struct.dataclass
class RunState:
    """What a checkpoint holds.

    Attributes:
      train: masters, optimiser, number of updates over all phases.
      phase: [] int32, `SFT` or `RL`.
      phase_step: [] int32, updates done in this phase.
    """

    train: TrainState
    phase: jax.Array
    phase_step: jax.Array


_pack = jax.jit(pack, static_argnums=(1, 2))


class Run:
    """One training run in one folder."""

    def __init__(self, config, workdir: str | os.PathLike):
        self.config = config
        self.workdir = Path(workdir)
        self.setup: Setup = build(config)
        self._beside_engine = _engine_of(Path(config.plot_beside)) if config.plot_beside else ""
        self.resumed, self.restarted = _look_into(self.workdir, config)
        self.key = jax.random.key(config.seed)
        self.state = _committed(self._first_state())
        if self.resumed:
            self.state = checkpoint.restore(self.workdir, self.state, config, may_differ=_MAY_CHANGE_ON_RESUME)
        elif config.init_from:
            self._start_from_warmup(Path(config.init_from))
        self._evaluation: tuple[int, dict] = (-1, {})  # the step it was made at
        self._warned: set[str] = set()  # metrics

    def _first_state(self) -> RunState:
        params = init_params(self.setup.model, self.key)
        return RunState(train=init_state(params, self.setup.sft_optimizer), phase=jnp.int32(SFT), phase_step=jnp.int32(0))

    def _start_from_warmup(self, folder: Path) -> None:
        flag, plain = f"--config.init_from={folder}", to_plain(self.config)
        if not folder.is_dir():
            raise UserError(f"{flag}: there is no such folder; give the --workdir of a run whose warm-up is done")
        if checkpoint.latest_step(folder / "warmup") is None:
            raise UserError(
                f"{flag}: that run has no finished warm-up; let it end there, or drop --config.init_from to warm up anew"
            )
        try:
            stored = checkpoint.read_config(folder / "warmup")
            for section in ("model", "recipe", "task"):
                changes = differing_fields({section: stored.get(section, {})}, {section: plain[section]})
                if changes:
                    differ = ", ".join(f"{field} {there} there and {here} here" for field, (there, here) in changes.items())
                    remedy = f"use its {section}, or drop --config.init_from to warm up anew"
                    raise UserError(f"{flag}: its warm-up has another {section} ({differ}): {remedy}")
            warm = checkpoint.restore(folder / "warmup", self.state, self.config, may_differ=_MAY_DIFFER_FROM_WARMUP)
        except checkpoint.CheckpointError as error:
            raise UserError(f"{flag}: {error}; or drop --config.init_from to warm up anew") from error
        # Supervised training goes on with a fresh optimiser; with no supervised steps, reinforcement learning begins.
        restarted = init_state(warm.train.params, self.setup.sft_optimizer)
        self.state = _committed(
            RunState(train=restarted.replace(step=warm.train.step), phase=jnp.int32(SFT), phase_step=jnp.int32(0))
        )

    @property
    def step(self) -> int:
        return int(self.state.train.step)

    def __call__(self) -> dict:
        """Runs to the end, or to an interrupt, and returns the last evaluation."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        # The configuration first: whoever finds metrics without a checkpoint can tell by it whether they are this run's.
        write_json(self.workdir / "config.json", to_plain(self.config))
        resume_step = self.step if self.resumed else 0 if self.restarted else None
        self.writer = make_writer(self.workdir, resume_step=resume_step, tensorboard=self.config.tensorboard)
        self.console = Console(total=self.config.sft.steps + self.config.rl.steps)
        self.console.describe(self.setup, self.workdir, self.step if self.resumed else None, self.restarted)
        self.policy = _pack(self.state.train.params, self.setup.model, self.setup.recipe)
        try:
            with Interrupt() as self.interrupt:
                if int(self.state.phase) == SFT:
                    self._supervised()
                if int(self.state.phase) == RL:
                    self._reinforcement()
        except InterruptedError:
            self._save()
            raise UserError(f"interrupted after step {self.step}, which is saved: run the same command again to go on") from None
        finally:
            self.writer.close()
            self.console.close()
        self._summarize()
        return self._evaluate()

    def _summarize(self) -> None:
        """Draws the plots and prints what the run came to."""
        labels = (f"{self.setup.engine} sampler", f"{self._beside_engine} sampler")
        about = f"recipe {self.setup.recipe.name}"
        plots = plot_metrics(self.workdir, also=self.config.plot_beside or None, labels=labels, about=about)
        print(f"held-out: {_short(self._evaluate())}")
        if (gap := run_gap(read_metrics(self.workdir))) is not None:
            print(
                f"gap between sampler and learner over {gap.updates} updates, {gap.tokens} tokens: largest "
                f"{gap.largest:.3g} nats, equal bits {100 * gap.equal_bits:.4g} %"
            )
        print(f"plots: {', '.join(str(path) for path in plots)}")

    def _supervised(self) -> None:
        """Warm-up. Ends in the reinforcement phase, or where it stands if there is none."""
        config, task = self.config.sft, self.setup.task
        while self._warmup_goes_on():
            examples = choose_problems(task, "sft", config.batch_size, seed=self.config.seed, step=int(self.state.phase_step))
            batch = demonstration_batch(task, examples)
            seconds, metrics = self._update(self.setup.sft_update, batch)
            tokens = int(np.asarray(batch.mask).sum())
            self._finish_step("sft", metrics | {names.LEARNER_SPEED: tokens / seconds}, last=self._at_warmup_end())
        self.console.note(f"after {int(self.state.phase_step)} supervised steps: {_short(self._evaluate())}")
        self._save()
        if config.steps and checkpoint.latest_step(self.workdir / "warmup") is None:
            checkpoint.save(self.workdir / "warmup", self.step, self.state, self.config, keep=1)
        if self.config.rl.steps:
            fresh = init_state(self.state.train.params, self.setup.rl_optimizer)
            self.state = _committed(
                RunState(train=fresh.replace(step=self.state.train.step), phase=jnp.int32(RL), phase_step=jnp.int32(0))
            )

    def _at_warmup_end(self) -> bool:
        """Whether the warm-up has done its steps, or a whole extension of them."""
        extra = int(self.state.phase_step) - self.config.sft.steps
        return extra >= 0 and extra % _EXTEND_BY == 0

    def _warmup_goes_on(self) -> bool:
        config = self.config.sft
        if not self._at_warmup_end():
            return True
        extra = int(self.state.phase_step) - config.steps
        if not config.steps or extra >= config.extra_steps:
            return False
        # Evaluation is a function of (weights, seed), so a resumed run decides as the first one did. NaN: none shows the trait.
        accurate = self._evaluate().get(f"eval/accuracy_{config.until_trait}", float("nan")) >= config.until_accuracy
        if not accurate:
            self.console.extend(_EXTEND_BY)
        return not accurate

    def _reinforcement(self) -> None:
        config, setup, seed = self.config.rl, self.setup, self.config.seed
        while int(self.state.phase_step) < config.steps:
            examples = choose_problems(setup.task, "rl", config.prompts, seed=seed, step=self.step)
            prompts = [setup.task.encode(example.prompt) for example in examples]
            key = jax.random.fold_in(self.key, self.step)
            start = time.perf_counter()
            rollouts = sample_prompts(
                self.policy, self.state.train.params, prompts, key, setup.sampling, setup.engine, setup.task.max_prompt_tokens
            )
            sampled = int(np.asarray(rollouts.mask).sum())
            sampling_seconds = time.perf_counter() - start

            rewards = reward_rollouts(setup.task, examples, rollouts)
            if config.reward == "random":
                rewards = np.random.default_rng([seed, self.step, 1]).integers(0, 2, rewards.shape).astype(np.float32)
            batch = rollout_batch(rollouts, rewards, normalize=config.normalize_advantages)
            seconds, metrics = self._update(setup.rl_update, batch)
            metrics |= {
                names.REWARD_MEAN: float(rewards.mean()),
                names.SAMPLER_SPEED: sampled / sampling_seconds,
                names.LEARNER_SPEED: sampled / seconds,
            }
            self._warn_of_a_gap(metrics, batch)
            self._finish_step("rl", metrics, last=int(self.state.phase_step) == config.steps)

    def _warn_of_a_gap(self, metrics: dict, batch) -> None:
        """Once a run for each metric out of its bounds, with the token of the largest gap."""
        thresholds = (EXACT if self.setup.engine == "aligned" else ()) + THRESHOLDS
        found = {name: text for name, text in gap_warnings(metrics, thresholds).items() if name not in self._warned}
        self._warned |= found.keys()
        for text in found.values():
            self.console.note(f"warning: step {self.step - 1}: {text}")
        if found:
            row, column = int(metrics[names.GAP_WORST_ROW]), int(metrics[names.GAP_WORST_COLUMN])
            sampled = float(batch.sampler_log_probs[row, column])
            # Column t of the log-probs belongs to token t + 1.
            tokens = np.asarray(batch.tokens)[:, 1:]
            worst = token_gap(
                row, column, metrics[names.GAP_WORST_LOG_PROB], sampled, tokens, decode=self.setup.task.tokenizer.decode
            )
            self.console.note(f"         the largest gap: {worst}")

    def _update(self, update, batch) -> tuple[float, dict]:
        """One update. Returns its seconds and its metrics as Python numbers."""
        start = time.perf_counter()
        train, self.policy, metrics = update(self.state.train, self.policy, batch)
        metrics = {name: float(value) for name, value in metrics.items()}
        seconds = time.perf_counter() - start
        self.state = self.state.replace(train=train, phase_step=self.state.phase_step + 1)
        if not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"]):
            raise UserError(
                f"step {self.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; the weights were left alone. "
                f"Start a new --workdir with {self._how_to_train_more_gently()}"
            )
        return seconds, metrics

    def _how_to_train_more_gently(self) -> str:
        """Flags of a new run. Resuming does not help: it refuses another learning rate, and the same one repeats every bit."""
        if int(self.state.phase) == SFT:
            warmup, flags = self.config.init_from, "a lower --config.sft.optimizer.learning_rate"
        else:
            own = checkpoint.latest_step(self.workdir / "warmup") is not None
            warmup, flags = self.workdir if own else self.config.init_from, "a lower --config.rl.optimizer.learning_rate"
            flags += ", --config.sft.steps=0" if warmup else ""
        return flags + (f" and --config.init_from={warmup}" if warmup else "")

    def _evaluate(self) -> dict:
        """Held-out accuracy of the policy as it stands; computed once per step."""
        step, evaluation = self._evaluation
        if step != self.step:
            evaluation = evaluate(
                self.setup,
                self.policy,
                num_prompts=self.config.eval.prompts,
                batch_prompts=self.config.rl.prompts,
                seed=self.config.seed,
            )
            self._evaluation = (self.step, evaluation)
        return evaluation

    def _finish_step(self, phase: str, metrics: dict, *, last: bool) -> None:
        """Evaluates and saves if it is time, writes the step's line, and stops if Ctrl-C was pressed."""
        due = lambda every: last or (every > 0 and int(self.state.phase_step) % every == 0)  # noqa: E731
        row = {names.PHASE: phase, **metrics}
        if due(self.config.eval.every_sft if phase == "sft" else self.config.eval.every_rl):
            row |= self._evaluate()
        self.writer.write(self.step - 1, row)
        self.console.step(self.step - 1, row)
        if due(self.config.checkpoint.every):
            self._save()
        self.interrupt.check()

    def _save(self) -> None:
        if checkpoint.latest_step(self.workdir) != self.step:
            checkpoint.save(self.workdir, self.step, self.state, self.config, keep=self.config.checkpoint.keep)


def stored_config(folder: Path):
    """The configuration that a folder's newest checkpoint was saved with."""
    config = require("ml_collections", "experiments").ConfigDict(checkpoint.read_config(folder))
    config.plot_beside = ""  # that run need not be here
    return config


def stored_run(folder: Path) -> Run:
    """The run of a folder as its newest checkpoint left it, by the configuration that it was saved with: for whoever reads it and
    trains no further."""
    return Run(stored_config(folder), folder)


def finished_run(folder: Path, config=None) -> Run:
    """`stored_run` for scripts whose `--checkpoint` must be one; with a configuration, the run by that.

    Raises:
      UserError: the folder has no checkpoint.
    """
    if checkpoint.latest_step(folder) is None:
        raise UserError(f"--checkpoint={folder} holds no checkpoint: give the workdir of a finished run")
    return stored_run(folder) if config is None else Run(config, folder)


def _look_into(workdir: Path, config) -> tuple[bool, bool]:
    """Returns whether a run goes on from a checkpoint there, and whether it replaces one that left no checkpoint.

    Raises:
      UserError: the folder cannot be one, or holds another run.
    """
    for path in (workdir, *workdir.parents):
        if path.is_file():
            raise UserError(f"--workdir={workdir}: {path} is a file: give a folder")
    if checkpoint.latest_step(workdir) is not None:
        return True, False
    kept = workdir / "config.json"
    if kept.exists():
        try:
            same = not differing_fields(json.loads(kept.read_text()), to_plain(config))
        except (ValueError, AttributeError):  # no JSON, or no object
            same = False
        if same:
            return False, True
        raise UserError(
            f"{kept} is of another configuration, whose run left no checkpoint: nothing was saved there, delete {workdir} or "
            f"choose another --workdir"
        )
    if (workdir / FILE_NAME).exists():
        raise UserError(f"{workdir} has a {FILE_NAME} without a config.json: it is no run's folder, choose another --workdir")
    return False, False


def _engine_of(folder: Path) -> str:
    """The sampler's engine of the run in `folder`, which must have metrics to draw."""
    try:
        engine = json.loads((folder / "config.json").read_text())["sampler"]["engine"]
        if read_metrics(folder):
            return engine
        reason = "no step is done yet"
    except (OSError, ValueError, KeyError, TypeError, UserError):
        reason = f"it lacks a readable config.json or {FILE_NAME}"
    raise UserError(f"--config.plot_beside={folder} is no run's folder, {reason}: give the --workdir of another run")


def _committed(state: RunState) -> RunState:
    """The same arrays, bound to the devices that they lie on, as those of a restored checkpoint are.

    jax compiles anew for arrays that differ in this: a study of fresh and restored runs would compile every program twice.
    """
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def _short(evaluation: dict) -> str:
    return ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.items())


def write_json(path: Path, content: dict) -> None:
    """Writes a JSON file, which is whole or not there."""
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
