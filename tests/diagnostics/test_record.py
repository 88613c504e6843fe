"""The recorder gives what the matmuls of the one forward read, and changes nothing."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics import record
from minite_jax.model import tiny_dense, tiny_moe
from minite_jax.model.moe import make_dispatch
from minite_jax.precision import expert_linear
from pallas_kernels import nvfp4
from pallas_kernels.rms_norm import rms_norm

_TOKENS = np.random.default_rng(0).integers(0, 256, (3, 7)).astype(np.int32)


def _policy(config, recipe):
    return mt.prepare(mt.init_params(config, jax.random.key(0)), config, mt.recipe(recipe))


def _assert_equal(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_operands_of_the_forward():
    policy, tokens = _policy(tiny_dense(num_hidden_layers=1), "nvfp4"), jnp.asarray(_TOKENS)
    expected = mt.forward(policy, tokens)  # compiled before, so that a recorder that reuses a program finds nothing
    operands, logits = record.record_matmuls(policy, tokens)
    _assert_equal(logits, expected)

    layer, rule = policy.weights["layers"][0], policy.recipe.quantized.activation
    stored = {"attention/qkv": "qkv", "attention/o": "o", "mlp/gate_up": "gate_up", "mlp/down": "down"}
    assert list(operands) == [*(f"layer.0/{name}" for name in stored), "head"]
    for name, weight in stored.items():
        _assert_equal(operands[f"layer.0/{name}"].w, layer[weight])
        assert operands[f"layer.0/{name}"].group_sizes is None

    @jax.jit
    def first_operand(embed, gain):
        return nvfp4.quantize(rms_norm(embed[tokens.reshape(-1)], gain, eps=policy.config.rms_norm_eps), rule)

    _assert_equal(operands["layer.0/attention/qkv"].x, first_operand(policy.weights["embed"], layer["attention_norm"]))
    head = operands["head"]
    _assert_equal(head.w, policy.weights["embed"])  # tied
    products = np.asarray(head.x, np.float64) @ np.asarray(head.w, np.float64).T
    np.testing.assert_allclose(products.reshape(logits.shape), logits, atol=1e-4)


def test_experts_in_a_loop_are_recorded_trip_by_trip():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((6, 16)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((2, 3, 16, 16)), jnp.bfloat16)  # two layers of three experts
    dispatch = make_dispatch(jnp.asarray(rng.integers(0, 3, (6, 2)), jnp.int32), 3)
    plain = mt.recipe("bf16").quantized

    def layers(x, w):
        def layer(x, w):
            out = expert_linear(plain, x, w, None, dispatch, gather=True)
            return out[dispatch.slot][:, 0], None

        return jax.lax.scan(layer, x, w)[0]

    with record.recording(lambda *operands: operands) as calls:
        jax.block_until_ready(jax.jit(layers)(x, w))
        jax.effects_barrier()
    assert len(calls) == 2
    for (_, w_ENK, group_sizes), weights in zip(calls, w, strict=True):
        _assert_equal(w_ENK, weights)
        _assert_equal(group_sizes, dispatch.group_sizes)
    _assert_equal(calls[0][0], x[dispatch.order // 2])


def test_names():
    names = record.matmul_names(tiny_moe(num_hidden_layers=2))
    assert names[2:6] == ["layer.0/moe/gate_up", "layer.0/moe/down", "layer.1/attention/qkv", "layer.1/attention/o"]
    assert len(names) == 9 and names[-1] == "head"


def test_a_list_of_names_that_is_out_of_date(monkeypatch):
    policy = _policy(tiny_dense(num_hidden_layers=1), "bf16")
    forward = sys.modules[mt.forward.__module__]
    hidden = jnp.zeros((*_TOKENS.shape, 64), jnp.bfloat16)
    monkeypatch.setattr(forward, "hidden_states", lambda policy, tokens: (hidden, None))  # leaves the head alone
    with pytest.raises(RuntimeError, match="called 1 matmuls where 5"):
        record.record_matmuls(policy, jnp.asarray(_TOKENS))
