"""Gap metrics on hand-computed differences."""

import jax
import numpy as np
import pytest

from minite_jax import diagnostics
from minite_jax.diagnostics import gap_metrics

_metrics = jax.jit(gap_metrics)
_SAMPLER = np.float32([[-1, -2, -3], [-4, -5, -6]])
_MASK = np.array([[True, True, False], [False, True, True]])
_DIFF = "train_rollout_logprob_abs_diff"


def _of(log_probs, sampler=_SAMPLER, mask=_MASK):
    return {name: float(value) for name, value in _metrics(np.float32(log_probs), np.float32(sampler), mask).items()}


def test_equal_log_probs():
    assert _of(_SAMPLER) == {
        f"{_DIFF}/mean": 0, f"{_DIFF}/max": 0, f"{_DIFF}/exact_fraction": 1, "tokens_compared": 4, "gen_kl_error": 0,
    }  # fmt: skip


def test_differences_under_the_mask():
    difference = np.float32([[0.5, -0.25, 99], [99, 0, 0]])
    metrics = _of(_SAMPLER + difference)
    assert metrics[f"{_DIFF}/mean"] == 0.75 / 4
    assert metrics[f"{_DIFF}/max"] == 0.5
    assert metrics[f"{_DIFF}/exact_fraction"] == 0.5
    k3 = np.exp([0.5, -0.25]) - np.float64([0.5, -0.25]) - 1
    assert metrics["gen_kl_error"] == pytest.approx(k3.sum() / 4, rel=1e-6)


def test_the_last_bit_counts():
    log_probs = _SAMPLER.copy()
    log_probs[1, 2] = np.nextafter(log_probs[1, 2], np.float32(0))
    metrics = _of(log_probs)
    assert metrics[f"{_DIFF}/exact_fraction"] == 0.75
    assert metrics[f"{_DIFF}/max"] == 2.0**-21  # one ulp of 6, from below


def test_a_small_gap_is_not_lost_in_the_mean():
    metrics = _of(_SAMPLER + np.float32(1e-6), mask=np.ones((2, 3), bool))
    assert 0 < metrics[f"{_DIFF}/mean"] < 2e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_show(bad):
    log_probs = _SAMPLER.copy()
    log_probs[0, 1] = bad
    for metrics in (_of(log_probs), _of(_SAMPLER, sampler=log_probs)):
        for name in (f"{_DIFF}/mean", f"{_DIFF}/max", "gen_kl_error"):
            assert not np.isfinite(metrics[name])
        assert metrics[f"{_DIFF}/exact_fraction"] == 0.75
        assert metrics["tokens_compared"] == 4


def test_what_the_mask_hides_does_not_show():
    log_probs = _SAMPLER.copy()
    log_probs[0, 2], log_probs[1, 0] = np.nan, np.inf
    assert _of(log_probs) == _of(_SAMPLER)


def test_an_empty_mask():
    log_probs = np.full((2, 3), np.nan, np.float32)
    metrics = _of(log_probs, mask=np.zeros((2, 3), bool))
    assert set(metrics.values()) == {0.0}


def test_the_diagnostics_are_exported():
    # How large the gap is, and where it comes from.
    assert {"gap_metrics", "certify", "order_dependence", "record_matmuls"} <= set(diagnostics.__all__)
    assert all(callable(getattr(diagnostics, name)) for name in diagnostics.__all__)
