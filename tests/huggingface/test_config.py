"""config.json in its spellings: one meaning, or an error that names the key."""

import dataclasses
import json
import re

import numpy as np
import pytest

from minite_jax.checkpoint import CheckpointError
from minite_jax.checkpoint.huggingface import from_json, read_config, to_json
from minite_jax.model import qwen3_0_6b, qwen3_8b, qwen3_30b_a3b, tiny_dense, tiny_moe
from minite_jax.model.rope import RopeScaling, angle_tables, attention_factor, inverse_frequencies
from pallas_kernels.rotary import rotary_table

OLD_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "rope_theta": 10000, "vocab_size": 100,
}  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
)  # fmt: skip


def changed(raw, drop=(), **changes):
    return {key: value for key, value in (raw | changes).items() if key not in drop}


def test_old_and_new_spellings_are_one_model():
    new = changed(
        OLD_30B, drop=("rope_theta", "rope_scaling", "num_experts", "torch_dtype"), num_local_experts=128, dtype="bfloat16",
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, layer_types=["full_attention"] * 48,
    )  # fmt: skip
    both = changed(new, num_experts=128, rope_theta=1000000, rope_scaling={"type": "default"})
    assert from_json(OLD_30B) == from_json(new) == from_json(both) == qwen3_30b_a3b()
    frequencies = inverse_frequencies(128, from_json(new).rope_theta, None)
    np.testing.assert_allclose(frequencies[[1, -1]], [0.805842, 1.240938e-06], rtol=1e-6)


def test_what_may_be_left_out():
    """Defaults of the classes themselves, where every version has the same."""
    config = from_json(changed(OLD_30B, drop=("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "tie_word_embeddings")))
    assert not config.norm_topk_prob and config.mlp_only_layers == () and not config.tie_word_embeddings
    llama = from_json(LLAMA)
    assert (llama.head_dim, llama.num_key_value_heads, llama.qk_norm, llama.rms_norm_eps) == (16, 4, False, 1e-6)
    assert from_json(changed(LLAMA, head_dim=32)).head_dim == 32


@pytest.mark.parametrize(
    "config",
    [
        qwen3_30b_a3b(), qwen3_8b(), qwen3_0_6b(),
        tiny_moe(num_hidden_layers=4, mlp_only_layers=(1,), decoder_sparse_step=2, intermediate_size=32),
        tiny_dense(qk_norm=False, attention_bias=True, rms_norm_eps=1e-5),
        tiny_dense(rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0)),
        tiny_dense(rope_scaling=LLAMA3),
    ],
    ids=range(7),
)  # fmt: skip
def test_to_json_and_back(config):
    written = json.loads(json.dumps(to_json(config)))
    assert from_json(written) == config
    assert written["max_position_embeddings"] == 32768


def test_what_no_architecture_has_is_not_written():
    with pytest.raises(CheckpointError, match="no architecture here has experts and qk_norm=False"):
        to_json(tiny_moe(qk_norm=False))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type='gpt_oss' is not known here"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["Qwen3MoeModel"]}, "Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention"),
        ({"clip_qkv": 8.0, "shared_expert_intermediate_size": 4}, "unknown keys clip_qkv, shared_expert_intermediate_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "2048"}, "hidden_size='2048' should be of type int"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True should be of type int"),
        ({"hidden_size": 2040}, "hidden_size=2040 must be a positive multiple of 16"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 0}, "num_experts=0 of a qwen3_moe"),
        ({"num_local_experts": 64}, "num_experts and num_local_experts disagree"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be at most 10000"),
        ({"num_experts": 10**9}, "num_experts=1000000000 must be at most 10000"),
        ({"mlp_only_layers": [True]}, "should be a list of layers' numbers"),
        ({"mlp_only_layers": [50]}, "mlp_only_layers names layer 50; there are 0 to 47"),
        ({"decoder_sparse_step": 49}, "leave no layer for experts"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type='longrope' is not known"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic' is not known"),
        ({"rope_scaling": {"factor": 4.0}}, "factor of a rope_type default"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type=yarn needs factor"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale.* is not known here"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "factor=0.5 of rope_type=yarn must be at least 1"),
        ({"rope_scaling": YARN | {"low_freq_factor": 1.0}}, "rope_type=yarn has no low_freq_factor"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "says factor=2.0 and another place 4.0"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta=1000000.0 and .* disagree"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention of a rope_type default"),
    ],
    ids=lambda value: re.sub(r"[^a-z_0-9]+", " ", str(value))[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        from_json(changed(OLD_30B, **changes), "there/config.json")
    assert str(caught.value).startswith("there/config.json: ") and "\n" not in str(caught.value)


def test_other_families_have_no_experts():
    with pytest.raises(CheckpointError, match="unknown key num_experts"):
        from_json(changed(LLAMA, num_experts=8))
    with pytest.raises(CheckpointError, match="mlp_bias=True is not supported"):
        from_json(changed(LLAMA, mlp_bias=True))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\x00", b"\xff\xfe", b"[" * 100_000], ids=range(7))
def test_files_that_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_yarn_by_hand():
    """Qwen3's published stretching: 128 dimensions, theta 1e6, four times 32768."""
    scaling = RopeScaling(**YARN)
    plain, stretched = inverse_frequencies(128, 1e6, None), inverse_frequencies(128, 1e6, scaling)
    # Dimension of 32 turns in 32768 tokens: 128 ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.6; of 1 turn: 39.65.
    ramp = np.clip((np.arange(64) - 23) / (40 - 23), 0, 1)
    np.testing.assert_allclose(stretched, plain * (1 - ramp) + plain / 4 * ramp, rtol=1e-12)
    assert (stretched[:24] == plain[:24]).all() and np.allclose(stretched[40:], plain[40:] / 4)
    assert abs(attention_factor(scaling) - 1.138629) < 1e-6
    cos, _ = angle_tables(3, 128, 1e6, scaling)
    assert (cos[0] == np.float32(attention_factor(scaling))).all()
    assert attention_factor(dataclasses.replace(scaling, attention_factor=2.0)) == 2.0


def test_angles_without_scaling_are_those_of_the_kernel():
    for one, other in zip(angle_tables(50, 16, 1e4, None), rotary_table(50, 16, 1e4), strict=True):
        np.testing.assert_array_equal(one, other)
    unscaled = RopeScaling(rope_type="linear", factor=1.0)
    np.testing.assert_array_equal(angle_tables(50, 16, 1e4, unscaled)[0], rotary_table(50, 16, 1e4)[0])
