"""Losses per token: pure functions, one per algorithm. The update masks them and divides by the number of tokens in the whole
batch.

Let B be rollouts, T tokens.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def grpo_loss(
    log_probs: Float[Array, "B T"],
    sampler_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Array, "B T"]:
    """GRPO's clipped surrogate, without a KL term: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, r the ratio of
    probabilities.

    Source: Shao et al. 2024 (arXiv:2402.03300), equation 3; separate bounds: Yu et al. 2025, DAPO (arXiv:2503.14476), equation
      10.

    Args:
      log_probs: [B, T] of the policy that is trained, nats; the gradient flows through them.
      sampler_log_probs: [B, T] of the policy that sampled, constant.
      advantages: [B], constant.
      clip_low: how far below 1 the ratio may fall.
      clip_high: how far above 1 the ratio may rise.

    Returns:
      [B, T] loss per token.
    """
    ratio_BT = jnp.exp(log_probs - sampler_log_probs)
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_BT * advantages[:, None], clipped_BT * advantages[:, None])


def negative_log_likelihood(log_probs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Supervised loss per token, nats."""
    return -log_probs


def kl_k3(log_probs: Float[Array, "B T"], reference_log_probs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Schulman's k3 estimate of KL(policy || reference) per token: ``e^d - d - 1`` with d = reference - policy log-prob, nats.

    Source: J. Schulman, "Approximating KL divergence" (2020). Unbiased and never negative for tokens drawn from the policy.
    """
    d_BT = reference_log_probs - log_probs
    return jnp.exp(d_BT) - d_BT - 1.0
