"""Worlds: a small model in a recipe, with the compiled programs that the contract tests share.

Compiling is what these tests cost, so a world compiles each program once: one batch shape for sampling, scoring and the update.
A test that takes `world` runs in every world that it names with ``@pytest.mark.worlds(...)``. Worlds of one kind are an xdist
group, so that with ``--dist loadgroup`` one process compiles them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minite_jax as mt
from minite_jax.learner import Batch, OptimizerConfig, TrainState, grpo_loss, init_state, make_optimizer, make_update
from minite_jax.model import tiny_dense, tiny_moe

# Lengths around the multiples of 8 (prompt padding) and of 16 (key block).
PROMPT_LENGTHS = (1, 3, 9, 16, 17)
SAMPLES = 4
MAX_TOKENS = 8
SLOTS = 24 + MAX_TOKENS  # the longest prompt, padded, and the completion

_EXPERTS_ONLY = dict(name="nvfp4_experts", first_plain=1, last_plain=1)
WORLDS = {
    "moe_nvfp4": lambda: World(tiny_moe(), mt.recipe("nvfp4")),
    "moe_bf16": lambda: World(tiny_moe(num_hidden_layers=1), mt.recipe("bf16")),
    # Every expert is chosen, so that no choice flips between two points: the loss is smooth.
    "moe_fp32": lambda: World(tiny_moe(num_hidden_layers=1, num_experts_per_tok=8), mt.recipe("fp32")),
    "moe_experts": lambda: World(tiny_moe(num_hidden_layers=3), mt.recipe(**_EXPERTS_ONLY)),
    "dense_nvfp4": lambda: World(tiny_dense(num_hidden_layers=1), mt.recipe("nvfp4")),
    "dense_bf16": lambda: World(tiny_dense(num_hidden_layers=1), mt.recipe("bf16")),
    "dense_fp32": lambda: World(tiny_dense(num_hidden_layers=1), mt.recipe("fp32")),
    "dense_te": lambda: World(tiny_dense(num_hidden_layers=1), mt.recipe("nvfp4_te")),
    "deep_experts": lambda: World(tiny_moe(num_hidden_layers=8), mt.recipe("nvfp4_experts")),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "worlds(*names, slow=()): the worlds that the test's `world` takes in turn; those in `slow` are slow tests"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("worlds")
        slow = marker.kwargs.get("slow", ())
        names = (*marker.args, *slow)
        # The dense worlds are compared with one another.
        groups = ["dense" if name.startswith("dense") else name for name in names]
        params = [
            pytest.param(name, marks=[pytest.mark.xdist_group(group), *([pytest.mark.slow] if name in slow else [])])
            for name, group in zip(names, groups, strict=True)
        ]
        metafunc.parametrize("world", params, indirect=True, scope="session")


def keep_gradients() -> optax.GradientTransformation:
    """Hands gradients on, and keeps the last ones as its state: so a test reads the gradients of the real update."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda gradients, state, params: (gradients, gradients)
    )


class World:
    """A model, a recipe, and everything that is computed once for both."""

    def __init__(self, config, recipe):
        self.config = config
        self.recipe = recipe
        # Large steps: C6 asks for weights that move.
        self.optimizer = optax.chain(keep_gradients(), make_optimizer(OptimizerConfig(learning_rate=0.1)))
        rng = np.random.default_rng(5)
        self.prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
        # One token in sixteen ends a completion, so that about half of them end before they are full.
        self.sampling = mt.SamplingParams(n=SAMPLES, max_tokens=MAX_TOKENS, stop_ids=tuple(range(0, config.vocab_size, 16)))

    @functools.cached_property
    def params(self) -> dict:
        return mt.init_params(self.config, jax.random.key(1))

    @functools.cached_property
    def policy(self) -> mt.Policy:
        return mt.prepare(self.params, self.config, self.recipe)

    def sample(self, policy=None, *, seed: int = 0, prompts=None) -> mt.Rollouts:
        """Always the one compiled sampling program."""
        return mt.sample(policy or self.policy, prompts or self.prompts, self.sampling, key=jax.random.key(seed))

    @functools.cached_property
    def rollouts(self) -> mt.Rollouts:
        return self.sample()

    @functools.cached_property
    def sequences(self):
        """Tokens [20, 32], mask and log-probs [20, 31] of `rollouts`, as numpy arrays."""
        return tuple(np.asarray(x) for x in self.rollouts.sequences())

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[20] tokens of each sequence, prompt and completion."""
        return np.asarray(self.rollouts.prompt_length) + np.asarray(self.rollouts.mask).sum(1)

    def score(self, tokens, policy=None) -> np.ndarray:
        """Log-probs by the learner's forward outside a gradient."""
        return np.asarray(mt.token_log_probs(policy or self.policy, jnp.asarray(tokens)))

    def fresh_state(self, params=None) -> TrainState:
        """A state that an update may donate."""
        return init_state(jax.tree.map(jnp.copy, params or self.params), self.optimizer)

    def update(self, micro_batches: int = 1, remat: bool = False):
        return self._update(micro_batches, remat)

    # Positional arguments alone: `update()` and `update(1, False)` would be two entries, each compiled.
    @functools.cache  # noqa: B019  (a world lives as long as the process)
    def _update(self, micro_batches, remat):
        return make_update(
            self.optimizer,
            lambda log_probs, batch: grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages),
            micro_batches=micro_batches,
            remat=remat,
        )

    def batch(self, rollouts=None, **changes) -> Batch:
        """A GRPO batch of `rollouts` with made-up advantages."""
        tokens, mask, log_probs = (rollouts or self.rollouts).sequences()
        advantages = jnp.asarray(np.random.default_rng(6).standard_normal(tokens.shape[0]), jnp.float32)
        return Batch(tokens=tokens, mask=mask, sampler_log_probs=log_probs, advantages=advantages).replace(**changes)

    def gradients(self, batch=None, *, micro_batches: int = 1, remat: bool = False):
        """Gradients and metrics of one update from `params`."""
        update = self.update(micro_batches, remat)
        state, _, metrics = update(self.fresh_state(), self.policy, self.batch() if batch is None else batch)
        return state.opt_state[0], {name: float(value) for name, value in metrics.items()}


@functools.cache
def _world(name: str) -> World:
    return WORLDS[name]()


@pytest.fixture(scope="session")
def world(request) -> World:
    return _world(request.param)


@pytest.fixture(scope="session")
def world_named():
    """For a test that compares worlds."""
    return _world


def _bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x


def _assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(_bits(x), _bits(y))


@pytest.fixture(scope="session")
def assert_same_bits():
    """Function of two trees of arrays: fails unless types, shapes and bits are equal (NaN equals the same NaN, 0 is not -0)."""
    return _assert_same_bits


@pytest.fixture(scope="session")
def bits():
    """Function of an array: its bits as unsigned integers."""
    return _bits
