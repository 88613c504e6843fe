"""The benchmark of norm and rotation compares like with like."""

import jax
import numpy as np
import pytest

from experiments.kernels import attention_suite, cases

_CASES = [case for case in attention_suite.cases(cases.QUICK) if cases.VS_UNFUSED in case.ratios]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_what_is_compared_computes_the_same(case):
    inputs = case.make(jax.random.key(0))
    ours = jax.tree.leaves(jax.jit(case.function)(*inputs))
    others = jax.tree.leaves(jax.jit(case.ratios[cases.VS_UNFUSED].function)(*inputs))
    for a, b in zip(ours, others, strict=True):
        a, b = np.float32(a), np.float32(b)
        # Both round to bfloat16, at most a step apart; a gradient where terms cancel is as exact as its terms.
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=2.0**-6 * np.abs(a).max())


def test_fewest_bytes_of_norm_and_rotation():
    forward, backward = _CASES
    inputs, results = (jax.tree.leaves(tree) for tree in _shapes(forward))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in (*inputs, *results))
    weights = 2 * 4 * cases.QUICK.moe.head_dim
    assert forward.nbytes == size - weights
    inputs, results = (jax.tree.leaves(tree) for tree in _shapes(backward))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in (*inputs, *results))
    values = 2 * cases.QUICK.tokens * cases.QUICK.moe.kv_heads * cases.QUICK.moe.head_dim
    assert backward.nbytes == size - 2 * weights - values  # weights and their gradients are small; v is not read


def _shapes(case):
    inputs = jax.eval_shape(case.make, jax.random.key(0))
    return inputs, jax.eval_shape(case.function, *inputs)
