"""The keys of `metrics.jsonl` and their meaning, which stays. Other keys may stand beside these: the gap under the names of other
frameworks, see `minite_jax.diagnostics.gap`."""

STEP = "step"
PHASE = "phase"
REWARD_MEAN = "reward/mean"
GAP_MEAN = "train_rollout_logprob_abs_diff/mean"
GAP_MAX = "train_rollout_logprob_abs_diff/max"
GAP_EXACT_FRACTION = "train_rollout_logprob_abs_diff/exact_fraction"
GAP_WORST_ROW = "train_rollout_logprob_abs_diff/worst_row"
GAP_WORST_COLUMN = "train_rollout_logprob_abs_diff/worst_column"
GAP_WORST_LOG_PROB = "train_rollout_logprob_abs_diff/worst_log_prob"
TOKENS_COMPARED = "tokens_compared"
GEN_KL_ERROR = "gen_kl_error"
ENTROPY = "entropy"
GRAD_NORM = "grad_norm"
LOSS = "loss"
ACCURACY_GREEDY = "eval/accuracy_greedy"
ACCURACY_SAMPLED = "eval/accuracy_sampled"
SAMPLER_SPEED = "tokens_per_second/sampler"
LEARNER_SPEED = "tokens_per_second/learner"

MEANINGS: dict[str, str] = {
    STEP: "number of the optimiser step, from 0, counted through all phases of a run",
    PHASE: "'sft' (supervised warm-up) or 'rl'",
    REWARD_MEAN: "mean reward of the step's rollouts",
    GAP_MEAN: "mean over compared tokens of |log-prob in the update - log-prob when sampled|, nats, raw",
    GAP_MAX: "largest such difference of the step, nats",
    GAP_EXACT_FRACTION: "share of compared tokens whose two log-probs have equal bits",
    GAP_WORST_ROW: "row of the batch where that difference is largest",
    GAP_WORST_COLUMN: "its column among the log-probs; the token's own column is the next one",
    GAP_WORST_LOG_PROB: "its log-prob in the update, nats",
    TOKENS_COMPARED: "number of sampled tokens that the gap is taken over: the sum of the loss mask",
    GEN_KL_ERROR: "mean of e^D - D - 1 with D = log-prob in the update - log-prob when sampled, nats",
    ENTROPY: "mean entropy of the policy at the sampled positions, nats",
    GRAD_NORM: "L2 norm of the gradient over all parameters, before clipping",
    LOSS: "loss that the update minimised",
    ACCURACY_GREEDY: "share of held-out prompts answered right by greedy decoding; on steps that evaluate",
    ACCURACY_SAMPLED: "share of held-out prompts answered right at temperature 1; on steps that evaluate",
    SAMPLER_SPEED: "tokens sampled per second of sampling",
    LEARNER_SPEED: "tokens trained on per second of the update",
}
