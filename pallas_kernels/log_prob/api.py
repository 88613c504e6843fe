"""Log-probabilities of tokens under the distribution that a sampler draws from. Let M be rows, D the model width, V the
vocabulary.

**The convention.** The log-prob of a token is that of the distribution which is sampled: logits divided by the temperature,
cut to the top k, then to the top p, renormalised over what is kept. Temperature 0 means greedy decoding, whose log-probs are
those of the untruncated distribution at temperature 1. The learner computes the same thing from the same logits, so it keeps
the same tokens.

The reference sorts. The GPU kernels find the same beginning of the same order by counting; `triton_sampling` says how, and at
which rounding boundary of top-p the two may differ by a token. What each holds in memory is said in its module.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, operands
from pallas_kernels.scalars import integer, real

# Logits up to 2^27 stay finite when they are divided by it. Infinite ones would have no order, and log-probs of NaN.
_SMALLEST_TEMPERATURE = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What is done to logits before softmax.

    Attributes:
      temperature: logits are divided by it; 0 means greedy, else at least 2^-100.
      top_k: keep the k largest logits, ties to the lower index; 0 or less, or k >= V: keep all.
      top_p: keep the most probable tokens, in falling order, until their probability (after temperature and top-k) reaches
        top_p; at least one; 1.0: keep all.

    Raises:
      ValueError: a temperature below 0 or too small to divide by, a top_p outside (0, 1], or no numbers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        for name, kind in (("temperature", real), ("top_k", integer), ("top_p", real)):
            object.__setattr__(self, name, kind(name, getattr(self, name)))
        if not (0.0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if 0.0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or at least 2**-100")
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1.0 keeps every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def keeps_all(self, vocab_size: int) -> bool:
        return self.greedy or ((self.top_k <= 0 or self.top_k >= vocab_size) and self.top_p == 1.0)


def kept_tokens(
    logits: Float[Array, "M V"], truncation: Truncation, *, implementation: str | None = None
) -> Bool[Array, "M V"] | None:
    """Which tokens top-k and top-p keep; None where they keep all. See `pallas_kernels.dispatch.resolve`."""
    chosen = dispatch.resolve("kept_tokens", implementation)
    if truncation.keeps_all(logits.shape[-1]):
        return None
    return dispatch.module(__package__, chosen).kept_tokens(logits, truncation)


@dispatch.replaceable
def log_prob_of_logits(
    logits: Float[Array, "M V"],
    tokens: Int[Array, "M"],
    truncation: Truncation,
    kept: Bool[Array, "M V"] | None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Log-prob of each row's token and the entropy of each row's distribution, in nats, float32.

    Args:
      logits: [M, V] float32, raw.
      tokens: [M] int32. A token that truncation drops has log-prob -inf.
      truncation: see the module's convention.
      kept: what `kept_tokens` gave for the same logits.
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    module = dispatch.module(__package__, dispatch.resolve("log_prob_of_logits", implementation))
    return module.log_prob_of_logits(logits, tokens, truncation, kept)


def sample_tokens(
    logits: Float[Array, "M V"],
    keys,
    truncation: Truncation,
    kept: Bool[Array, "M V"] | None,
    *,
    implementation: str | None = None,
) -> Int[Array, "M"]:
    """Draws one token per row by the Gumbel-max trick in float32, from the row's own key; greedy: the largest logit, ties to
    the lower index.

    Args:
      logits: [M, V] float32, raw.
      keys: [M] typed PRNG keys (`jax.random.key`), one per row: a row's token does not depend on its neighbours.
      truncation: see the module's convention.
      kept: what `kept_tokens` gave for the same logits.
      implementation: see `pallas_kernels.dispatch.resolve`.
    """
    module = dispatch.module(__package__, dispatch.resolve("sample_tokens", implementation))
    return module.sample_tokens(logits, keys, truncation, kept)


@dispatch.replaceable
def token_log_prob(
    hidden: Float[Array, "M D"],
    head: operands.Operand,
    tokens: Int[Array, "M"],
    truncation: Truncation,
    *,
    head_master: Float[Array, "V D"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Log-prob of each row's token from its hidden state, and the entropy; [M, V] is never held, only a part of it.

    Args:
      hidden: [M, D] bfloat16 or float32, after the final norm.
      head: [V, D] output embedding.
      tokens: [M] int32.
      truncation: see the module's convention.
      head_master: [V, D] float32 that receives the gradient of `head`; its values are not read.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      Log-probs [M] and entropies [M], float32 nats, both differentiable (the kept set is held fixed).
    """
    operands.check_contraction("token_log_prob", hidden, head)
    chosen = dispatch.resolve("token_log_prob", implementation)
    return _token_log_prob(chosen, truncation, hidden, head, head_master, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_log_prob(implementation, truncation, hidden_MD, head, head_master, tokens_M):
    return _forward(implementation, truncation, hidden_MD, head, head_master, tokens_M)[0]


def _forward(implementation, truncation, hidden_MD, head, head_master, tokens_M):
    wants_head = head_master is not None  # only its gradient is wanted
    result, saved = dispatch.module(__package__, implementation).token_log_prob(hidden_MD, head, tokens_M, truncation)
    return result, (hidden_MD, head, wants_head, tokens_M, saved)


def _backward(implementation, truncation, residuals, gradients):
    hidden_MD, head, wants_head, tokens_M, saved = residuals
    dhidden_MD, dhead_VD = dispatch.module(__package__, implementation).token_log_prob_gradients(
        hidden_MD, head, tokens_M, truncation, saved, *gradients, wants_head=wants_head
    )
    return dhidden_MD.astype(hidden_MD.dtype), None, dhead_VD if wants_head else None, None


_token_log_prob.defvjp(_forward, _backward)
