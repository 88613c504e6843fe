"""Wrong input: one clear line that says what is wrong and how to mend it."""

import jax
import jax.numpy as jnp
import pytest

import minite_jax as mt
from minite_jax.model import tiny_dense, tiny_moe

CONFIG = tiny_dense(num_hidden_layers=1)


def _message(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def params():
    return mt.init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def policy(params):
    return mt.prepare(params, CONFIG, mt.recipe("nvfp4"))


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ([], "no prompts: give at least one"),
        ([[1], []], "prompt 1 is empty; a prompt needs at least one token"),
        ([[1], [2, 256]], "prompt 1 holds token 256, outside the vocabulary 0..255"),
        ([[-1]], "prompt 0 holds token -1, outside the vocabulary 0..255"),
    ],
)
def test_prompts(policy, prompts, wanted):
    assert wanted in _message(mt.sample, policy, prompts, mt.SamplingParams(max_tokens=1), key=jax.random.key(0))


def test_request_ids(policy):
    message = _message(mt.sample, policy, [[1]], mt.SamplingParams(), key=jax.random.key(0), request_ids=[1, 2])
    assert message == "2 request_ids for 1 prompts; give one for each"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (dict(n=0), "n=0 must be at least 1"),
        (dict(max_tokens=0), "max_tokens=0 must be at least 1"),
        (dict(temperature=-0.1), "temperature=-0.1 must be 0 (greedy) or a positive number"),
        (dict(temperature=float("nan")), "temperature=nan must be 0 (greedy) or a positive number"),
        (dict(top_p=0.0), "top_p=0.0 must lie in (0, 1]"),
        (dict(top_p=1.1), "top_p=1.1 must lie in (0, 1]"),
    ],
)
def test_sampling_params(fields, wanted):
    assert wanted in _message(mt.SamplingParams, **fields)


@pytest.mark.parametrize(
    ("make", "fields", "wanted"),
    [
        (tiny_moe, dict(num_experts_per_tok=9), "num_experts_per_tok=9 must lie between 1 and num_experts=8"),
        (tiny_moe, dict(num_experts_per_tok=0), "num_experts_per_tok=0 must lie between 1 and num_experts=8"),
        (tiny_moe, dict(moe_intermediate_size=40), "moe_intermediate_size=40 must be a positive multiple of 16"),
        (tiny_dense, dict(intermediate_size=0), "intermediate_size=0 must be a positive multiple of 16"),
        (tiny_dense, dict(hidden_size=72), "hidden_size=72 must be a positive multiple of 16"),
        (tiny_dense, dict(head_dim=6), "num_attention_heads * head_dim=24 must be a positive multiple of 16"),
        (tiny_dense, dict(head_dim=5), "head_dim=5 must be even"),
        (tiny_dense, dict(num_key_value_heads=3), "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        (tiny_dense, dict(vocab_size=0), "vocab_size=0 must be at least 1"),
    ],
)
def test_configs(make, fields, wanted):
    assert wanted in _message(make, **fields)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(params, value):
    layer = params["layers"][0]
    broken = params | {"layers": (layer | {"down": layer["down"].at[3, 5].set(value)},)}
    message = _message(mt.prepare, broken, CONFIG, mt.recipe("nvfp4"))
    assert message == "parameter layers.0.down holds NaN or infinity; restore an earlier checkpoint"


def test_weights_of_the_wrong_kind(params):
    prepare = lambda tree: _message(mt.prepare, tree, CONFIG, mt.recipe("nvfp4"))  # noqa: E731
    embed = params["embed"]
    assert prepare(params | {"embed": embed[:, :-1]}) == "parameter embed has shape (256, 63); the config asks for (256, 64)"
    assert prepare(params | {"embed": embed.astype(jnp.bfloat16)}) == "parameter embed is bfloat16; master weights are float32"
    assert prepare(params | {"lm_head": embed}) == "parameter lm_head is not part of this model"
    assert prepare({k: v for k, v in params.items() if k != "final_norm"}) == "parameter final_norm (64,) is missing"


@pytest.mark.parametrize(
    ("config", "recipe", "wanted"),
    [
        (CONFIG, mt.recipe("nvfp4_experts"), "recipe nvfp4_experts quantises nothing in this model: it wants experts"),
        (tiny_moe(num_hidden_layers=6), mt.recipe("nvfp4_experts"), "first 2 and the last 4 of 6 layers"),
        (CONFIG, mt.recipe("nvfp4", first_plain=1), "recipe nvfp4 quantises nothing in this model"),
    ],
)
def test_recipes_that_quantise_nothing(config, recipe, wanted):
    params = mt.init_params(config, jax.random.key(0))
    assert wanted in _message(mt.prepare, params, config, recipe)


def test_recipe_names():
    assert "no recipe 'fp4'; there are fp32, bf16, nvfp4" in _message(mt.recipe, "fp4")
    assert _message(mt.recipe, "nvfp4", frist_plain=1) == "a recipe has no field frist_plain"
