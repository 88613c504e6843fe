import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, gpu, nvfp4, operands
from pallas_kernels.attention import attention
from pallas_kernels.combine import combine
from pallas_kernels.embedding import embed
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits, sample_tokens, token_log_prob
from pallas_kernels.matmul import matmul, matmul_dgrad, matmul_wgrad
from pallas_kernels.qk_norm_rotary import qk_norm_rotary
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_backward, rms_norm
from pallas_kernels.rotary import rotary
from pallas_kernels.router import router
from pallas_kernels.silu_mul import silu_mul
from pallas_kernels.undispatch import undispatch

_A = jnp.ones((2, 16))
_SIZES = jnp.asarray([2], jnp.int32)
_HEADS = jnp.ones((1, 2, 1, 4))
_CALLS = {
    "matmul": lambda name: matmul(_A, _A, implementation=name),
    "matmul_dgrad": lambda name: matmul_dgrad(jnp.ones((2, 2)), _A, implementation=name),
    "matmul_wgrad": lambda name: matmul_wgrad(_A, jnp.ones((2, 2)), implementation=name),
    "grouped_matmul": lambda name: grouped_matmul(_A, _A[None], _SIZES, implementation=name),
    "grouped_matmul_dgrad": lambda name: grouped_matmul_dgrad(jnp.ones((2, 2)), _A[None], _SIZES, implementation=name),
    "grouped_matmul_wgrad": lambda name: grouped_matmul_wgrad(_A, jnp.ones((2, 2)), _SIZES, implementation=name),
    "rms_norm": lambda name: rms_norm(_A, jnp.ones(16), eps=1e-6, implementation=name),
    "add_rms_norm": lambda name: add_rms_norm(_A, _A, jnp.ones(16), eps=1e-6, implementation=name),
    "add_rms_norm_backward": lambda name: add_rms_norm_backward(_A, jnp.ones(16), _A, _A, eps=1e-6, implementation=name),
    "rotary": lambda name: rotary(_HEADS[0], jnp.ones((2, 2)), jnp.ones((2, 2)), implementation=name),
    "qk_norm_rotary": lambda name: qk_norm_rotary(
        jnp.ones((2, 3, 4)), *jnp.ones((2, 4)), *jnp.ones((2, 2, 2)), num_heads=1, num_kv_heads=1, eps=1e-6, implementation=name
    ),
    "silu_mul": lambda name: silu_mul(_A, implementation=name),
    "combine": lambda name: combine(_A[None], jnp.ones((1, 2)), implementation=name),
    "undispatch": lambda name: undispatch(_A, jnp.zeros((1, 2), jnp.int32), implementation=name),
    "embed": lambda name: embed(jnp.zeros(2, jnp.int32), _A, implementation=name),
    "router": lambda name: router(_A, _A, top_k=1, normalize=True, implementation=name),
    "attention": lambda name: attention(_HEADS, _HEADS, _HEADS, jnp.zeros((1, 2), jnp.int32), implementation=name),
    "kept_tokens": lambda name: kept_tokens(_A, Truncation(), implementation=name),
    "log_prob_of_logits": lambda name: log_prob_of_logits(_A, jnp.zeros(2, jnp.int32), Truncation(), None, implementation=name),
    "sample_tokens": lambda name: sample_tokens(_A, jax.random.split(jax.random.key(0)), Truncation(), None, implementation=name),
    "token_log_prob": lambda name: token_log_prob(_A, _A, jnp.zeros(2, jnp.int32), Truncation(), implementation=name),
}


@pytest.mark.parametrize("op", _CALLS)
def test_an_unknown_implementation_is_refused_by_name(op):
    with pytest.raises(NotImplementedError, match=f"{op}.*: no implementation 'cuda'; there is reference"):
        _CALLS[op]("cuda")


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        names = [dispatch.resolve("an op of this test", name) for name in (None, "reference", None)]
    assert names == ["reference"] * 3
    assert [record.getMessage() for record in caplog.records] == ["an op of this test: reference implementation on cpu"]


