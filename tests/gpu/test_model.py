"""Whole models on a GPU, at the width of real ones: what was sampled token by token is what the learner computes, bit for bit.

The contract tests say the same of small models in every corner (``pytest --platform=gpu tests/contracts``). Here: layers of
Qwen3-30B-A3B and Qwen3-8B with the full vocabulary, hundreds of new tokens, batches of 1 to 256, prompts of unequal length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal_bits import same

import minite_jax as mt
from minite_jax.learner import Batch, grpo_loss, init_state, make_update
from minite_jax.model import qwen3_8b, qwen3_30b_a3b, tiny_dense, tiny_moe

pytestmark = pytest.mark.gpu

GAP = "train_rollout_logprob_abs_diff"
MOE = functools.partial(qwen3_30b_a3b, num_hidden_layers=2)
DENSE = functools.partial(qwen3_8b, num_hidden_layers=2)
DEEP = functools.partial(
    tiny_moe, vocab_size=4096, hidden_size=512, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256,
)  # fmt: skip
DEEP_DENSE = functools.partial(
    tiny_dense, vocab_size=4096, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    intermediate_size=1024,
)  # fmt: skip
EXPERTS = dict(name="nvfp4_experts", first_plain=1, last_plain=1)
# In nvfp4_te a row's scale depends on the whole batch: it is the comparator that has a gap.
MODELS = {
    "30b nvfp4": (MOE, dict(name="nvfp4")),
    "30b bf16": (MOE, dict(name="bf16")),
    "30b nvfp4_46": (MOE, dict(name="nvfp4_46")),
    "30b nvfp4_experts": (MOE, dict(name="nvfp4_experts", first_plain=1, last_plain=0)),
    "8b nvfp4": (DENSE, dict(name="nvfp4")),
    "deep nvfp4": (DEEP, dict(name="nvfp4")),
    "deep bf16": (DEEP, dict(name="bf16")),
    "deep dense": (DEEP_DENSE, dict(name="nvfp4")),
    "deep nvfp4_experts": (DEEP, EXPERTS),
    "deep nvfp4_te": (DEEP, dict(name="nvfp4_te")),
}
ALIGNED = [name for name in MODELS if not name.endswith("te")]
PROMPT_LENGTHS = (1, 17, 63, 64, 65, 130, 200, 333)
NEW_TOKENS = 576  # nine pages
REPEATS = 20


@functools.lru_cache(maxsize=1)  # a model's weights leave the memory before the next one's come
def policy_of(name, seed=1):
    make, fields = MODELS[name]
    config = make()
    params = jax.jit(functools.partial(mt.init_params, config))(jax.random.key(seed))
    return params, mt.prepare(params, config, mt.recipe(**fields))


def prompts_of(policy, count):
    rng = np.random.default_rng(count)
    return [rng.integers(0, policy.config.vocab_size, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]).tolist() for i in range(count)]


def sampled(policy, prompts, n, max_tokens, seed=0, **changes):
    params = mt.SamplingParams(n=n, max_tokens=max_tokens, stop_ids=(7,), **changes)
    return mt.sample(policy, prompts, params, key=jax.random.key(seed))


def assert_no_gap(policy, rollouts, **truncation):
    tokens, mask, log_probs = rollouts.sequences()
    scored = np.asarray(mt.token_log_probs(policy, tokens, **truncation))
    mask, log_probs = np.asarray(mask), np.asarray(log_probs)
    assert np.isfinite(log_probs[mask]).all()
    differing = (scored != log_probs)[mask].mean()
    assert mask.sum() > 0 and same(scored[mask], log_probs[mask]), f"{100 * differing:.2f} % of the tokens differ"
    return int(mask.sum())


@pytest.mark.parametrize("name", ALIGNED)
def test_sampled_log_probs_are_the_learners(name):
    """And every time the same."""
    _, policy = policy_of(name)
    draw = lambda: sampled(policy, prompts_of(policy, 8), n=4, max_tokens=NEW_TOKENS)  # noqa: E731
    rollouts = draw()
    assert assert_no_gap(policy, rollouts) > 10_000
    for _ in range(REPEATS - 1):
        again = draw()
        assert same(again.tokens, rollouts.tokens) and same(again.log_probs, rollouts.log_probs)


@pytest.mark.parametrize(("prompts", "n", "seed"), [(1, 1, 1), (64, 4, 2), (256, 1, 3)])
def test_batches_of_1_to_256_and_other_seeds(prompts, n, seed):
    """Of the weights and of the draws."""
    _, policy = policy_of("30b nvfp4", seed)
    rollouts = sampled(policy, prompts_of(policy, prompts), n=n, max_tokens=NEW_TOKENS, seed=seed)
    assert assert_no_gap(policy, rollouts) > 400 * prompts * n


@pytest.mark.parametrize("name", ["30b nvfp4", "8b nvfp4", "deep bf16"])
def test_rows_do_not_feel_the_batch(name):
    """A prompt alone, and among 255 others: the same tokens and log-probs, by the sampler and by the learner."""
    _, policy = policy_of(name)
    prompts = prompts_of(policy, 256)
    draw = lambda rows: mt.sample(  # noqa: E731
        policy, [prompts[i] for i in rows], mt.SamplingParams(max_tokens=32), key=jax.random.key(3), request_ids=list(rows)
    )
    together = draw(range(256))
    for rows in ([0], [7], [64, 3], list(range(100, 117))):
        few = draw(rows)
        assert same(few.tokens, together.tokens[np.asarray(rows)])
        assert same(few.log_probs, together.log_probs[np.asarray(rows)])
    tokens, mask, _ = together.sequences()
    scored, mask = np.asarray(mt.token_log_probs(policy, tokens)), np.asarray(mask)
    for row in (0, 7, 200):
        length = len(prompts[row]) + 32
        alone = np.asarray(mt.token_log_probs(policy, tokens[row : row + 1, :length]))
        assert same(alone[0], scored[row, : length - 1])


@pytest.mark.parametrize("truncation", [dict(temperature=0.7, top_k=50, top_p=0.95), dict(temperature=0.0)])
def test_truncated_and_greedy_sampling(truncation):
    _, policy = policy_of("30b nvfp4")
    rollouts = sampled(policy, prompts_of(policy, 8), n=2, max_tokens=64, **truncation)
    assert_no_gap(policy, rollouts, truncation=mt.SamplingParams(**truncation).truncation)


@pytest.mark.parametrize(
    ("name", "micro_batches", "remat"),
    [
        *((name, *how) for name in ("deep nvfp4", "30b nvfp4") for how in ((1, True), (4, False))),
        ("deep bf16", 4, True),
        ("deep dense", 1, False),
        ("deep nvfp4_experts", 4, False),
        ("8b nvfp4", 1, True),
    ],
)
def test_updates_have_no_gap_and_repeat(name, micro_batches, remat):
    """C4 and C6: three large updates, each on tokens that the newest weights sampled; then the first one again, several times."""
    params, policy = policy_of(name)
    optimizer = optax.sgd(0.3)  # has no state: the masters and their gradients fit beside it
    update = make_update(
        optimizer,
        lambda log_probs, batch: grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages),
        micro_batches=micro_batches,
        remat=remat,
    )
    first = None
    for repeat in range(REPEATS):
        state, current = init_state(jax.tree.map(jnp.copy, params), optimizer), policy
        for step in range(3 if repeat == 0 else 1):
            rollouts = sampled(current, prompts_of(current, 8), n=4, max_tokens=96, seed=step)
            tokens, mask, log_probs = rollouts.sequences()
            advantages = jnp.asarray(np.random.default_rng(step).standard_normal(len(tokens)), jnp.float32)
            state, current, metrics = update(state, current, Batch(tokens, mask, log_probs, advantages))
            assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1, metrics
            assert metrics["update_applied"] == 1 and metrics["tokens_compared"] == np.asarray(mask).sum()
            if step == 0:
                moved = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(current.weights["layers"][0])]
                norm = float(metrics["grad_norm"])
        if first is not None:
            assert (moved, norm) == first, "the same update gave other bits"
        first = moved, norm


def test_te_holds_what_its_batch_allows():
    """Scales of the whole batch: the same batch has the same bits in every run and in the gradient, update for update."""
    params, policy = policy_of("deep nvfp4_te")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, policy.config.vocab_size, (16, 200)), jnp.int32)
    optimizer = optax.sgd(0.3)
    update = make_update(optimizer, lambda log_probs, batch: grpo_loss(log_probs, batch.sampler_log_probs, batch.advantages))
    advantages = jnp.asarray(np.random.default_rng(1).standard_normal(16), jnp.float32)
    first = np.asarray(mt.token_log_probs(policy, tokens))
    for _ in range(REPEATS):
        assert same(np.asarray(mt.token_log_probs(policy, tokens)), first)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    for step in range(3):
        log_probs = mt.token_log_probs(policy, tokens)
        assert step == 0 or not same(np.asarray(log_probs), first)  # the weights did move
        state, policy, metrics = update(state, policy, Batch(tokens, jnp.ones((16, 199), bool), log_probs, advantages))
        assert metrics[f"{GAP}/max"] == 0 and metrics["update_applied"] == 1, metrics
