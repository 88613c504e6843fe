"""The named shapes are those of the models."""

import pytest

from configs import quickstart
from minite_jax.model.config import ModelConfig
from pallas_kernels import shapes


def test_shapes_of_a_dense_model():
    found = {s.name: (s.features, s.depth) for s in shapes.QWEN3_8B.dense()}
    assert found == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
        "lm_head": (151936, 4096),
    }
    assert shapes.QWEN3_8B.grouped() == ()
    assert shapes.QWEN3_8B.quantized_widths() == (4096, 12288)


def test_shapes_of_a_mixture_of_experts():
    model = shapes.QWEN3_30B_A3B
    assert {s.name: (s.features, s.depth) for s in model.dense()} == {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "lm_head": (151936, 2048),
    }
    assert {s.name: (s.experts, s.top_k, s.features, s.depth) for s in model.grouped()} == {
        "gate_up": (128, 8, 1536, 2048),
        "down": (128, 8, 2048, 768),
    }
    assert model.quantized_widths() == (768, 2048, 4096)
    assert model.norm_widths() == (128, 2048)


def test_the_small_model_is_the_quick_start():
    config = ModelConfig(**quickstart.get_config().model)
    model = shapes.QUICKSTART
    assert (model.hidden, model.heads, model.kv_heads, model.head_dim) == (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    assert (model.vocabulary, model.inner, model.experts, model.top_k) == (
        config.vocab_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok,
    )  # fmt: skip


def test_operations_and_bytes():
    dense, grouped = shapes.QWEN3_8B.projection("o"), shapes.QWEN3_30B_A3B.grouped()[0]
    assert dense.flops(10) == 2 * 10 * 4096 * 4096
    assert dense.packed_bytes() == 4096 * 4096 // 2 + 4096 * 4096 // 16
    assert grouped.packed_bytes() == 128 * grouped.packed_bytes(1)


def test_an_unknown_projection_is_said():
    with pytest.raises(ValueError, match="no dense projection 'down': choose from qkv, o, lm_head"):
        shapes.QWEN3_30B_A3B.projection("down")


@pytest.mark.parametrize("experts", [1, 7, 8, 74, 128])
@pytest.mark.parametrize("rows", [1, 8, 511, 65536])
@pytest.mark.parametrize("kind", ["equal", "skewed"])
def test_group_sizes_add_up(rows, experts, kind):
    sizes = shapes.group_sizes(rows, experts, kind)
    assert len(sizes) == experts and sum(sizes) == rows and min(sizes) >= 0


def test_equal_and_skewed_groups():
    assert set(shapes.group_sizes(65536, 128, "equal")) == {512}
    skewed = shapes.group_sizes(65536, 128, "skewed")
    assert skewed.count(0) == 16 and max(skewed) > 10 * 512
    with pytest.raises(ValueError, match="must be 'equal' or 'skewed'"):
        shapes.group_sizes(8, 2, "uneven")
