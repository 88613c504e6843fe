"""How far the policy that sampled is from the policy that trains, token by token, under the names that other frameworks use.

With D the trained policy's log-prob minus the sampler's, over the masked tokens, before any truncation or correction:

* ``train_rollout_logprob_abs_diff/mean``, ``/max``: of ``|D|`` (slime, Miles);
* ``train_rollout_logprob_abs_diff/exact_fraction``: share of tokens whose two float32 log-probs are equal bits;
* ``tokens_compared``: how many tokens that is;
* ``gen_kl_error``: mean of ``e^D - D - 1``, the k3 estimate of KL(sampler || trained policy) (NeMo-RL).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.numerics import divide


def gap_metrics(log_probs: Float[Array, "B T"], sampler_log_probs: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> dict:
    """The gap between two sets of log-probs of the same tokens.

    Args:
      log_probs: [B, T] float32 of the trained policy, unrounded.
      sampler_log_probs: [B, T] float32 of the sampler, unrounded.
      mask: [B, T] tokens to compare.

    Returns:
      Float32 scalars by name. A NaN in either argument, where the mask holds, makes mean, max and gen_kl_error NaN: never
      skipped. An empty mask gives 0 everywhere, with tokens_compared 0.
    """
    count = jnp.sum(mask)
    divisor = jnp.maximum(count, 1)
    difference_BT = jnp.where(mask, log_probs - sampler_log_probs, 0.0)
    absolute_BT = jnp.abs(difference_BT)
    same_bits_BT = lax.bitcast_convert_type(log_probs, jnp.uint32) == lax.bitcast_convert_type(sampler_log_probs, jnp.uint32)
    return {
        "train_rollout_logprob_abs_diff/mean": jnp.sum(absolute_BT) / divisor,
        "train_rollout_logprob_abs_diff/max": jnp.max(absolute_BT, initial=0.0),
        # All of all is exactly 1: a GPU's own division of 66 by 66 gives 0.99999994.
        "train_rollout_logprob_abs_diff/exact_fraction": divide(
            jnp.sum(same_bits_BT & mask).astype(jnp.float32), divisor.astype(jnp.float32)
        ),
        "tokens_compared": count.astype(jnp.float32),
        "gen_kl_error": jnp.sum(jnp.exp(difference_BT) - difference_BT - 1.0) / divisor,
    }
