"""A rollout engine as one usually writes it in JAX: the other side of a train/rollout gap.

It is a sound engine of its kind: batched prefill, a key/value cache, one compiled loop over tokens, and the
master weights, sampling parameters and random numbers of `minite_jax.sample`. What it does not share with the
learner is the arithmetic:

* matmuls, norms, softmax and log-softmax are plain XLA operations, whose order of sums follows the shape of
  the batch;
* quantised matmuls round both operands by TransformerEngine's plain rule, with one largest magnitude for a
  whole activation tensor (so that every row feels its neighbours, padding included), and multiply the
  dequantised values in the recipe's type;
* the weights are a copy, quantised from the float32 masters anew in every call.

The operations are those of `operations`: with all of them in place of ours, the one forward is this engine but for its cache and
its loops (`choices.LEVELS`, "independent"). Casts to bfloat16 are plain ones: inside a program XLA may leave them out.

Let P be prompts, B rollouts (n per prompt, prompt-major), L the padded prompt length, C the most new tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt

from experiments.baselines import operations
from minite_jax.model.config import ModelConfig
from minite_jax.model.params import NORM, ROUTER, abstract_params
from minite_jax.model.policy import check_recipe
from minite_jax.precision.recipe import ATTENTION, EXPERTS, MLP, Recipe
from minite_jax.sampler.requests import SamplingParams
from minite_jax.sampler.sampling import FINISH_LENGTH, FINISH_STOP, Rollouts, request_keys


def _copy_weights(params, config, recipe):
    """The engine's own weights: norms and router float32, the rest in the recipe's type, by way of NVFP4
    where the recipe quantises.
    """

    def copy(spec, master):
        if spec.kind in (NORM, ROUTER):
            return master
        if recipe.format_of(spec.kind, spec.layer, config.num_hidden_layers).quantized:
            return operations.fake_quantize(master, recipe.compute_dtype)
        return master.astype(recipe.compute_dtype)

    return jax.tree.map(copy, abstract_params(config), params)


def _moe(config, activation, weights, x_MD):
    """Tokens sorted by expert, two ragged products, and a weighted sum of each token's experts."""
    weight_Mk, expert_Mk = operations.route(x_MD, weights["router"], config.num_experts_per_tok, config.norm_topk_prob)
    order_m = jnp.argsort(expert_Mk.reshape(-1))
    group_sizes_E = jnp.bincount(expert_Mk.reshape(-1), length=config.num_experts)

    def experts(rows_mK, weight_ENK):
        return operations.ragged_dot(rows_mK, weight_ENK, group_sizes_E)

    rows_mD = activation(x_MD)[order_m // config.num_experts_per_tok]
    out_mD = experts(activation(operations.gate(experts(rows_mD, weights["gate_up"]))), weights["down"])
    out_MkD = out_mD[jnp.argsort(order_m)].reshape(*expert_Mk.shape, -1)
    return operations.combine(out_MkD, weight_Mk)


def _layer(config, recipe, i, weights, x_BTD, positions_BT, mask_BTS, cached, slot):
    """One layer. Returns the stream, and the keys and values that its attention read: the layer's own, or the
    cache with them put in at `slot`.
    """
    H, N, K, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    batch, length, width = x_BTD.shape

    def activation_of(kind):
        rule = recipe.format_of(kind, i, config.num_hidden_layers).activation
        return lambda x_MK: x_MK if rule is None else operations.fake_quantize(x_MK, x_MK.dtype)

    activation = activation_of(ATTENTION)
    x_MD = operations.rms_norm(x_BTD, weights["attention_norm"], eps).reshape(-1, width)
    qkv_BTHK = (activation(x_MD) @ weights["qkv"].T).reshape(batch, length, H + 2 * N, K)
    q_BTHK, k_BTNK, v_BTNK = jnp.split(qkv_BTHK, (H, H + N), axis=2)
    angles = operations.angles(positions_BT, K, config.rope_theta)
    q_BTHK = operations.rotate(operations.rms_norm(q_BTHK, weights["q_norm"], eps), *angles)
    k_BTNK = operations.rotate(operations.rms_norm(k_BTNK, weights["k_norm"], eps), *angles)
    kv = (k_BTNK, v_BTNK)
    if cached is not None:
        kv = tuple(lax.dynamic_update_slice_in_dim(old, new, slot, axis=1) for old, new in zip(cached, kv, strict=True))
    attended_MD = operations.attention(q_BTHK, *kv, mask_BTS).reshape(-1, H * K)
    x_BTD = x_BTD + (activation(attended_MD) @ weights["o"].T).reshape(x_BTD.shape)

    is_moe = config.is_moe_layer(i)
    activation = activation_of(EXPERTS if is_moe else MLP)
    x_MD = operations.rms_norm(x_BTD, weights["mlp_norm"], eps).reshape(-1, width)
    if is_moe:
        out_MD = _moe(config, activation, weights, x_MD)
    else:
        out_MD = activation(operations.gate(activation(x_MD) @ weights["gate_up"].T)) @ weights["down"].T
    return x_BTD + out_MD.reshape(x_BTD.shape), kv


def _stack(config, recipe, weights, tokens_BT, positions_BT, mask_BTS, cache, slot):
    """All layers and the final norm. `cache` has (keys, values) per layer, or Nones in a prefill."""
    x_BTD, new_cache = weights["embed"][tokens_BT], []
    for i, cached in enumerate(cache):
        x_BTD, kv = _layer(config, recipe, i, weights["layers"][i], x_BTD, positions_BT, mask_BTS, cached, slot)
        new_cache.append(kv)
    return operations.rms_norm(x_BTD, weights["final_norm"], config.rms_norm_eps), tuple(new_cache)


def _logits(weights, hidden_BD):
    return operations.logits(hidden_BD, weights.get("lm_head", weights["embed"]))


def _truncated(logits_BV, sampling):
    """Logits over the temperature, -inf outside top-k and top-p. Ties with the last kept token are kept."""
    if sampling.truncation.greedy:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if not sampling.truncation.keeps_all(logits_BV.shape[-1]):
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        rank_1V = jnp.arange(sorted_BV.shape[-1])[None, :]
        if sampling.top_k > 0:
            sorted_BV = jnp.where(rank_1V < sampling.top_k, sorted_BV, -jnp.inf)
        prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
        kept_BV = (sorted_BV > -jnp.inf) & (jnp.cumsum(prob_BV, axis=-1) - prob_BV < sampling.top_p)
        smallest_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    return logits_BV


def _draw(logits_BV, key_B, sampling):
    """A token per row and its log-prob, under the convention of `pallas_kernels.log_prob.api`."""
    logits_BV = _truncated(logits_BV, sampling)
    scores_BV = logits_BV
    if not sampling.truncation.greedy:
        scores_BV += jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32))(key_B)
    token_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    log_prob_BV = operations.log_softmax(logits_BV)
    return token_B, jnp.take_along_axis(log_prob_BV, token_B[:, None], axis=-1)[:, 0]


