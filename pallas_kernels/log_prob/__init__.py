"""Log-probabilities of tokens, from hidden states, and sampling from the same distribution."""

from pallas_kernels.log_prob.api import Truncation, kept_tokens, log_prob_of_logits, sample_tokens, token_log_prob

__all__ = ["Truncation", "kept_tokens", "log_prob_of_logits", "sample_tokens", "token_log_prob"]
