"""Gap metrics on hand-computed differences."""

import jax
import numpy as np
import pytest

from minite_jax import diagnostics
from minite_jax.diagnostics import EXACT, THRESHOLDS, gap_metrics, gap_warnings, worst_tokens

_metrics = jax.jit(gap_metrics)
_SAMPLER = np.float32([[-1, -2, -3], [-4, -5, -6]])
_MASK = np.array([[True, True, False], [False, True, True]])
_DIFF = "train_rollout_logprob_abs_diff"


def _of(log_probs, sampler=_SAMPLER, mask=_MASK):
    return {name: float(value) for name, value in _metrics(np.float32(log_probs), np.float32(sampler), mask).items()}


# What two equal policies have. Everything else is 0 for them.
_ONE = {
    f"{_DIFF}/exact_fraction", "token_mult_prob_error", "sampling_importance_ratio", "rollout_corr/ppl_ratio",
    "rollout_corr/rollout_is_eff_sample_size", "training/rollout_actor_probs_pearson_corr",
}  # fmt: skip


def test_equal_log_probs():
    metrics = _of(_SAMPLER)
    assert metrics.pop("tokens_compared") == 4 and metrics.pop(f"{_DIFF}/worst_log_prob") == -1
    assert metrics == {name: float(name in _ONE) for name in metrics} and metrics.keys() > _ONE
    assert gap_warnings(metrics, EXACT + THRESHOLDS) == {}


def test_differences_under_the_mask():
    difference = np.float32([[0.5, -0.25, 99], [99, 0, 0]])
    metrics = _of(_SAMPLER + difference)
    assert metrics[f"{_DIFF}/mean"] == 0.75 / 4
    assert metrics[f"{_DIFF}/max"] == 0.5
    assert metrics[f"{_DIFF}/exact_fraction"] == 0.5
    k3 = np.exp([0.5, -0.25]) - np.float64([0.5, -0.25]) - 1
    assert metrics["gen_kl_error"] == pytest.approx(k3.sum() / 4, rel=1e-6)


def test_every_definition_on_random_numbers():
    """The formulas of the module's table, in float64, sequence by sequence."""
    rng = np.random.default_rng(0)
    log_p = -rng.exponential(1.0, (5, 9)).astype(np.float32)
    log_q = log_p + rng.normal(0, 0.4, log_p.shape).astype(np.float32)
    mask = rng.random(log_p.shape) < 0.7
    mask[3] = False
    metrics = _of(log_p, log_q, mask)
    p, q = np.float64(log_p[mask]), np.float64(log_q[mask])
    D, ratio = p - q, np.exp(p - q)
    sums = [np.sum((np.float64(log_p) - log_q)[b][mask[b]]) for b in range(5) if mask[b].any()]
    means = np.array([s / mask[b].sum() for s, b in zip(sums, (0, 1, 2, 4), strict=True)])
    k3 = lambda x: np.exp(x) - x - 1  # noqa: E731
    middle = np.log((np.exp(p) + np.exp(q)) / 2)
    gap = np.abs(np.exp(p) - np.exp(q))
    weights = ratio / ratio.mean()
    at = np.argmax(np.where(mask, np.abs(log_p - log_q), 0))
    wanted = {
        f"{_DIFF}/mean": np.abs(D).mean(),
        f"{_DIFF}/max": np.abs(D).max(),
        f"{_DIFF}/exact_fraction": 0,
        f"{_DIFF}/worst_row": at // 9,
        f"{_DIFF}/worst_column": at % 9,
        f"{_DIFF}/worst_log_prob": log_p.flat[at],
        "tokens_compared": mask.sum(),
        "gen_kl_error": k3(D).mean(),
        "policy_kl_error": k3(-D).mean(),
        "token_mult_prob_error": np.exp(np.abs(D)).mean(),
        "sampling_importance_ratio": ratio.mean(),
        "js_divergence_error": ((k3(p - middle) + k3(q - middle)) / 2).mean(),
        "extreme_token_fraction": (np.maximum(ratio, 1 / ratio) > 2).mean(),
        "rollout_corr/kl": -D.mean(),
        "rollout_corr/chi2_token": (ratio**2).mean() - 1,
        "rollout_corr/rollout_is_eff_sample_size": 1 / (weights**2).mean(),
        "rollout_corr/chi2_seq": np.exp(2 * np.clip(sums, -20, 20)).mean() - 1,
        "rollout_corr/log_ppl_diff": -means.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(means).mean(),
        "rollout_corr/log_ppl_diff_max": -means.min(),
        "rollout_corr/ppl_ratio": np.exp(-means).mean(),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": gap.std(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(p), np.exp(q))[0, 1],
    }
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name  # float32 sums of 31 tokens, exponents below 2


def test_a_gap_is_named_with_its_token():
    log_probs = _SAMPLER.copy()
    log_probs[1, 2] = -5.9
    log_probs[0, 1] = np.nextafter(log_probs[0, 1], np.float32(0))
    log_probs[0, 2] = 0.0  # behind the mask
    found = gap_warnings(_of(log_probs), EXACT + THRESHOLDS)
    assert set(found) == {f"{_DIFF}/max", f"{_DIFF}/exact_fraction", "gen_kl_error"}
    assert "gen_kl_error is 0.0012" in found["gen_kl_error"] and "NeMo-RL wants it within 0 .. 0.001" in found["gen_kl_error"]
    tokens = np.arange(97, 103).reshape(2, 3)
    worst = worst_tokens(log_probs, _SAMPLER, _MASK, tokens, decode=lambda ids: bytes(ids).decode())
    assert [(each.row, each.column, each.token, each.text) for each in worst] == [(1, 2, 102, "def"), (0, 1, 98, "ab")]
    assert worst[1].ulps == 1 and "row 1, column 2: token 102 'def', log-prob -6 when sampled, -5.9 in the update" in str(
        worst[0]
    )
    assert worst_tokens(_SAMPLER, _SAMPLER, _MASK) == []


def test_nan_is_a_warning_and_the_worst_token():
    log_probs = _SAMPLER.copy()
    log_probs[1, 1] = np.nan
    metrics = _of(log_probs)
    assert set(gap_warnings(metrics)) >= {"gen_kl_error", "js_divergence_error", "rollout_corr/rollout_is_eff_sample_size"}
    assert (metrics[f"{_DIFF}/worst_row"], metrics[f"{_DIFF}/worst_column"]) == (1, 1)
    (worst,) = worst_tokens(log_probs, _SAMPLER, _MASK)
    assert (worst.row, worst.column, worst.ulps, worst.token) == (1, 1, None, None)


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
    assert metrics == {name: float(name in _ONE - {f"{_DIFF}/exact_fraction"}) for name in metrics}


def test_the_diagnostics_are_exported():
    # How large the gap is, and where it comes from.
    assert {"gap_metrics", "certify", "order_dependence", "record_matmuls"} <= set(diagnostics.__all__)
    assert all(hasattr(diagnostics, name) for name in diagnostics.__all__)
