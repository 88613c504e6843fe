"""The benchmark of log-probs compares like with like."""

import jax
import numpy as np
import pytest

from experiments.kernels import cases, log_prob_suite, measure
from experiments.kernels.peers import Measured
from experiments.timing import Timing

_CASES = {case.name: case for case in log_prob_suite.cases(cases.QUICK)}
_BOTH_WAYS = "quickstart log-probs and gradients"


@pytest.mark.parametrize("name", [name for name, case in _CASES.items() if cases.VS_UNFUSED in case.ratios])
def test_what_is_compared_computes_the_same(name):
    case = _CASES[name]
    inputs = case.make(jax.random.key(0))
    ours = jax.tree.leaves(jax.jit(case.function)(*inputs))
    others = jax.tree.leaves(jax.jit(case.ratios[cases.VS_UNFUSED].function)(*inputs))
    for a, b in zip(ours, others, strict=True):
        # Of the plain gradients that of the head is rounded to bfloat16.
        tolerance = 2.0**-8 if name == _BOTH_WAYS else 2.0**-18
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=1e-5)


def test_memory_has_a_column():
    row = measure._time_cells(Measured(Timing(1.0, 0.0, 1, 1), held=5_000_000))
    assert row["held"] == 5.0 and "held" in {column["key"] for column in measure.COLUMNS}
    assert measure._time_cells(Measured(Timing(1.0, 0.0, 1, 1)))["held"] == measure.BLANK