def _prefill(config, recipe, weights, tokens_PL):
    """Runs all prompts at once. Returns hidden states [P, L, D], and per layer keys and values [P, L, N, K].

    Padding lies behind each prompt, so a causal mask keeps it from the prompt's own tokens (not from the
    scales of the activations).
    """
    slots = tokens_PL.shape[1]
    positions_PL = jnp.broadcast_to(jnp.arange(slots), tokens_PL.shape)
    mask_PLS = jnp.broadcast_to(jnp.tril(jnp.ones((slots, slots), bool)), (*tokens_PL.shape, slots))
    return _stack(config, recipe, weights, tokens_PL, positions_PL, mask_PLS, (None,) * config.num_hidden_layers, None)


@functools.partial(jax.jit, static_argnames=("config", "recipe", "sampling"))
def generate(
    params: dict,
    config: ModelConfig,
    recipe: Recipe,
    prompt_tokens: Int[Array, "P L"],
    prompt_lengths: Int[Array, "P"],
    request_ids: UInt[Array, "P"],
    key,
    sampling: SamplingParams,
) -> Rollouts:
    """Samples completions, as `minite_jax.sampler.sampling.generate` does, from masters in place of a policy.

    The log-probs follow the same convention and the random numbers are the same, so what differs from
    `minite_jax.sample` comes from the arithmetic. A row's result does depend on the other rows, on the
    padding and on the number of samples. No host round trip per token.

    Args:
      params: float32 masters, as `minite_jax.init_params` makes them.
      config: shape of the model; static.
      recipe: says which matmuls are quantised, and the type of the others. Its scale rules are not used.
        Static.
      prompt_tokens: [P, L] int32, padded behind each prompt, see `minite_jax.sampler.requests.pad_prompts`.
      prompt_lengths: [P] int32, at least 1.
      request_ids: [P] uint32 that seed the prompts.
      key: typed PRNG key.
      sampling: see `SamplingParams`; static.

    Returns:
      `Rollouts`, prompt-major, log-probs in float32 nats.

    Raises:
      ValueError: the recipe quantises nothing in this model, or the model is none that this engine knows: it must have
        norms of queries and keys, no biases and plain rotary angles.
    """
    check_recipe(config, recipe)
    if not config.qk_norm or config.attention_bias or config.rope_scaling is not None:
        raise ValueError("the naive engine runs models with qk_norm, no attention_bias and no rope_scaling; use the aligned one")
    num_prompts, slots = prompt_tokens.shape
    batch, new_slots = num_prompts * sampling.n, sampling.max_tokens
    weights = _copy_weights(params, config, recipe)
    key_B = request_keys(key, request_ids, sampling.n)
    length_B = jnp.repeat(prompt_lengths, sampling.n)
    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    hidden_PLD, prompt_cache = _prefill(config, recipe, weights, prompt_tokens)
    last_PD = hidden_PLD[jnp.arange(num_prompts), prompt_lengths - 1]
    # New tokens lie behind the padded prompts, in the same slot for all rows: a step writes one slice, and
    # the mask skips the padding.
    room = [(0, 0), (0, new_slots), (0, 0), (0, 0)]
    cache = jax.tree.map(lambda x: jnp.repeat(jnp.pad(x, room), sampling.n, axis=0), prompt_cache)
    slot_1S = jnp.arange(slots + new_slots)[None, :]
    is_prompt_BS = slot_1S < length_B[:, None]

    def draw(step, logits_BV, tokens_BC, log_probs_BC, mask_BC, done_B):
        token_B, log_prob_B = _draw(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(key_B, step), sampling)
        tokens_BC = tokens_BC.at[:, step].set(jnp.where(done_B, 0, token_B))
        log_probs_BC = log_probs_BC.at[:, step].set(jnp.where(done_B, 0.0, log_prob_B))
        mask_BC = mask_BC.at[:, step].set(~done_B)
        return (
            tokens_BC,
            log_probs_BC,
            mask_BC,
            done_B | jnp.any(token_B[:, None] == stop_ids[None, :], axis=1),
        )

    def unfinished(state):
        step, _, (*_, done_B) = state
        return (step < new_slots) & ~jnp.all(done_B)

    def decode(state):
        step, cache, drawn = state
        token_B1 = lax.dynamic_slice_in_dim(drawn[0], step - 1, 1, axis=1)
        slot = slots + step - 1
        mask_BS = is_prompt_BS | ((slot_1S >= slots) & (slot_1S <= slot))
        hidden_B1D, cache = _stack(
            config,
            recipe,
            weights,
            token_B1,
            (length_B + step - 1)[:, None],
            mask_BS[:, None, :],
            cache,
            slot,
        )
        return step + 1, cache, draw(step, _logits(weights, hidden_B1D[:, 0]), *drawn)

    blank_BC = jnp.zeros((batch, new_slots), jnp.int32)
    drawn = (blank_BC, blank_BC.astype(jnp.float32), blank_BC.astype(bool), jnp.zeros((batch,), bool))
    drawn = draw(0, jnp.repeat(_logits(weights, last_PD), sampling.n, axis=0), *drawn)
    _, _, (tokens_BC, log_probs_BC, mask_BC, done_B) = lax.while_loop(unfinished, decode, (jnp.int32(1), cache, drawn))
    return Rollouts(
        tokens=tokens_BC,
        log_probs=log_probs_BC,
        mask=mask_BC,
        finish_reason=jnp.where(done_B, FINISH_STOP, FINISH_LENGTH).astype(jnp.int32),
        prompt_tokens=jnp.repeat(prompt_tokens, sampling.n, axis=0),
        prompt_length=length_B,
    )
