"""How far the policy that sampled is from the policy that trains, under the names and by the formulas of other frameworks.

With D the trained policy's log-prob minus the sampler's (raw: before any truncation, clipping or correction), rho = e^D, and
means over the tokens of the mask unless "of sequences" is said:

============================================  =======================================================  ======================
name                                          definition                                               as in
============================================  =======================================================  ======================
train_rollout_logprob_abs_diff/mean, /max     ``|D|``                                                  slime, Miles; TRL
.../exact_fraction                            share of tokens whose two log-probs are equal bits       here
.../worst_row, /worst_column, /worst_log_prob  where ``|D|`` is largest (the first such place), and the trained
                                              policy's log-prob there                                  here
tokens_compared                               how many tokens
gen_kl_error                                  ``e^D - D - 1``: the k3 estimate of KL(sampler || policy)  NeMo-RL; verl k3_kl
policy_kl_error                               ``e^-D + D - 1``                                         NeMo-RL
token_mult_prob_error                         ``e^|D|``                                                NeMo-RL
sampling_importance_ratio                     ``e^D``                                                  NeMo-RL
js_divergence_error                           with ``m = log((p + q) / 2)`` of both probabilities, half of
                                              k3(log p - m) + k3(log q - m), k3(x) = e^x - x - 1       NeMo-RL
rollout_corr/kl                               ``-D``                                                   verl, slime
rollout_corr/chi2_token                       ``rho^2``, minus 1                                       verl
rollout_corr/chi2_seq                         of sequences: e^(2 sum of D), the sum within +-20, minus 1  verl
rollout_corr/rollout_is_eff_sample_size       ``1 / mean((rho / mean rho)^2)``                         verl
rollout_corr/log_ppl_diff, _abs_diff, _max    of sequences: the mean of -D in each                     verl, slime
rollout_corr/ppl_ratio                        of sequences: e^(log_ppl_diff of each)                   verl
training/rollout_probs_diff_mean, _max, _std  ``|e^log p - e^log q|``                                  verl
training/rollout_actor_probs_pearson_corr     correlation of both probabilities                        verl
extreme_token_fraction                        share of tokens with ``max(rho, 1/rho) > 2``             arXiv:2510.11370
============================================  =======================================================  ======================
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.numerics import divide

_Host = Array | np.ndarray
GAP = "train_rollout_logprob_abs_diff"
EXTREME_RATIO = 2.0
_LARGEST_LOG_RATIO = 20.0  # verl's bound of a sequence's sum, so that e^ of it is a number


def _k3(x):
    return jnp.expm1(x) - x


def gap_metrics(
    log_probs: Float[Array, "B T"], sampler_log_probs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
    """The gap between two sets of log-probs of the same tokens.

    Args:
      log_probs: [B, T] float32 of the trained policy, unrounded.
      sampler_log_probs: [B, T] float32 of the sampler, unrounded.
      mask: [B, T] tokens to compare.

    Returns:
      Float32 scalars by name: the module's table. A NaN in either argument, where the mask holds, makes every metric NaN that
      reads its token, never skipped. An empty mask gives the values of equal policies, but that no token was exact and
      tokens_compared is 0.
    """
    count = jnp.sum(mask)
    divisor = jnp.maximum(count, 1).astype(jnp.float32)
    difference_BT = jnp.where(mask, log_probs - sampler_log_probs, 0.0)
    absolute_BT = jnp.abs(difference_BT)
    same_bits_BT = lax.bitcast_convert_type(log_probs, jnp.uint32) == lax.bitcast_convert_type(sampler_log_probs, jnp.uint32)

    def mean(x_BT):
        return jnp.sum(jnp.where(mask, x_BT, 0.0)) / divisor

    # What is 1 for equal policies is a sum of what is 0 for them, plus 1: a GPU's 66 / 66 is 0.99999994.
    ratio_less_1_BT = jnp.expm1(difference_BT)
    middle_BT = jnp.logaddexp(log_probs, sampler_log_probs) - np.float32(np.log(2.0))
    middle_BT = jnp.where(same_bits_BT, log_probs, middle_BT)  # the mean of two equal probabilities, without a rounding
    js_BT = 0.5 * (_k3(log_probs - middle_BT) + _k3(sampler_log_probs - middle_BT))
    worst = jnp.argmax(absolute_BT)  # of a NaN, if there is one
    mean_ratio = 1.0 + mean(ratio_less_1_BT)
    # mean((rho / mean rho)^2) - 1 is the variance of rho / mean rho.
    spread = mean(jnp.square((1.0 + ratio_less_1_BT - mean_ratio) / mean_ratio))

    return {
        f"{GAP}/mean": jnp.sum(absolute_BT) / divisor,
        f"{GAP}/max": jnp.max(absolute_BT, initial=0.0),
        f"{GAP}/exact_fraction": divide(jnp.sum(same_bits_BT & mask).astype(jnp.float32), divisor),
        f"{GAP}/worst_row": (worst // mask.shape[1]).astype(jnp.float32),
        f"{GAP}/worst_column": (worst % mask.shape[1]).astype(jnp.float32),
        f"{GAP}/worst_log_prob": jnp.where(mask.reshape(-1)[worst], log_probs.reshape(-1)[worst], 0.0),
        "tokens_compared": count.astype(jnp.float32),
        "gen_kl_error": mean(_k3(difference_BT)),
        "policy_kl_error": mean(_k3(-difference_BT)),
        "token_mult_prob_error": 1.0 + mean(jnp.expm1(absolute_BT)),
        "sampling_importance_ratio": mean_ratio,
        "js_divergence_error": mean(js_BT),
        "extreme_token_fraction": mean(_exceeds(absolute_BT, np.log(EXTREME_RATIO))),
        "rollout_corr/kl": mean(-difference_BT),
        "rollout_corr/chi2_token": mean(jnp.expm1(2.0 * difference_BT)),
        "rollout_corr/rollout_is_eff_sample_size": 1.0 / (1.0 + spread),
        **_of_sequences(difference_BT, mask),
        **_of_probabilities(log_probs, sampler_log_probs, mask, mean),
    }


def _exceeds(x, bound):
    """1 where x > bound, 0 where not, NaN of a NaN."""
    return jnp.where(jnp.isnan(x), x, (x > bound).astype(jnp.float32))


def _of_sequences(difference_BT, mask):
    tokens_B = jnp.sum(mask, axis=1)
    counts_B = tokens_B > 0
    sequences = jnp.maximum(jnp.sum(counts_B), 1).astype(jnp.float32)
    sum_B = jnp.sum(difference_BT, axis=1)
    log_ppl_diff_B = -sum_B / jnp.maximum(tokens_B, 1).astype(jnp.float32)

    def mean(x_B):
        return jnp.sum(jnp.where(counts_B, x_B, 0.0)) / sequences

    bounded_B = jnp.clip(sum_B, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return {
        "rollout_corr/chi2_seq": mean(jnp.expm1(2.0 * bounded_B)),
        "rollout_corr/log_ppl_diff": mean(log_ppl_diff_B),
        "rollout_corr/log_ppl_abs_diff": mean(jnp.abs(log_ppl_diff_B)),
        "rollout_corr/log_ppl_diff_max": jnp.max(log_ppl_diff_B, initial=-jnp.inf, where=counts_B | ~jnp.any(counts_B)),
        "rollout_corr/ppl_ratio": 1.0 + mean(jnp.expm1(log_ppl_diff_B)),
    }


def _of_probabilities(log_probs, sampler_log_probs, mask, mean):
    p_BT, q_BT = (jnp.where(mask, jnp.exp(x), 0.0) for x in (log_probs, sampler_log_probs))
    difference_BT = jnp.abs(p_BT - q_BT)
    average = mean(difference_BT)
    # Equal probabilities have equal variance and covariance, to the last bit, and sqrt(x) * sqrt(x) might not be x.
    p_BT, q_BT = p_BT - mean(p_BT), q_BT - mean(q_BT)
    covariance, p_variance, q_variance = mean(p_BT * q_BT), mean(p_BT * p_BT), mean(q_BT * q_BT)
    correlation = divide(covariance, jnp.where(p_variance == q_variance, p_variance, jnp.sqrt(p_variance * q_variance)))
    constant = (p_variance == 0) & (q_variance == 0)
    return {
        "training/rollout_probs_diff_mean": average,
        "training/rollout_probs_diff_max": jnp.max(difference_BT, initial=0.0),
        "training/rollout_probs_diff_std": jnp.sqrt(mean(jnp.square(difference_BT - average))),
        "training/rollout_actor_probs_pearson_corr": jnp.where(constant, 1.0, correlation),
    }


# --- what is worth a warning, and the tokens behind it


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Values of a metric that are worth a warning.

    Attributes:
      metric: its name.
      low, high: it should lie between the two.
      source: who says so.
    """

    metric: str
    low: float
    high: float
    source: str


