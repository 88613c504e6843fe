"""What a training run shows while it runs: a line per step, a progress bar, and a polite Ctrl-C."""

import logging
import signal

import jax

import minite_jax as mt
from minite_jax.metrics import names
from minite_jax.optional import require
from pallas_kernels import dispatch

# Column title, metric, format.
_COLUMNS = (
    ("loss", names.LOSS, "8.4f"),
    ("reward", names.REWARD_MEAN, "7.3f"),
    ("gap mean", names.GAP_MEAN, "9.2e"),
    ("gap max", names.GAP_MAX, "9.2e"),
    ("exact", names.GAP_EXACT_FRACTION, "6.4f"),
    ("tokens", names.TOKENS_COMPARED, "7.0f"),
    ("entropy", names.ENTROPY, "8.4f"),
    ("|grad|", names.GRAD_NORM, "8.4f"),
    ("greedy", names.ACCURACY_GREEDY, "7.3f"),
    ("T=1", names.ACCURACY_SAMPLED, "7.3f"),
)
_HEADER_EVERY = 20


class Console:
    """Prints a run's steps above a progress bar.

    Args:
      total: steps that the run will do.
    """

    def __init__(self, total: int):
        self._bar = require("tqdm", "experiments").tqdm(total=total, unit="step", dynamic_ncols=True, leave=False)
        self._lines = 0

    def describe(self, setup, workdir, resumed_step: int | None, restarted: bool) -> None:
        """Says what will run: the recipe in words, the model, the engine, the device; and whether it goes on or starts over."""
        device = jax.devices()[0]
        model = setup.model
        self.note(f"model    {mt.num_params(model):,} parameters, {model.num_hidden_layers} layers, {model.num_experts} experts")
        self.note(f"recipe   {setup.recipe.name}: {setup.recipe.description}")
        self.note(
            f"sampler  {setup.engine} engine, {setup.sampling.n} samples a prompt, temperature {setup.sampling.temperature}"
        )
        self.note(f"device   {device.device_kind} x {jax.device_count()}, jax {jax.__version__}")
        if jax.default_backend() == "gpu":
            self.note("kernels  chosen operation by operation; each says which when it is compiled")
        else:
            self.note(f"kernels  {dispatch.resolve('every operation', None)} implementation")
            logging.getLogger("pallas_kernels").setLevel(logging.WARNING)  # said above, once for all of them
        where = f"{workdir}" if resumed_step is None else f"{workdir}, resumed at step {resumed_step}"
        if restarted:
            where += ", begun again: the run that was here left no checkpoint"
        self.note(f"workdir  {where}")
        self._bar.update(resumed_step or 0)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text)

    def extend(self, steps: int) -> None:
        """The run has that many more steps than was thought."""
        self._bar.total += steps

    def step(self, step: int, row: dict) -> None:
        """Prints one step's line."""
        if self._lines % _HEADER_EVERY == 0:
            self.note(" ".join(["phase", " step", *(title.rjust(int(form.split(".")[0])) for title, _, form in _COLUMNS)]))
        self._lines += 1
        cells = [format(row[key], form) if key in row else " " * int(form.split(".")[0]) for _, key, form in _COLUMNS]
        self.note(" ".join([f"{row[names.PHASE]:>5}", f"{step:5d}", *cells]).rstrip())
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class Interrupt:
    """Turns the first Ctrl-C into a stop after the step that runs; a second one stops at once."""

    def __init__(self):
        self._asked = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, *_) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def check(self) -> None:
        """Raises InterruptedError if Ctrl-C was pressed."""
        if self._asked:
            raise InterruptedError
