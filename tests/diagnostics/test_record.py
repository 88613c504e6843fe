"""The recorder gives what the matmuls of the one forward read, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics import record
from minite_jax.model import tiny_dense, tiny_moe
from pallas_kernels import nvfp4
from pallas_kernels.rms_norm import rms_norm

_TOKENS = np.random.default_rng(0).integers(0, 256, (3, 7)).astype(np.int32)


def _policy(config, recipe):
    return mt.prepare(mt.init_params(config, jax.random.key(0)), config, mt.recipe(recipe))


def _assert_equal(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_operands_of_a_mixture_of_experts():
    policy, tokens = _policy(tiny_moe(num_hidden_layers=1), "nvfp4"), jnp.asarray(_TOKENS)
    expected = mt.forward(policy, tokens)  # compiled before, so that a recorder that reuses a program finds nothing
    operands, logits = record.record_matmuls(policy, tokens)
    _assert_equal(logits, expected)
    assert list(operands) == [
        "layer.0/attention/qkv", "layer.0/attention/o", "layer.0/moe/gate_up", "layer.0/moe/down", "head"
    ]  # fmt: skip

    layer, rule = policy.weights["layers"][0], policy.recipe.quantized.activation
    stored = {"attention/qkv": "qkv", "attention/o": "o", "moe/gate_up": "gate_up", "moe/down": "down"}
    for name, weight in stored.items():
        _assert_equal(operands[f"layer.0/{name}"].w, layer[weight])
    _assert_equal(operands["head"].w, policy.weights["lm_head"])
    normed = rms_norm(policy.weights["embed"][tokens.reshape(-1)], layer["attention_norm"], eps=policy.config.rms_norm_eps)
    _assert_equal(operands["layer.0/attention/qkv"].x, nvfp4.quantize(normed, rule))

    gate_up = operands["layer.0/moe/gate_up"]
    assert gate_up.x.shape == (42, 64) and int(gate_up.group_sizes.sum()) == 42
    assert operands["layer.0/attention/o"].group_sizes is None
    head = operands["head"]
    products = np.asarray(head.x, np.float64) @ np.asarray(head.w, np.float64).T
    np.testing.assert_allclose(products.reshape(logits.shape), logits, atol=1e-4)
    # Outside nothing is recorded, and the forward is the old one.
    _assert_equal(mt.forward(policy, tokens), expected)


def test_a_dense_model_and_a_list_of_names_that_is_out_of_date(monkeypatch):
    policy, tokens = _policy(tiny_dense(num_hidden_layers=1), "bf16"), jnp.asarray(_TOKENS)
    first, logits = record.record_matmuls(policy, tokens)
    assert list(first)[2:] == ["layer.0/mlp/gate_up", "layer.0/mlp/down", "head"]
    assert first["head"].x.dtype == jnp.bfloat16
    _assert_equal(logits, mt.forward(policy, tokens))
    monkeypatch.setattr(record, "matmul_names", lambda config: ["head"])
    with pytest.raises(RuntimeError, match="called 5 matmuls where 1"):
        record.record_matmuls(policy, tokens)
