"""What Qwen3's own models lack: no norm of heads, biases, dense layers between MoE ones, stretched angles. The contracts hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics.record import matmul_names
from minite_jax.model import Taps, init_cache, scored_tokens, tiny_dense, tiny_moe
from minite_jax.model.forward import _runs, hidden_states
from minite_jax.model.params import BIAS, NORM, abstract_params
from minite_jax.model.rope import RopeScaling
from minite_jax.precision.bias import add_bias
from pallas_kernels.log_prob import Truncation

QUICK = {"xla_backend_optimization_level": 0}  # half the time; tests/contracts holds the optimised programs to the same
CONFIG = tiny_moe(
    num_hidden_layers=2,
    num_experts=4,
    intermediate_size=48,
    mlp_only_layers=(0,),
    qk_norm=False,
    attention_bias=True,
    rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
)


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def policy_and_params(request):
    rng = np.random.default_rng(0)

    def value(spec):
        scale = 0.3 if spec.kind in (BIAS, NORM) else spec.shape[-1] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(spec.shape) + (spec.kind == NORM), jnp.float32)

    params = jax.tree.map(value, abstract_params(CONFIG))
    return mt.prepare(params, CONFIG, mt.recipe(request.param)), params


def test_the_tree_has_what_the_config_says():
    layers = abstract_params(CONFIG)["layers"]
    assert "router" not in layers[0] and layers[0]["gate_up"].shape == (96, 64)
    assert layers[1]["router"].shape == (4, 64) and layers[1]["gate_up"].shape == (4, 128, 64)
    assert all("q_norm" not in layer and layer["qkv_bias"].shape == (128,) and layer["o_bias"].shape == (64,) for layer in layers)
    assert [name for name in matmul_names(CONFIG) if name.endswith("down")] == ["layer.0/mlp/down", "layer.1/moe/down"]
    deep = dataclasses.replace(CONFIG, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,))
    assert [deep.is_moe_layer(i) for i in range(6)] == [False, True, False, False, False, True]
    assert _runs(mt.Policy(weights=None, config=deep, recipe=mt.recipe("bf16")), Taps()) == [(0, 1), (1, 2), (2, 5), (5, 6)]


@pytest.mark.slow
def test_batch_cache_and_gradient_have_the_bits_of_the_full_forward(policy_and_params):
    """C2, C3 and C4 in one: other neighbours, steps through a cache, the forward inside a gradient. No gradient is all zeros."""
    policy, params = policy_and_params
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (3, 19)), jnp.int32)
    step = jax.jit(hidden_states, compiler_options=QUICK)
    whole, _ = step(policy, tokens)
    others, _ = step(policy, tokens.at[0].set(3).at[2].set(5))
    np.testing.assert_array_equal(others[1], whole[1])

    cache = init_cache(CONFIG, policy.recipe, 3, 19)
    pieces = []
    for first in range(0, 19, 5):
        padded = jnp.pad(tokens[:, first : first + 5], [(0, 0), (0, max(0, first + 5 - 19))])
        num_new = jnp.full(3, min(5, 19 - first), jnp.int32)
        hidden, cache = step(policy, padded, cache, num_new=num_new)
        pieces.append(hidden[:, : min(5, 19 - first)])
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), whole)

    def loss(masters):
        log_probs, _ = scored_tokens(policy.with_masters(masters), tokens, Truncation())
        return jnp.sum(log_probs), log_probs

    (_, inside), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(params)
    outside = jax.jit(lambda policy: scored_tokens(policy, tokens, Truncation())[0], compiler_options=QUICK)(policy)
    np.testing.assert_array_equal(inside, outside)
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert gradient.dtype == jnp.float32 and jnp.any(gradient != 0) and jnp.all(jnp.isfinite(gradient)), path


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bias(dtype):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.integers(-8, 9, (70, 5)), dtype) for _ in range(2))
    bias = jnp.asarray(rng.integers(-8, 9, 5), jnp.float32)
    y, vjp = jax.vjp(jax.jit(add_bias), x, bias)
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(x, np.float32) + np.asarray(bias))
    dx, db = vjp(g)
    np.testing.assert_array_equal(dx, g)
    np.testing.assert_array_equal(db, np.asarray(g, np.float64).sum(0))  # integers: exact
    assert db.dtype == jnp.float32
    rounded = add_bias(jnp.full((1, 1), 256.0, jnp.bfloat16), jnp.ones(1))
    assert rounded.item() == 256.0  # 257 is halfway between two bfloat16 numbers; to even


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(decoder_sparse_step=0), "decoder_sparse_step=0 must be at least 1"),
        (dict(mlp_only_layers=(0, 1), intermediate_size=32), "leave no layer for experts"),
        (dict(mlp_only_layers=(2,)), "mlp_only_layers names layer 2"),
        (dict(mlp_only_layers=(1,)), "intermediate_size=0 must be a positive multiple of 16"),
        (dict(rope_scaling=dict(rope_type="yarn")), "rope_type=yarn needs factor"),
    ],
)
def test_what_no_model_can_have(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_moe(**changes)
    with pytest.raises(ValueError, match="are for models with experts"):
        tiny_dense(decoder_sparse_step=2)
