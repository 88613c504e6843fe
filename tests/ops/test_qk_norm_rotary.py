"""Split, norm and rotation in one operation: the bits and the gradients of the operations one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qk_norm_rotary import qk_norm_rotary
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rotary import rotary, rotary_table

_H, _N, _K, _EPS = 4, 2, 8, 1e-6


def _inputs(dtype, num_rows=130):
    rng = np.random.default_rng(5)
    qkv = jnp.asarray(rng.standard_normal((num_rows, _H + 2 * _N, _K)) * 3, dtype)
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, _K)), jnp.float32)
    cos, sin = (jnp.asarray(table[rng.permutation(num_rows)]) for table in rotary_table(num_rows, _K, 1e4))
    return qkv, *weights, cos, sin


def _fused(*inputs):
    return qk_norm_rotary(*inputs, num_heads=_H, num_kv_heads=_N, eps=_EPS)


def _one_after_another(qkv, q_weight, k_weight, cos, sin):
    q, k, v = jnp.split(qkv, (_H, _H + _N), axis=1)
    normed = lambda x, weight: rms_norm(x.reshape(-1, _K), weight, eps=_EPS).reshape(x.shape)  # noqa: E731
    return rotary(normed(q, q_weight), cos, sin), rotary(normed(k, k_weight), cos, sin), v


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_and_gradients_are_those_of_the_operations_in_turn(assert_same_bits, dtype):
    inputs = _inputs(dtype)

    def both(op):
        @jax.jit
        def run(*inputs):
            results, pullback = jax.vjp(op, *inputs)
            return results, pullback(jax.tree.map(lambda x: jnp.flip(x, 0), results))

        return run(*inputs)

    assert_same_bits(both(_fused), both(_one_after_another))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_rows(check_rows, dtype):
    qkv, q_weight, k_weight, cos, sin = _inputs(dtype)
    check_rows(lambda rows: _fused(rows[0], q_weight, k_weight, *rows[1:]), (qkv, cos, sin))


def test_a_wrong_number_of_heads_is_refused():
    qkv, *rest = _inputs("float32", 2)
    with pytest.raises(ValueError, match="7 heads are not 4 of queries and twice 2 of keys and values"):
        _fused(qkv[:, 1:], *rest)
