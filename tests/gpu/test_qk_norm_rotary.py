"""Split, norm and rotation in one kernel on a GPU: the bits of the kernels in turn and of the reference, for any number of
tokens, every time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qk_norm_rotary import qk_norm_rotary
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rotary import rotary

pytestmark = pytest.mark.gpu

_TOKENS, _EPS = 515, 1e-6
_SHAPES = {"32 and 4 heads of 128": (32, 4, 128), "5 and 1 heads of 64": (5, 1, 64), "4 and 4 heads of 24": (4, 4, 24)}


def _inputs(shape, dtype):
    heads, kv_heads, width = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_TOKENS, heads + 2 * kv_heads, width)) * 10.0 ** rng.integers(-2, 3, (_TOKENS, 1, 1))
    angle = rng.uniform(0, 6, (_TOKENS, width // 2))
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, width)), jnp.float32)
    return jnp.asarray(x, dtype), *weights, jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def _op(shape, implementation):
    heads, kv_heads, _ = shape
    return lambda *inputs: qk_norm_rotary(
        *inputs, num_heads=heads, num_kv_heads=kv_heads, eps=_EPS, implementation=implementation
    )


def _in_turn(shape):
    heads, kv_heads, width = shape

    def op(qkv, q_weight, k_weight, cos, sin):
        def turned(x, weight):
            normed = rms_norm(x.reshape(-1, width), weight, eps=_EPS, implementation="triton").reshape(x.shape)
            return rotary(normed, cos, sin, implementation="triton")

        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
        return turned(q, q_weight), turned(k, k_weight), v

    return op


def _both_ways(op):
    @jax.jit
    def run(*inputs):
        results, pullback = jax.vjp(op, *inputs)
        return results, pullback(jax.tree.map(lambda x: jnp.flip(x, 0), results))

    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", _SHAPES)
def test_bits_forward_and_backward(name, dtype):
    shape, inputs = _SHAPES[name], _inputs(_SHAPES[name], dtype)
    found = jax.tree.leaves(_both_ways(_op(shape, "triton"))(*inputs))
    for other in (_op(shape, "reference"), _in_turn(shape)):
        for a, b in zip(found, jax.tree.leaves(_both_ways(other)(*inputs)), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_tokens_alone_have_the_bits_they_have_in_a_batch():
    shape = _SHAPES["32 and 4 heads of 128"]
    qkv, q_weight, k_weight, cos, sin = _inputs(shape, "bfloat16")
    run = jax.jit(_op(shape, "triton"))
    whole = run(qkv, q_weight, k_weight, cos, sin)
    for first, count in ((0, 1), (17, 1), (100, 16), (_TOKENS - 130, 130)):
        part = slice(first, first + count)
        for a, b in zip(run(qkv[part], q_weight, k_weight, cos[part], sin[part]), whole, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b)[part].tobytes(), (first, count)


def test_twenty_runs_give_one_result():
    shape = _SHAPES["32 and 4 heads of 128"]
    run, inputs = _both_ways(_op(shape, "triton")), _inputs(shape, "bfloat16")
    assert len({b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(run(*inputs))) for _ in range(20)}) == 1
