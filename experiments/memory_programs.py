"""The programs whose memory is estimated and measured, and the parts that a device holds.

One `Case` names a program: a learner's update or a sampler's `generate`. Its abstract arguments come from the functions that make
the real ones (`jax.eval_shape`), so that no size is written down twice.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minite_jax as mt
from experiments.kernels.step import learner
from minite_jax.diagnostics.memory import Footprint, footprint, nbytes
from minite_jax.errors import UserError
from minite_jax.learner import Batch, init_state
from minite_jax.model.cache import init_cache
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import abstract_params
from minite_jax.model.policy import pack
from minite_jax.precision.recipe import RECIPES, Recipe
from minite_jax.sampler.sampling import generate
from pallas_kernels import dispatch

MODELS = ("qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b", "tiny_moe", "tiny_dense")
PROGRAMS = ("update", "sample")
HOPPER = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program on one device.

    Attributes:
      program: "update" or "sample".
      model: a function of `minite_jax.model`.
      layers: how many; 0: all that the model has.
      recipe: precision recipe.
      rows: sequences of the update's batch, or that are decoded together.
      length: tokens of each sequence, or of each prompt.
      new_tokens: sampled tokens of each sequence; 0 for an update.
      samples: of each prompt.
      remat: recompute layers in the backward.
      expert_devices: experts lie on so many devices in equal parts, and this is one of them.
    """

    program: str
    model: str
    layers: int
    recipe: str
    rows: int
    length: int
    new_tokens: int = 0
    samples: int = 1
    remat: bool = False
    expert_devices: int = 1

    def __post_init__(self):
        for name, value, known in (
            ("program", self.program, PROGRAMS),
            ("model", self.model, MODELS),
            ("recipe", self.recipe, RECIPES),
        ):
            if value not in known:
                raise UserError(f"there is no {name} {value!r}: choose from {', '.join(known)}")
        if self.rows % self.samples:
            raise UserError(f"{self.rows} rows are no multiple of {self.samples} samples of each prompt")

    @property
    def name(self) -> str:
        """As `--cases` names it: update-qwen3_30b_a3b-2-nvfp4-64x1024[-remat]."""
        shape = f"{self.rows}x{self.length}" + (f"+{self.new_tokens}" if self.new_tokens else "")
        return "-".join(
            [self.program, self.model, str(self.config.num_hidden_layers), self.recipe, shape, *["remat"] * self.remat]
        )

    @property
    def config(self) -> ModelConfig:
        """The model as this device has it: its own experts, all the rest."""
        changes = {} if not self.layers else {"num_hidden_layers": self.layers}
        config = getattr(mt.model, self.model)(**changes)
        if self.expert_devices > 1:
            if config.num_experts % self.expert_devices:
                raise UserError(f"{config.num_experts} experts are not the same number on each of {self.expert_devices} devices")
            config = dataclasses.replace(config, num_experts=config.num_experts // self.expert_devices)
        return config

    @property
    def tokens(self) -> int:
        """Of the update's batch, or of all sequences when they are full."""
        return self.rows * (self.length + self.new_tokens)


def program(case: Case) -> tuple[Any, tuple, dict]:
    """A case's jitted function, its abstract arguments, and its static ones."""
    config, recipe = case.config, mt.recipe(case.recipe)
    params, policy = _weights(config, recipe)
    array = jax.ShapeDtypeStruct
    if case.program == "sample":
        prompts = case.rows // case.samples
        arguments = (
            policy, array((prompts, case.length), jnp.int32), array((prompts,), jnp.int32), array((prompts,), jnp.uint32),
            jax.eval_shape(lambda: jax.random.key(0)),
        )  # fmt: skip
        return generate, arguments, dict(params=mt.SamplingParams(n=case.samples, max_tokens=case.new_tokens))
    optimizer, update = learner(case.remat)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    scored = (case.rows, case.length - 1)
    batch = Batch(
        tokens=array((case.rows, case.length), jnp.int32),
        mask=array(scored, jnp.bool_),
        sampler_log_probs=array(scored, jnp.float32),
        advantages=array((case.rows,), jnp.float32),
    )
    return update, (state, policy, batch), {}


def _weights(config: ModelConfig, recipe: Recipe) -> tuple[dict, mt.Policy]:
    """Abstract masters and stored weights. `pack` is what `mt.prepare` and the update call."""
    params = jax.eval_shape(lambda: mt.init_params(config, jax.random.key(0)))
    return params, jax.eval_shape(lambda params: pack(params, config, recipe), params)


def concrete(arguments: Any) -> Any:
    """Arrays for abstract arguments: integers and masks are 1, the rest is 0. What a program needs depends on shapes alone."""

    def fill(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        # Scales are bytes too: stored weights are 0 whatever their codes.
        return jnp.full(leaf.shape, 1 if leaf.dtype in (jnp.int32, jnp.uint32, jnp.bool_) else 0, leaf.dtype)

    return jax.tree.map(fill, arguments)


def estimate(case: Case, capability: int | None = HOPPER) -> Footprint:
    """What the case needs on a GPU of a compute capability, without one; None: on the device at hand."""
    if capability is None:
        function, arguments, static = program(case)
        return footprint(function.trace(*arguments, **static))
    with dispatch.planned(capability):
        return estimate(case, None)


# Layers of the programs that deeper ones are told from.
_SHALLOW = (2, 4)
_LAYERS = "layers"
_OF_TREES = {"slice", "add", "squeeze", "reshape", "pad", "concatenate"}


class Growth:
    """What a program needs for any number of rows and of layers, told from four small ones.

    Sizes grow evenly with the rows, and so does what is alive at each moment. With the layers the first and the last moments of a
    phase (forward, head, backward, optimiser) grow evenly, and the most of a phase is at one of its ends: in the first layer that
    it passes or in the last. The tests compare it with the program of 8 layers.
    """

    def __init__(self, case: Case, rows: tuple[int, int]):
        """Estimates programs of 2 and 4 layers with both numbers of rows. Raises ValueError where their structures differ."""
        self.case, self.shallow = case, []
        for layers in _SHALLOW:
            first, second = (estimate(dataclasses.replace(case, layers=layers, rows=r)) for r in rows)
            compared, others = _compared(first), _compared(second)
            if [first.moments[i] for i in compared] != [second.moments[i] for i in others]:
                raise ValueError(
                    f"{case.name}: {rows[0]} and {rows[1]} rows make programs of different operations; choose others"
                )
            slope = (_fixed(second)[others] - _fixed(first)[compared]) / (rows[1] - rows[0])
            outside = np.array([[each.arguments, each.results] for each in (first, second)], float)
            per_row = (outside[1] - outside[0]) / (rows[1] - rows[0])
            base = _fixed(first)[compared] - rows[0] * slope
            self.shallow.append(
                (base, slope, _phases([first.moments[i] for i in compared]), outside[0] - rows[0] * per_row, per_row)
            )

        cut = _windows(*(phases for _, _, phases, _, _ in self.shallow))
        self.shallow = [(*each[:2], windows, *each[3:]) for each, windows in zip(self.shallow, cut, strict=True)]

    def peak(self, rows: int, layers: int) -> float:
        """Bytes at the peak."""
        most = [{key: (base + rows * slope)[places].max() for key, places in phases.items()}
                for base, slope, phases, _, _ in self.shallow]  # fmt: skip
        return max(_grown(most[0][key], most[1][key], layers) for key in most[0])

    def outside(self, rows: int, layers: int) -> tuple[float, float]:
        """Bytes of arguments, and of results that take the place of none."""
        two, four = (base + rows * per_row for *_, base, per_row in self.shallow)
        return tuple(_grown(two, four, layers).tolist())

    def most_rows(self, limit: float, layers: int) -> int:
        """The most rows whose peak is at most `limit` bytes; 0: there are none."""
        low, high = 0, 1
        while self.peak(high, layers) <= limit:
            low, high = high, 2 * high
            if high > 2**24:
                raise ValueError(f"{self.case.name}: the peak does not grow with the rows")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, layers) <= limit else (low, middle)
        return low


def _grown(two, four, layers: int):
    """The value for any number of layers of what grows evenly from 2 to 4."""
    first, second = _SHALLOW
    return two + (four - two) * ((layers - first) / (second - first))


def _fixed(found: Footprint) -> np.ndarray:
    return found.arguments + found.results + found.profile


def _compared(found: Footprint) -> list[int]:
    """Places of the operations that every number of rows has: not those of sums over rows, trees of their own height."""
    return [i for i, (name, scope) in enumerate(found.moments) if "optimizer" in scope or name not in _OF_TREES]


def _phases(moments: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """Places of the operations of each phase."""
    places: dict[str, list[int]] = {}
    for place, (name, scope) in enumerate(moments):
        outer = next((each for each in ("optimizer", "pack", "head", "embed", "sample") if each in scope), _LAYERS)
        phase = name if name == "while" else f"{outer}, {'backward' if 'transpose' in scope else 'forward'}"
        places.setdefault(phase, []).append(place)
    return {phase: np.array(each) for phase, each in places.items()}


def _windows(two: dict[str, np.ndarray], four: dict[str, np.ndarray]) -> list[dict[tuple, np.ndarray]]:
    """The phases of programs of 2 and of 4 layers, those of the layers cut to the first and the last layer and a half."""
    cut: list[dict[tuple, np.ndarray]] = [{}, {}]
    for phase in two:
        # So many operations in both: a window's moments are the same ones then.
        width = 3 * (len(four[phase]) - len(two[phase])) // 4
        for windows, places in zip(cut, (two[phase], four[phase]), strict=True):
            if phase.startswith(_LAYERS) and 0 < width <= len(two[phase]):
                windows[phase, "first"], windows[phase, "last"] = places[:width], places[-width:]
            else:
                windows[phase, "all"] = places
    return cut


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes that a device holds of a model, and its parameters.

    Attributes:
      parameters: numbers of the masters.
      masters, moments, gradients: float32; the moments are the optimiser's whole state.
      stored: what the forward reads: the policy's weights in their formats.
      cache: bytes of a token's keys and values.
    """

    parameters: int
    masters: int
    moments: int
    gradients: int
    stored: int
    cache: float


def parts(case: Case, *, state_devices: int = 1) -> Parts:
    """The parts of a case's model on a device.

    Args:
      case: program, batch and remat do not matter.
      state_devices: masters, moments and gradients of what is no expert lie on so many devices in equal parts.
    """
    config, recipe = case.config, mt.recipe(case.recipe)
    with dispatch.planned(HOPPER):  # a page of the cache is a key block of the device
        params, policy = _weights(config, recipe)
        moments = jax.eval_shape(learner(False)[0].init, params)
        cache = jax.eval_shape(lambda: init_cache(config, recipe, 1, 4096))
    specs = abstract_params(config)
    rest = sum(
        nbytes(leaf)
        for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True)
        if "expert" not in spec.axes
    )
    share = (nbytes(params) - rest * (1 - 1 / state_devices)) / nbytes(params)
    return Parts(
        parameters=mt.num_params(config),
        masters=int(nbytes(params) * share),
        moments=int(nbytes(moments) * share),
        gradients=int(nbytes(params) * share),
        stored=nbytes(policy),
        cache=nbytes((cache.keys, cache.values)) / cache.capacity,
    )
