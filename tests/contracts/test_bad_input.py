"""Wrong input: one clear line that says what is wrong and how to mend it."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.model import tiny_dense, tiny_moe
from pallas_kernels.log_prob import Truncation

CONFIG = tiny_dense(num_hidden_layers=1)


def _message(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True)
def _as_users_call():
    """Without the checks of annotations, which only the test-suite has: they would refuse some of this first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
        ([[1], [2, 2.5]], "prompt 1 must be integers on one axis, not float64 of shape (2,)"),
        ([np.float32([1, 2])], "prompt 0 must be integers on one axis, not float32 of shape (2,)"),
        ([[True, False]], "prompt 0 must be integers on one axis, not bool"),
        ([1, 2, 3], "prompt 0 is 1; each prompt must be a list of token ids, such as [[1, 2, 3]] for one"),
        ([[1], np.array(2)], "prompt 1 is array(2); each prompt must be a list of token ids"),
        (5, "prompts is of type int; give a list of lists of token ids, such as [[1, 2, 3]]"),
        (iter([[1]]), "prompts is of type list_iterator; give a list of lists"),
        ("Hi", "prompt 0 must be integers on one axis, not <U1 of shape ()"),
        ([[[1], [2, 3]]], "prompt 0 must be integers on one axis, not lists of unequal length"),
        ([[[1, 2]]], "prompt 0 must be integers on one axis, not int64 of shape (1, 2)"),
    ],
)
def test_prompts(policy, prompts, wanted):
    assert wanted in _message(mt.sample, policy, prompts, mt.SamplingParams(max_tokens=1), key=jax.random.key(0))


def test_request_ids(policy):
    message = _message(mt.sample, policy, [[1]], mt.SamplingParams(), key=jax.random.key(0), request_ids=[1, 2])
    assert message == "2 request_ids for 1 prompts; give one for each"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (dict(request_ids=3), "request_ids must be integers on one axis, not int64 of shape ()"),
        (dict(request_ids=[0.5]), "request_ids must be integers on one axis, not float64"),
        (dict(request_ids=np.array([True])), "request_ids must be integers on one axis, not bool"),
        (dict(request_ids=[-1]), "request_ids holds -1, outside 0..2**32-1"),
        (dict(request_ids=[2**32]), "request_ids holds 4294967296, outside 0..2**32-1"),
        (dict(prefill_chunk=0), "prefill_chunk=0 must be at least 1, or None for the whole prompt at once"),
        (dict(prefill_chunk=-3), "prefill_chunk=-3 must be at least 1"),
        (dict(prefill_chunk=True), "prefill_chunk=True must be an integer"),
        (dict(key=0), "key is int: sampling needs one typed key, jax.random.key(seed)"),
        (dict(key=None), "key is NoneType: sampling needs one typed key"),
        (dict(key=jax.random.PRNGKey(0)), "key is uint32 of shape (2,): sampling needs one typed key"),
        (dict(key=jax.random.split(jax.random.key(0), 3)), "key is key<fry> of shape (3,): sampling needs one typed key"),
        (dict(key=jax.random.key(0, impl="rbg")), "a key of kind rbg: sampling needs jax.random.key(seed, impl='threefry2x32')"),
        (dict(params=mt.SamplingParams(stop_ids=(2, 256))), "stop_ids holds 256, outside the vocabulary 0..255"),
        (dict(params=mt.SamplingParams(stop_ids=(-1,))), "stop_ids holds -1, outside the vocabulary 0..255"),
    ],
)
def test_arguments_of_sample(policy, arguments, wanted):
    arguments = dict(prompts=[[1]], params=mt.SamplingParams(max_tokens=1), key=jax.random.key(0)) | arguments
    assert wanted in _message(mt.sample, policy, **arguments)


