"""Sampling from a policy: prompts of unequal length in one batch, n samples from one prefill, one token at a time through the
cache.

Let P be prompts, G samples per prompt, B = P G rollouts (prompt-major), L the padded prompt length, C the most new tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from minite_jax.model.cache import PagedCache, init_cache, pages_for_samples
from minite_jax.model.forward import hidden_states, logits_of
from minite_jax.model.policy import Policy
from minite_jax.model.taps import Taps
from minite_jax.sampler.requests import SamplingParams, checked
from pallas_kernels.log_prob import kept_tokens, log_prob_of_logits, sample_tokens

FINISH_LENGTH, FINISH_STOP = 0, 1
# Tokens between two looks at whether all samples have ended: of a loop that may end at any step XLA's host reads the condition
# before it starts the next one, and the GPU waits.
_STEPS_BETWEEN_LOOKS = 16


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class Rollouts:
    """What a sampler returns.

    Attributes:
      tokens: [B, C] int32 new tokens; 0 where the mask is 0.
      log_probs: [B, C] float32 nats, as computed while decoding, under the convention of `pallas_kernels.log_prob.api`; 0 where
        the mask is 0.
      mask: [B, C] bool, the tokens that were sampled, the stop token included.
      finish_reason: [B] int32, `FINISH_STOP` or `FINISH_LENGTH` (cut at max_tokens; no end mark is invented).
      prompt_tokens: [B, L] int32, padded with 0 behind each prompt.
      prompt_length: [B] int32.
    """

    tokens: Int[Array, "B C"]
    log_probs: Float[Array, "B C"]
    mask: Bool[Array, "B C"]
    finish_reason: Int[Array, "B"]
    prompt_tokens: Int[Array, "B L"]
    prompt_length: Int[Array, "B"]

    def sequences(self) -> tuple[Int[Array, "B T"], Bool[Array, "B T1"], Float[Array, "B T1"]]:
        """Prompts and completions joined: tokens [B, L + C], and mask and log-probs [B, L + C - 1] as the learner scores them.

        Column t of mask and log-probs belongs to token t + 1, as in `minite_jax.token_log_probs`.
        """
        return _join(self)

    def completions(self) -> list[list[int]]:
        """The sampled ids of each rollout, the stop token included."""
        tokens, mask = np.asarray(self.tokens), np.asarray(self.mask)
        return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]


@jax.jit
def _join(rollouts):
    batch, prompt_slots = rollouts.prompt_tokens.shape
    new_slots = rollouts.tokens.shape[1]
    row_B1 = jnp.arange(batch)[:, None]
    slot_BC = rollouts.prompt_length[:, None] + jnp.arange(new_slots)[None, :]

    def place(base_BT, values_BC):
        return base_BT.at[row_B1, slot_BC].set(values_BC)

    tokens_BT = place(jnp.pad(rollouts.prompt_tokens, [(0, 0), (0, new_slots)]), rollouts.tokens)
    mask_BT = place(jnp.zeros(tokens_BT.shape, bool), rollouts.mask)
    log_probs_BT = place(jnp.zeros(tokens_BT.shape, jnp.float32), rollouts.log_probs)
    return tokens_BT, mask_BT[:, 1:], log_probs_BT[:, 1:]


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key,
    request_ids: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
) -> Rollouts:
    """Samples completions.

    A rollout's tokens and log-probs depend on its prompt, its request id, its number among the n samples and the key alone:
    not on the other prompts, the padding, or the chunks of the prefill.

    Args:
      policy: see `minite_jax.prepare`.
      prompts: integer token ids, one non-empty sequence per prompt; lengths may differ.
      params: see `SamplingParams`.
      key: one typed PRNG key (`jax.random.key`).
      request_ids: one integer in 0..2^32 - 1 per prompt that seeds it, by default its place in the list (so a prompt that
        occurs twice gets two different completions).
      prefill_chunk: tokens per prefill step, None for all at once. Same bits.

    Returns:
      `Rollouts`, prompt-major: rollout ``p * n + g`` is sample g of prompt p.

    Raises:
      ValueError: no prompt, an empty prompt, a token or stop id outside the vocabulary, ids that are not integers, request ids
        that do not match or are out of range, a prefill_chunk below 1, a raw key, or a key of another kind than threefry: the
        others draw for a whole batch at once, so a row would feel its neighbours.
    """
    arrays = checked(policy, prompts, params, key, request_ids, prefill_chunk)
    return generate(policy, *arrays, key, params, prefill_chunk)


def stream(
    policy: Policy,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    key,
    request_id: int = 0,
    prefill_chunk: int | None = None,
) -> Iterator[tuple[int, float]]:
    """One completion, token by token as it is sampled: the tokens and log-probs, in every bit, of
    ``sample(policy, [prompt], params, key=key, request_ids=[request_id])``.

    Args:
      policy, params, key, prefill_chunk: as `sample` takes them; `params.n` must be 1.
      prompt: integer token ids, at least one.
      request_id: seeds the completion, as an entry of `sample`'s `request_ids`.

    Returns:
      An iterator of (token id, log-prob in nats), the stop token included: at most `params.max_tokens`, and the last one is in
      `params.stop_ids` unless it was cut there. Nothing is sampled before it is asked for.

    Raises:
      ValueError: as `sample`, at once; and where `params.n` is not 1.
    """
    if params.n != 1:
        raise ValueError(f"n={params.n}: a stream is one completion; use sample, or one stream for each request_id")
    tokens_PL, length_P, request_P = checked(policy, [prompt], params, key, [request_id], prefill_chunk)
    return _stream(policy, tokens_PL, length_P, request_P, key, params, prefill_chunk)


def _stream(policy, tokens_PL, length_P, request_P, key, params, prefill_chunk):
    key_B, state = _start_jit(policy, tokens_PL, length_P, request_P, key, params, prefill_chunk)
    for step in range(params.max_tokens):
        state = _step_jit(policy, key_B, state, params)
        token, log_prob, done = jax.device_get((state.tokens[0, step], state.log_probs[0, step], state.done[0]))
        yield int(token), float(log_prob)
        if done:
            return


def request_keys(key, request_ids: UInt[Array, "P"], n: int):
    """Typed PRNG keys [B], prompt-major: each from the key, the request's id and the sample's number. Fold in the step to draw
    a token.
    """
    fold_in = jax.vmap(jax.random.fold_in)
    key_P = jax.vmap(functools.partial(jax.random.fold_in, key))(request_ids)
    return fold_in(jnp.repeat(key_P, n), jnp.tile(jnp.arange(n), request_ids.shape[0]))


def _prefill(policy, tokens_PL, length_P, params, chunk, taps=None):
    """Fills a cache with the prompts. Returns it and the hidden state of each prompt's last token.

    The cache's pool has room for the samples too: as many pages as they can ever have at once, so it cannot run out. With taps
    the prompts go in one chunk.
    """
    num_prompts, slots = tokens_PL.shape
    num_pages = pages_for_samples(num_prompts, params.n, slots, params.max_tokens)
    cache = init_cache(policy.config, policy.recipe, num_prompts, slots + params.max_tokens, num_pages=num_pages)
    last_PD = jnp.zeros((num_prompts, policy.config.hidden_size), policy.recipe.compute_dtype)
    for start in range(0, slots, chunk):
        tokens_PT = tokens_PL[:, start : start + chunk]
        num_new_P = jnp.clip(length_P - start, 0, tokens_PT.shape[1])
        hidden_PTD, cache = hidden_states(policy, tokens_PT, cache, num_new=num_new_P, taps=taps)
        here_P = (length_P > start) & (length_P <= start + chunk)
        column_P = jnp.clip(length_P - 1 - start, 0, tokens_PT.shape[1] - 1)
        last_PD = jnp.where(here_P[:, None], hidden_PTD[jnp.arange(num_prompts), column_P], last_PD)
    return cache, last_PD


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class _Decoding:
    """Samples on their way: what `Rollouts` has so far, and what the next token comes from.

    Attributes:
      step: [] int32, tokens drawn so far.
      cache: of the B samples.
      last: [B, D] hidden states that the next token's logits come from.
      tokens, log_probs, mask: [B, C] as in `Rollouts`.
      done: [B] bool, samples that have had a stop token.
    """

    step: Int[Array, ""]
    cache: PagedCache
    last: Float[Array, "B D"]
    tokens: Int[Array, "B C"]
    log_probs: Float[Array, "B C"]
    mask: Bool[Array, "B C"]
    done: Bool[Array, "B"]


def start_sampling(policy, tokens_PL, length_P, request_P, key, params, prefill_chunk, taps: Taps | None = None):
    """Keys [B] of the samples, and their state before the first token."""
    num_prompts, slots = tokens_PL.shape
    batch, new_slots = num_prompts * params.n, params.max_tokens
    cache, last_PD = _prefill(policy, tokens_PL, length_P, params, prefill_chunk or slots, taps)
    blank_BC = jnp.zeros((batch, new_slots), jnp.int32)
    state = _Decoding(
        step=jnp.int32(0),
        cache=cache.fork(params.n),
        last=jnp.repeat(last_PD, params.n, axis=0),
        tokens=blank_BC,
        log_probs=blank_BC.astype(jnp.float32),
        mask=blank_BC.astype(bool),
        done=jnp.zeros((batch,), bool),
    )
    return request_keys(key, request_P, params.n), state


def next_token(policy, key_B, state, params, taps: Taps | None = None):
    """Draws the next token of every sample and runs it through the model. Taps get logits and log-probs of the tokens drawn, and
    the other tensors of the run that follows.
    """
    taps = Taps() if taps is None else taps
    stop_ids = jnp.asarray(params.stop_ids, jnp.int32)
    logits_BV = taps("final/logits", logits_of(policy, state.last))
    with jax.named_scope("sample"):
        kept_BV = kept_tokens(logits_BV, params.truncation)
        step_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, state.step)
        token_B = sample_tokens(logits_BV, step_key_B, params.truncation, kept_BV)
        with policy.running():
            log_prob_B, entropy_B = log_prob_of_logits(logits_BV, token_B, params.truncation, kept_BV)
    log_prob_B = taps("final/log_prob", log_prob_B)
    taps("final/entropy", entropy_B)
    over = state.step >= params.max_tokens  # see `_steps_between_looks`
    alive_B = ~state.done & ~over
    done_B = state.done | (alive_B & jnp.any(token_B[:, None] == stop_ids[None, :], axis=1))
    # A finished sample's row goes on, without pages, and nobody reads what comes of it.
    cache = state.cache.release(done_B)
    num_new_B = (~done_B & ~over).astype(jnp.int32)
    hidden_B1D, cache = hidden_states(policy, token_B[:, None], cache, num_new=num_new_B, taps=taps)
    return _Decoding(
        step=state.step + 1,
        cache=cache,
        last=hidden_B1D[:, 0],
        tokens=state.tokens.at[:, state.step].set(jnp.where(alive_B, token_B, 0), mode="drop"),
        log_probs=state.log_probs.at[:, state.step].set(jnp.where(alive_B, log_prob_B, 0.0), mode="drop"),
        mask=state.mask.at[:, state.step].set(alive_B, mode="drop"),
        done=done_B,
    )


def _steps_between_looks(max_tokens: int) -> int:
    """At most 16, so that few are behind the last token; those change nothing."""
    looks = -(-max_tokens // _STEPS_BETWEEN_LOOKS)
    return -(-max_tokens // looks)


# For `stream`. The cache is handed from step to step in place.
_start_jit = jax.jit(start_sampling, static_argnames=("params", "prefill_chunk"))
_step_jit = jax.jit(next_token, static_argnames=("params",), donate_argnames=("state",))


@functools.partial(jax.jit, static_argnames=("params", "prefill_chunk"))
def generate(
    policy: Policy,
    tokens: Int[Array, "P L"],
    lengths: Int[Array, "P"],
    request_ids: UInt[Array, "P"],
    key,
    params: SamplingParams,
    prefill_chunk: int | None = None,
) -> Rollouts:
    """`sample` on padded arrays: pure, jitted, no host round trip per token; the host looks for the end once in 16."""
    key_B, state = start_sampling(policy, tokens, lengths, request_ids, key, params, prefill_chunk)
    steps = _steps_between_looks(params.max_tokens)

    def block(state):
        return lax.fori_loop(0, steps, lambda _, state: next_token(policy, key_B, state, params), state)

    state = lax.while_loop(lambda state: (state.step < params.max_tokens) & ~jnp.all(state.done), block, state)
    return Rollouts(
        tokens=state.tokens,
        log_probs=state.log_probs,
        mask=state.mask,
        finish_reason=jnp.where(state.done, FINISH_STOP, FINISH_LENGTH).astype(jnp.int32),
        prompt_tokens=jnp.repeat(tokens, params.n, axis=0),
        prompt_length=jnp.repeat(lengths, params.n),
    )