THRESHOLDS = (
    Threshold("token_mult_prob_error", 1.0, 1.05, "NeMo-RL"),
    Threshold("gen_kl_error", 0.0, 1e-3, "NeMo-RL"),
    Threshold("js_divergence_error", 0.0, 7e-3, "NeMo-RL's NVFP4 suite"),
    Threshold("sampling_importance_ratio", 0.5, 2.0, "verl"),
    Threshold("rollout_corr/rollout_is_eff_sample_size", 0.3, 1.0 + 1e-6, "verl"),
)
# For engines that claim to be one: nothing but equal bits.
EXACT = (
    Threshold(f"{GAP}/max", 0.0, 0.0, "an aligned sampler"),
    Threshold(f"{GAP}/exact_fraction", 1.0, 1.0, "an aligned sampler"),
)


def gap_warnings(metrics: Mapping[str, float], thresholds: Sequence[Threshold] = THRESHOLDS) -> dict[str, str]:
    """A sentence for each metric that is NaN or outside of its bounds, by its name. Metrics that are missing are fine."""
    found = {}
    for each in thresholds:
        value = float(metrics.get(each.metric, each.low))
        if not each.low <= value <= each.high:  # true of a NaN
            bounds = f"{each.low:g}" if each.low == each.high else f"within {each.low:g} .. {each.high:g}"
            found[each.metric] = f"{each.metric} is {value:.6g}; {each.source} wants it {bounds}"
    return found