def test_a_preference_holds_for_what_names_nothing(monkeypatch):
    monkeypatch.setattr(dispatch, "_preferred", None)
    dispatch.prefer("reference")
    assert dispatch.resolve("an op", None) == "reference"
    dispatch.prefer("triton")
    with pytest.raises(NotImplementedError, match="an op: the triton implementation needs a GPU, this is cpu"):
        dispatch.resolve("an op", None)
    assert dispatch.resolve("an op", "reference") == "reference"
    assert dispatch.resolve("an op without a kernel", None, ("reference",)) == "reference"
    with pytest.raises(ValueError, match="'cuda': must be one of reference, triton, mosaic"):
        dispatch.prefer("cuda")


@pytest.mark.slow
def test_which_products_read_packed_weights(monkeypatch):
    x = nvfp4.quantize(jnp.ones((65, 16)), nvfp4.ScaleRule.fp8_exact())
    w = nvfp4.quantize(jnp.ones((16, 16)), nvfp4.ScaleRule.fp8_exact(outer="matrix"))
    other = nvfp4.quantize(jnp.ones((16, 16)), nvfp4.ScaleRule.te())
    monkeypatch.setattr(gpu, "multiplies_codes", lambda: False)
    expanded = nvfp4.expand(x)
    assert [operands.packed_product(expanded, w, rows) for rows in (1, 64, 65)] == ["fp8", "fp8", None]
    assert operands.packed_product(x, w, 64) == "fp8" and operands.packed_product(x, other, 64) == "bf16"
    assert operands.packed_product(x, nvfp4.expand(w), 1) is operands.packed_product(_A, w, 1) is None
    stack = jax.tree.map(lambda leaf: leaf[None].repeat(4, 0), w)
    assert [operands.packed_product(x, stack, rows) for rows in (256, 257)] == ["fp8", None]
    monkeypatch.setattr(gpu, "multiplies_codes", lambda: True)
    assert operands.packed_product(x, w, 10_000) == "native" and operands.packed_product(expanded, w, 65) is None


def test_which_products_hopper_gives_to_mosaic(monkeypatch):
    asked = []

    def resolve(op, implementation, available=(), *, gpu_default="triton"):
        if "mosaic" in available:
            asked.append(gpu_default)
        return "reference"

    monkeypatch.setattr(dispatch, "resolve", resolve)
    monkeypatch.setattr(gpu, "on_hopper", lambda: True)
    monkeypatch.setattr(gpu, "multiplies_codes", lambda: False)

    def call_all(rows, n, k, dtype):
        x, w, g = jnp.ones((rows, k), dtype or jnp.bfloat16), jnp.ones((n, k), dtype or jnp.bfloat16), jnp.ones((rows, n))
        if dtype is None:
            x = nvfp4.quantize(x, nvfp4.ScaleRule.fp8_exact(outer="row"))
            w = nvfp4.quantize(w, nvfp4.ScaleRule.fp8_exact(outer="matrix"))
        sizes, stack = jnp.asarray([rows], jnp.int32), jax.tree.map(lambda leaf: leaf[None], w)
        forward = matmul(x, w), grouped_matmul(x, stack, sizes), grouped_matmul(x, stack, sizes, rows=jnp.arange(rows))
        dgrad = matmul_dgrad(g, w), grouped_matmul_dgrad(g, stack, sizes)
        return forward, dgrad, matmul_wgrad(x, g), grouped_matmul_wgrad(x, g, sizes)

    def chosen(rows, n, k, dtype=None):
        """m(osaic) or t(riton) for dense, grouped, grouped with rows by number, both dgrads, both wgrads."""
        asked.clear()
        jax.eval_shape(lambda: call_all(rows, n, k, dtype))
        return "".join(each[0] for each in asked)

    assert chosen(65, 64, 64) == "mmt" + "mmmm"
    assert chosen(64, 64, 64) == "ttt" + "mmmm"  # packed weights
    assert chosen(65, 64, 16) == "mmt" + "tttt"  # bfloat16 wants K in multiples of 64
    assert chosen(65, 96, 64) == "ttt" + "tttt"
    assert chosen(65, 64, 64, jnp.bfloat16) == "mmm" + "mmmm"
    assert chosen(65, 64, 64, jnp.float32) == "ttt" + "tttt"
    operands.resolve_matmul("a gradient", None, jnp.float8_e4m3fn, 64, 64)
    assert asked[-1] == "triton"
