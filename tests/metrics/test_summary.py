import math

import pytest

from minite_jax.metrics import names
from minite_jax.metrics.summary import RunGap, run_gap


def _update(tokens, gap):
    return {names.TOKENS_COMPARED: float(tokens), names.GAP_MAX: gap, names.GAP_EXACT_FRACTION: float(gap == 0)}


def test_the_gap_over_updates():
    assert run_gap([{names.STEP: 0}, _update(30, 0.0), _update(10, 0.5)]) == RunGap(2, 40, 0.5, 0.75)
    assert run_gap([]) is None and run_gap([{names.STEP: 0}]) is None


@pytest.mark.parametrize("place", range(3))
def test_a_gap_that_is_no_number_does_not_vanish(place):
    rows = [_update(10, 0.0) for _ in range(3)]
    rows[place][names.GAP_MAX] = math.nan
    assert math.isnan(run_gap(rows).largest)


def test_no_token_compared():
    gap = run_gap([_update(0, 0.0)])
    assert gap.tokens == 0 and math.isnan(gap.equal_bits)
