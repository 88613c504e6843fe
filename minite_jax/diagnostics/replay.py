"""Given completions as a sampler computes them: a prefill, then a token at a time through the cache, in one compiled program."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from minite_jax.model.cache import init_cache
from minite_jax.model.forward import hidden_states, logits_of
from minite_jax.model.policy import Policy
from minite_jax.sampler.sampling import Rollouts
from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits


@functools.partial(jax.jit, static_argnames=("truncation",))
def replay(policy: Policy, rollouts: Rollouts, truncation: Truncation) -> Float[Array, "B C"]:
    """Log-probs of tokens that were sampled before, perhaps by another engine.

    For the aligned policy they are the bits of `minite_jax.sample` and of `minite_jax.token_log_probs`. Where an engine lets a
    row feel the others (one activation scale for a batch), they depend on what is in the batch: here every row goes on to the
    last column, as in `experiments.baselines.naive_engine`, while our own sampler lets a finished row rest.

    Args:
      policy: see `minite_jax.prepare`; it may have substitutes.
      rollouts: what was sampled; its log-probs are not read.
      truncation: the sampler's temperature, top-k and top-p.

    Returns:
      [B, C] float32 nats, 0 where the rollouts' mask is 0.
    """
    batch, new_slots = rollouts.tokens.shape
    prompt_slots = rollouts.prompt_tokens.shape[1]
    cache = init_cache(policy.config, policy.recipe, batch, prompt_slots + new_slots)
    hidden_BTD, cache = hidden_states(policy, rollouts.prompt_tokens, cache, num_new=rollouts.prompt_length)
    last_BD = hidden_BTD[jnp.arange(batch), rollouts.prompt_length - 1]

    def step(state, token_B):
        cache, last_BD = state
        logits_BV = logits_of(policy, last_BD)
        with policy.running():
            log_prob_B, _ = log_prob_of_logits(logits_BV, token_B, truncation, kept_tokens(logits_BV, truncation))
        hidden_B1D, cache = hidden_states(policy, token_B[:, None], cache)
        return (cache, hidden_B1D[:, 0]), log_prob_B

    _, log_probs_CB = lax.scan(step, (cache, last_BD), rollouts.tokens.T)
    return jnp.where(rollouts.mask, log_probs_CB.T, 0.0)
