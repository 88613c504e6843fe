"""One small model, traced once for all tests of the diagnostics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics.trace import trace_learner
from minite_jax.model import tiny_moe

# Half the time to compile; the slow tests hold the optimised programs to the same bits.
QUICK = {"xla_backend_optimization_level": 0}


class World:
    """A model of two layers with experts, two sequences of 9 and 6 tokens, and all tensors of the learner's forward on them."""

    config, recipe = tiny_moe(num_hidden_layers=2), mt.recipe("nvfp4")
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9)).astype(np.int32)
    lengths = np.array([9, 6])
    mask = np.arange(9) < lengths[:, None]
    scored = mask[:, :-1] & mask[:, 1:]

    @functools.cached_property
    def params(self):
        return mt.init_params(self.config, jax.random.key(0))

    @functools.cached_property
    def policy(self):
        return mt.prepare(self.params, self.config, self.recipe)

    @functools.cached_property
    def trace(self):
        return trace_learner(self.policy, self.tokens, mask=self.mask, compiler_options=QUICK)

    @functools.cached_property
    def log_probs(self):
        """[B, T-1] of the program without taps."""
        program = jax.jit(lambda policy, tokens: mt.token_log_probs.__wrapped__(policy, tokens), compiler_options=QUICK)
        return np.asarray(program(self.policy, jnp.asarray(self.tokens)))


@pytest.fixture(scope="session")
def world():
    return World()
