"""The sampler's log-probs are the learner's, under every convention; requests do not feel each other; where samples end."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.model import tiny_dense
from minite_jax.rollout import rollout_batch
from minite_jax.sampler import FINISH_LENGTH, FINISH_STOP
from minite_jax.sampler.requests import checked
from minite_jax.sampler.sampling import generate
from pallas_kernels.log_prob import Truncation


@pytest.mark.worlds("moe_nvfp4", "dense_nvfp4", slow=("moe_bf16", "moe_experts"))
def test_the_learner_scores_what_the_sampler_said(world, assert_same_bits):
    tokens, mask, log_probs = world.sequences
    assert mask.sum() == np.asarray(world.rollouts.mask).sum() > 60
    assert (log_probs[mask] < 0).all()
    assert_same_bits(world.score(tokens)[mask], log_probs[mask])


TRUNCATIONS = {
    "all_three": Truncation(temperature=0.7, top_k=40, top_p=0.9),
    "cool_top_k": Truncation(temperature=0.7, top_k=20),
    "top_p": Truncation(top_p=0.9),
    "greedy": Truncation(temperature=0.0),
}


@pytest.mark.parametrize(
    "name", [name if name == "all_three" else pytest.param(name, marks=pytest.mark.slow) for name in TRUNCATIONS]
)
@pytest.mark.worlds("dense_nvfp4")
def test_the_learner_shares_the_samplers_convention(world, name, assert_same_bits):
    truncation = TRUNCATIONS[name]
    sampling = dataclasses.replace(world.sampling, **dataclasses.asdict(truncation))
    assert sampling.truncation == truncation
    tokens, mask, log_probs = mt.sample(world.policy, world.prompts, sampling, key=jax.random.key(0)).sequences()
    mask = np.asarray(mask)
    scored = np.asarray(mt.token_log_probs(world.policy, tokens, truncation))
    assert_same_bits(scored[mask], np.asarray(log_probs)[mask])
    assert np.isfinite(scored[mask]).all()
    plain = world.score(tokens)
    if name == "greedy":  # log-probs are those of the whole distribution at temperature 1, and every sample is the same
        assert_same_bits(plain[mask], scored[mask])
        completions = np.asarray(tokens).reshape(len(world.prompts), world.sampling.n, -1)
        assert (completions == completions[:, :1]).all()
    else:
        assert (scored[mask] > plain[mask]).all()  # renormalised over fewer tokens
        assert np.isneginf(scored[~mask]).any()  # prompts hold tokens that the truncation drops


def _completions(rollouts, rows):
    return jax.tree.map(lambda x: x[rows], (rollouts.tokens, rollouts.log_probs, rollouts.mask, rollouts.finish_reason))


@pytest.mark.worlds("moe_nvfp4", "dense_nvfp4", slow=("moe_bf16",))
def test_a_request_does_not_feel_who_joins(world, assert_same_bits):
    """Prompt 3 under its request id, at another place and among other prompts under other ids."""
    n = world.sampling.n
    prompts = [[7] * 17, world.prompts[3], [200, 3], world.prompts[0], [9] * 12]
    others = mt.sample(world.policy, prompts, world.sampling, key=jax.random.key(0), request_ids=[10, 3, 11, 12, 13])
    assert_same_bits(_completions(others, slice(n, 2 * n)), _completions(world.rollouts, slice(3 * n, 4 * n)))
    # Prompt 0 has another id here, and so other tokens.
    assert others.completions()[3 * n : 4 * n] != world.rollouts.completions()[:n]


@pytest.mark.worlds(slow=("moe_bf16",))
def test_a_request_alone_is_the_request_in_a_batch(world, assert_same_bits):
    """Prompt 3 sampled alone (another batch, other padding) under its request id."""
    alone = mt.sample(world.policy, [world.prompts[3]], world.sampling, key=jax.random.key(0), request_ids=[3])
    n = world.sampling.n
    assert_same_bits(_completions(alone, slice(0, n)), _completions(world.rollouts, slice(3 * n, 4 * n)))


@pytest.mark.worlds(slow=("dense_nvfp4", "moe_nvfp4", "moe_bf16"))
def test_a_stream_is_the_sample(world):
    """One step of the sampler at a time, for a prompt alone, against its first sample in the batch: to the last bit."""
    one = dataclasses.replace(world.sampling, n=1)
    lengths = []
    for p in (1, 0):  # equally padded
        row = p * world.sampling.n
        tokens, log_probs, mask, finish = _completions(world.rollouts, row)
        streamed = list(mt.stream(world.policy, world.prompts[p], one, key=jax.random.key(0), request_id=p))
        assert [token for token, _ in streamed] == np.asarray(tokens)[np.asarray(mask)].tolist()
        assert [log_prob for _, log_prob in streamed] == np.asarray(log_probs)[np.asarray(mask)].astype(float).tolist()
        assert (streamed[-1][0] in one.stop_ids) == (int(finish) == FINISH_STOP)
        lengths.append(len(streamed))
    assert max(lengths) > 1


@pytest.mark.worlds("dense_nvfp4")
def test_the_host_looks_for_the_end_once_in_some_tokens(world, assert_same_bits):
    """17 tokens are two blocks of 9: what is drawn behind the last one is not seen, and each block has a known number of steps,
    so XLA's host reads no condition between them.
    """
    longer = dataclasses.replace(world.sampling, max_tokens=17)
    key = jax.random.key(0)
    inputs = world.policy, *checked(world.policy, world.prompts, longer, key, None, None), key
    program = generate.lower(*inputs, longer).compile()
    assert re.search(r'"known_trip_count":\{"n":"9"', program.as_text())
    assert not re.search("callback|outfeed|infeed", program.as_text())
    rollouts = program(*inputs)
    mask, length = np.asarray(rollouts.mask), world.sampling.max_tokens
    assert_same_bits(rollouts.tokens[:, :length], world.rollouts.tokens)
    assert_same_bits(rollouts.log_probs[:, :length], world.rollouts.log_probs)
    assert mask.shape[1] == 17 and (mask[:, 1:] <= mask[:, :-1]).all()
    stopped = np.asarray(rollouts.finish_reason) == FINISH_STOP
    last = np.asarray(rollouts.tokens)[range(len(mask)), mask.sum(axis=1) - 1]
    assert stopped[~mask.all(axis=1)].all() and not stopped.all()
    assert_same_bits(stopped, np.isin(last, longer.stop_ids))


@pytest.mark.worlds("dense_nvfp4")
def test_repeated_prompts_and_later_steps_draw_anew(world):
    same = world.sample(prompts=[world.prompts[-1]] * 5)
    later = world.sample(prompts=[world.prompts[-1]] * 5, seed=1)
    # Short ones may coincide: a sixteenth of them stop at once, with one of 16 tokens.
    completions = [tuple(c) for c in same.completions() + later.completions() if len(c) >= 4]
    assert len(set(completions)) == len(completions) > 20


@pytest.mark.worlds("dense_nvfp4")
def test_a_batch_for_the_learner_holds_the_sampled_ids(world):
    rewards = np.arange(20, dtype=np.float32).reshape(5, 4)
    batch = rollout_batch(world.rollouts, rewards)
    for row, completion in enumerate(world.rollouts.completions()):
        prompt = world.prompts[row // 4]
        wanted = prompt + completion
        assert np.asarray(batch.tokens)[row, : len(wanted)].tolist() == wanted
        trained = np.flatnonzero(np.asarray(batch.mask)[row]) + 1
        assert trained.tolist() == list(range(len(prompt), len(wanted)))


@pytest.mark.worlds("dense_nvfp4")
def test_stop_tokens_in_a_prompt_do_not_stop_and_are_attended(world):
    """S: a stop token (0, 16, ...) inside the prompt is a token like any other."""
    tokens, _, _ = world.sequences
    tokens = np.array(tokens)
    row = 4 * 3  # a prompt of 16 tokens
    length = world.lengths[row]
    tokens[:, 5] = 16
    with_stop = world.score(tokens)[row, 5 : length - 1]
    tokens[:, 5] = 17
    assert (with_stop != world.score(tokens)[row, 5 : length - 1]).all()
    rollouts = world.sample(prompts=[[16] * len(p) for p in world.prompts])
    assert np.asarray(rollouts.mask)[:, 0].all() and np.asarray(rollouts.mask).sum() > 60


# A language model of known answers: attention and MLP add nothing, so the next token depends on the current one alone.

REAL_VOCABULARY = 151936
# From the end of the vocabulary. In Qwen3's they are <|im_end|> 151645, <|endoftext|> 151643, and an id that no text has.
IM_END, END_OF_TEXT, LAST_ID = -291, -293, -1
CHAINS = ((14, 15, 16, IM_END), (24, 25, 26, END_OF_TEXT), (34, 35, 36, 37, 38), (44, IM_END), (END_OF_TEXT, 45, LAST_ID, 46))


def chain_policy(vocabulary, peak):
    """The token that follows in a chain has the logit `peak`, all others 0: probability about 0.9."""
    config = tiny_dense(
        vocab_size=vocabulary, hidden_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        intermediate_size=16, num_hidden_layers=1, tie_word_embeddings=False,
    )  # fmt: skip
    params = mt.init_params(config, jax.random.key(0))
    layer = params["layers"][0]
    silent = layer | {"o": jnp.zeros_like(layer["o"]), "down": jnp.zeros_like(layer["down"])}
    embed, head = np.zeros((2, vocabulary, 16), np.float32)
    steps = [(a, b) for chain in CHAINS for a, b in zip(chain, chain[1:], strict=False)]
    assert len(steps) <= 16
    for axis, (token, following) in enumerate(steps):
        embed[token, axis] = 1.0
        head[following, axis] = peak / 4  # the norm makes the 1 a 4
    return mt.prepare(
        params | {"layers": (silent,), "embed": jnp.asarray(embed), "lm_head": jnp.asarray(head)}, config, mt.recipe("bf16")
    )


@pytest.mark.parametrize(("vocabulary", "peak"), [(512, 8.25), pytest.param(REAL_VOCABULARY, 14.0, marks=pytest.mark.slow)])
def test_where_completions_end(vocabulary, peak, assert_same_bits):
    """Stop by either id, by length, at the first token; a stop id in the prompt; an id beyond the tokenizer's last."""
    policy = chain_policy(vocabulary, peak)
    im_end, end_of_text, last_id = (vocabulary + i for i in (IM_END, END_OF_TEXT, LAST_ID))
    sampling = mt.SamplingParams(temperature=0.0, max_tokens=4, stop_ids=(im_end, end_of_text))
    prompts = [[14], [24], [34], [44], [5, end_of_text]]
    rollouts = mt.sample(policy, prompts, sampling, key=jax.random.key(0))
    completions = rollouts.completions()
    assert completions[:4] == [[15, 16, im_end], [25, 26, end_of_text], [35, 36, 37, 38], [im_end]]
    assert completions[4][:3] == [45, last_id, 46]
    assert rollouts.finish_reason.tolist() == [FINISH_STOP, FINISH_STOP, FINISH_LENGTH, FINISH_STOP, FINISH_LENGTH]
    mask = np.asarray(rollouts.mask)
    np.testing.assert_array_equal(mask.sum(1), [3, 3, 4, 1, 4])
    np.testing.assert_array_equal(mask, np.arange(4)[None, :] < mask.sum(1)[:, None])

    log_probs = np.asarray(rollouts.log_probs)
    # e^peak against all others at e^0: -0.1189 in the real vocabulary. No placeholder zeros inside the mask, zeros outside.
    following = np.arange(4)[None, :] < np.array([3, 3, 4, 1, 3])[:, None]
    np.testing.assert_allclose(log_probs[following], peak - np.log(np.exp(peak) + vocabulary - 1), rtol=1e-4)
    assert (log_probs[~mask] == 0).all()

    # A prompt alone, one step at a time.
    streamed = list(mt.stream(policy, prompts[0], sampling, key=jax.random.key(0)))
    assert streamed == list(zip(completions[0], log_probs[0, :3].astype(float).tolist(), strict=True))

    # The learner normalises over the same padded vocabulary.
    tokens, joined_mask, joined = (np.asarray(x) for x in rollouts.sequences())
    assert_same_bits(np.asarray(mt.token_log_probs(policy, jnp.asarray(tokens)))[joined_mask], joined[joined_mask])


@pytest.mark.worlds("dense_fp32")
def test_column_t_scores_token_t_plus_1_from_row_t(world):
    """S01, with a bigram table worked out by numpy."""
    layer = world.params["layers"][0]
    silent = layer | {"o": jnp.zeros_like(layer["o"]), "down": jnp.zeros_like(layer["down"])}
    policy = mt.prepare(world.params | {"layers": (silent,)}, world.config, world.recipe)
    embed = np.asarray(world.params["embed"], np.float64)
    hidden = embed / np.sqrt((embed**2).mean(1, keepdims=True) + world.config.rms_norm_eps)
    logits = hidden @ embed.T
    table = logits - np.log(np.exp(logits).sum(1, keepdims=True))

    tokens = np.random.default_rng(4).integers(0, world.config.vocab_size, (20, 32))
    # Float32: 64 products and a log-sum of 256 terms, each a few 2^-24 of numbers near 5.
    np.testing.assert_allclose(world.score(tokens, policy), table[tokens[:, :-1], tokens[:, 1:]], atol=5e-6)
