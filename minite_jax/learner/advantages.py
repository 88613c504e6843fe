"""Advantages. Let P be prompts, G samples per prompt."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_advantages(
    rewards: Float[Array, "P G"], valid: Bool[Array, "P G"] | None = None, *, normalize: bool = True
) -> Float[Array, "P G"]:
    """GRPO's advantage: reward minus the group's mean, divided by the group's population deviation.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2. Without the division it is that of Dr. GRPO (Liu
    et al. 2025, arXiv:2503.20783).

    Args:
      rewards: [P, G] float32.
      valid: [P, G], False where a sample has no reward: left out of mean and deviation, its own advantage is 0. None: all valid.
      normalize: whether to divide by the deviation (population: divided by the number of samples, not by one less).

    Returns:
      [P, G] float32, each group summing to 0. A group of one sample or of equal rewards gets 0; one with a valid NaN gets NaN.
    """
    valid_PG = jnp.ones(rewards.shape, bool) if valid is None else valid
    rewards_PG = jnp.where(valid_PG, rewards, 0.0)
    count_P1 = jnp.maximum(jnp.sum(valid_PG, axis=1, keepdims=True), 1)
    mean_P1 = jnp.sum(rewards_PG, axis=1, keepdims=True) / count_P1
    centred_PG = jnp.where(valid_PG, rewards_PG - mean_P1, 0.0)
    if not normalize:
        return centred_PG
    deviation_P1 = jnp.sqrt(jnp.sum(centred_PG**2, axis=1, keepdims=True) / count_P1)
    # Equal rewards leave a deviation of rounding errors (three times 0.1), not of 0. A NaN is not equal to anything and shows.
    all_equal_P1 = deviation_P1 <= 1e-6 * jnp.max(jnp.abs(rewards_PG), axis=1, keepdims=True)
    return jnp.where(all_equal_P1, 0.0, centred_PG / jnp.where(all_equal_P1, 1.0, deviation_P1))