@dataclasses.dataclass(frozen=True)
class TokenGap:
    """A token whose two log-probs differ.

    Attributes:
      row, column: its place in the arrays.
      token: its id, or None.
      text: the token with what stands before it, or "".
      log_prob, sampler_log_prob: of the trained policy and of the sampler, nats.
      ulps: steps of float32 between the two; None where one is not finite.
    """

    row: int
    column: int
    token: int | None
    text: str
    log_prob: float
    sampler_log_prob: float
    ulps: int | None

    def __str__(self) -> str:
        name = "token" if self.token is None else f"token {self.token}"
        text = f" {self.text!r}" if self.text else ""
        distance = "" if self.ulps is None else f", {self.ulps} float32 steps"
        return (
            f"row {self.row}, column {self.column}: {name}{text}, log-prob {self.sampler_log_prob:.6g} when sampled, "
            f"{self.log_prob:.6g} in the update{distance}"
        )


def worst_tokens(
    log_probs: Float[_Host, "B T"],
    sampler_log_probs: Float[_Host, "B T"],
    mask: Bool[_Host, "B T"],
    tokens: Int[_Host, "B T"] | None = None,
    *,
    count: int = 10,
    decode: Callable[[Sequence[int]], str] | None = None,
    context: int = 8,
) -> list[TokenGap]:
    """The tokens whose log-probs differ most, those with NaN first; on the host.

    Args:
      log_probs, sampler_log_probs, mask: see `gap_metrics`.
      tokens: [B, T] ids of the tokens that the log-probs belong to: column t of all arrays is one token.
      count: how many at most. Tokens of equal bits are never among them.
      decode: from ids to text.
      context: how many tokens before it the text shows.
    """
    p_BT, q_BT, mask = np.asarray(log_probs, np.float32), np.asarray(sampler_log_probs, np.float32), np.asarray(mask, bool)
    differs_BT = mask & (p_BT.view(np.uint32) != q_BT.view(np.uint32))
    with np.errstate(invalid="ignore"):
        size_BT = np.where(differs_BT, np.abs(p_BT - q_BT), -1.0)
    size_BT = np.where(np.isnan(size_BT), np.inf, size_BT)
    places = np.argsort(-size_BT, axis=None, kind="stable")[: min(count, int(differs_BT.sum()))]
    return [
        token_gap(
            int(row), int(column), float(p_BT[row, column]), float(q_BT[row, column]), tokens, decode=decode, context=context
        )
        for row, column in zip(*np.unravel_index(places, mask.shape), strict=True)
    ]


def token_gap(
    row: int,
    column: int,
    log_prob: float,
    sampler_log_prob: float,
    tokens: Int[_Host, "B T"] | None = None,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    context: int = 8,
) -> TokenGap:
    """One token of `worst_tokens`, of which the place is known."""
    finite = np.isfinite(log_prob) and np.isfinite(sampler_log_prob)
    ids = [] if tokens is None else np.asarray(tokens)[row, max(0, column - context) : column + 1].tolist()
    return TokenGap(
        row=row,
        column=column,
        token=ids[-1] if ids else None,
        text=decode(ids) if decode and ids else "",
        log_prob=log_prob,
        sampler_log_prob=sampler_log_prob,
        ulps=abs(_place_in_order(log_prob) - _place_in_order(sampler_log_prob)) if finite else None,
    )


def _place_in_order(x: float) -> int:
    """Of a float32 number among all: neighbours are one apart."""
    bits = int(np.float32(x).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