def test_arguments_of_stream(policy):
    """At once, not when the first token is asked for."""
    key = jax.random.key(0)
    message = _message(mt.stream, policy, [1], mt.SamplingParams(n=2), key=key)
    assert message == "n=2: a stream is one completion; use sample, or one stream for each request_id"
    assert _message(mt.stream, policy, [], mt.SamplingParams(), key=key).startswith("prompt 0 is empty")
    assert _message(mt.stream, policy, 5, mt.SamplingParams(), key=key).startswith("prompt 0 is 5; each prompt must be a list")
    assert "request_ids holds -1" in _message(mt.stream, policy, [1], mt.SamplingParams(), key=key, request_id=-1)
    assert "outside the vocabulary" in _message(mt.stream, policy, [1], mt.SamplingParams(stop_ids=(256,)), key=key)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (dict(n=0), "n=0 must be at least 1"),
        (dict(max_tokens=0), "max_tokens=0 must be at least 1"),
        (dict(temperature=-0.1), "temperature=-0.1 must be 0 (greedy) or a positive number"),
        (dict(temperature=float("nan")), "temperature=nan must be 0 (greedy) or a positive number"),
        (dict(temperature=1e-40), "temperature=1e-40 must be 0 (greedy) or at least 2**-100"),
        (dict(temperature=2.0**-101), "must be 0 (greedy) or at least 2**-100"),
        (dict(temperature="0.7"), "temperature='0.7' must be a number"),
        (dict(temperature=True), "temperature=True must be a number"),
        (dict(top_p=None), "top_p=None must be a number"),
        (dict(n=2.0), "n=2.0 must be an integer"),
        (dict(n=True), "n=True must be an integer"),
        (dict(max_tokens=1.5), "max_tokens=1.5 must be an integer"),
        (dict(top_k=0.5), "top_k=0.5 must be an integer"),
        (dict(top_k=np.float32(3)), "must be an integer"),
        (dict(stop_ids=(1, 2.5)), "each of stop_ids=2.5 must be an integer"),
        (dict(stop_ids=(True,)), "each of stop_ids=True must be an integer"),
        (dict(stop_ids=2), "stop_ids=2 must be a sequence of integers"),
        (dict(stop_ids="."), "stop_ids='.' must be a sequence of integers"),
        (dict(top_p=0.0), "top_p=0.0 must lie in (0, 1]"),
        (dict(top_p=1.1), "top_p=1.1 must lie in (0, 1]"),
    ],
)
def test_sampling_params(fields, wanted):
    assert wanted in _message(mt.SamplingParams, **fields)


def test_sampling_params_take_integers_of_numpy():
    params = mt.SamplingParams(n=np.int32(2), max_tokens=np.int64(3), top_k=np.uint8(4), stop_ids=np.array([5, 6]))
    assert params == mt.SamplingParams(n=2, max_tokens=3, top_k=4, stop_ids=(5, 6))
    assert hash(params) == hash(mt.SamplingParams(n=2, max_tokens=3, top_k=4, stop_ids=(5, 6)))


def test_sampling_params_take_numbers_of_any_kind():
    """And keep Python's: arrays are no settings of a compiled program."""
    params = mt.SamplingParams(temperature=jnp.float32(0.5), top_p=np.float16(0.5), top_k=jnp.int32(3))
    assert hash(params) == hash(mt.SamplingParams(temperature=0.5, top_p=0.5, top_k=3))
    assert [type(x) for x in (params.temperature, params.top_p, params.top_k)] == [float, float, int]
    assert mt.SamplingParams(temperature=1).truncation == Truncation() == mt.SamplingParams(temperature=np.ones(())).truncation


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


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (dict(matmuls=("mlp", "attn")), "matmuls=('mlp', 'attn') must be a tuple out of attention, mlp, experts"),
        (dict(matmuls="mlp"), "matmuls='mlp' must be a tuple out of attention, mlp, experts"),
        (dict(dtype="float16"), "dtype='float16' must be one of bfloat16, float32"),
        (dict(first_plain=-1), "first_plain=-1 must be a number of layers, an integer of at least 0"),
        (dict(last_plain=1.5), "last_plain=1.5 must be a number of layers, an integer of at least 0"),
    ],
)
def test_values_of_recipes(changes, wanted):
    assert _message(mt.recipe, "nvfp4", **changes) == wanted


def test_a_recipe_takes_a_list_of_matmuls():
    assert mt.recipe("nvfp4", matmuls=["mlp", "attention"]) == mt.recipe("nvfp4", matmuls=("mlp", "attention"))
