"""Recipes: what they quantise, and weights alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.model import tiny_dense
from minite_jax.precision import RECIPES, MatmulFormat, linear
from minite_jax.precision.recipe import KINDS, MLP
from pallas_kernels import nvfp4


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_46", "nvfp4_te"])
def test_weights_alone_are_those_of_the_recipe_with_activations(name):
    both, alone = mt.recipe(name), mt.recipe(f"{name}_a16")
    assert alone.quantized.activation is None and alone.quantized.weight == both.quantized.weight
    assert (alone.dtype, alone.matmuls) == ("bfloat16", KINDS)
    assert alone == dataclasses.replace(RECIPES[f"{name}_a16"])
    assert alone.format_of(MLP, 0, 1).quantized


def test_activations_alone_are_refused():
    with pytest.raises(ValueError, match="needs quantised weights"):
        MatmulFormat(activation=mt.recipe("nvfp4").quantized.activation)


@pytest.mark.slow
def test_a_product_of_plain_rows_and_quantised_weights():
    """The numbers of the weights, dequantised, times the rows as they are; so are the gradients."""
    rng = np.random.default_rng(0)
    format = mt.recipe("nvfp4_a16").quantized
    x, w, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 32), (48, 32), (5, 48)))
    x, g = x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    stored = jax.jit(nvfp4.quantize, static_argnums=1)(w, format.weight)

    def run(x, master):
        return linear(format, x, stored, master)

    @jax.jit
    def with_gradients(x, w, g):
        y, pullback = jax.vjp(run, x, w)
        return y, *pullback(g)

    y, dx, dw = with_gradients(x, w, g)
    wanted = np.asarray(nvfp4.dequantize(stored), np.float64)
    exact = np.asarray(x, np.float64), np.asarray(g, np.float64)
    # Float32 sums of 32 to 48 products, rounded to bfloat16 once, or not at all.
    cases = ((y, exact[0] @ wanted.T, 2.0**-8), (dx, exact[1] @ wanted, 2.0**-8), (dw, exact[1].T @ exact[0], 2.0**-20))
    for got, value, unit in cases:
        np.testing.assert_allclose(np.asarray(got, np.float64), value, rtol=unit, atol=unit * 1e-1)


@pytest.mark.slow
def test_a_sampler_and_a_learner_of_quantised_weights():
    """The contract holds for weights alone too: sampled log-probs are the learner's, to the bit."""
    config = tiny_dense()
    policy = mt.prepare(mt.init_params(config, jax.random.key(0)), config, mt.recipe("nvfp4_a16"))
    rollouts = mt.sample(policy, [[5, 6, 7], [8, 9]], mt.SamplingParams(n=2, max_tokens=4), key=jax.random.key(1))
    tokens, mask, log_probs = rollouts.sequences()
    again = mt.token_log_probs(policy, tokens)
    assert (again[mask] == log_probs[mask]).all()
