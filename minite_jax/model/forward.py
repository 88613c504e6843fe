"""The one forward of Qwen3, dense and MoE. Sampler, learner, reference policy, evaluation and diagnostics all call
`hidden_states`.

Every operation works on rows (tokens) and is bit-exact in the row: see `pallas_kernels.rows`. Between operations there are
only reshapes, gathers and single adds.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minite_jax.model import cache as cache_lib
from minite_jax.model.cache import KVCache
from minite_jax.model.moe import moe
from minite_jax.model.policy import Policy, Weight
from minite_jax.precision.activation import gated, normed
from minite_jax.precision.linear import linear, stored_value
from minite_jax.precision.recipe import ATTENTION, EXPERTS, KINDS, MLP
from pallas_kernels.attention import attention, key_block, paged_attention
from pallas_kernels.embedding import embed
from pallas_kernels.log_prob import Truncation, token_log_prob
from pallas_kernels.matmul import matmul
from pallas_kernels.numerics import round_to
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rotary import rotary, rotary_table


def _add(x_MD, y_MD):
    """Residual add: one float32 add, rounded to the stream's type."""
    return round_to(x_MD.astype(jnp.float32) + y_MD.astype(jnp.float32), x_MD.dtype)


def _value(weight: Weight) -> jax.Array:
    return stored_value(weight.stored, weight.master)


def _attention_block(policy, layer, weights, x, positions_BT, angles, cached):
    """Projections, norms, rotation, attention of an `Activation`. Returns the block's output and this layer's keys and values
    [B, S, N, K].
    """
    config = policy.config
    batch, length = positions_BT.shape
    H, N, K = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    format = policy.format_of(ATTENTION, layer)

    qkv_MHK = linear(format, x, weights["qkv"].stored, weights["qkv"].master).reshape(-1, H + 2 * N, K)
    q_MHK, k_MNK, v_MNK = jnp.split(qkv_MHK, (H, H + N), axis=1)

    def normalized(x, name):
        return rms_norm(x.reshape(-1, K), _value(weights[name]), eps=config.rms_norm_eps).reshape(x.shape)

    q_MHK = rotary(normalized(q_MHK, "q_norm"), *angles)
    k_MNK = rotary(normalized(k_MNK, "k_norm"), *angles)
    k_BSNK, v_BSNK = k_MNK.reshape(batch, length, N, K), v_MNK.reshape(batch, length, N, K)
    if cached is not None:
        k_BSNK, v_BSNK = (cache_lib.write(old, new, positions_BT) for old, new in zip(cached, (k_BSNK, v_BSNK), strict=True))
    q_BTHK = q_MHK.reshape(batch, length, H, K)
    if cached is None:
        out_BTHK = attention(q_BTHK, k_BSNK, v_BSNK, positions_BT)
    else:
        slots = k_BSNK.shape[1]
        readable_BT = jnp.minimum(positions_BT, slots - 1)  # padding behind the capacity reads, and is ignored
        filled = [(0, 0), (0, -slots % key_block()), (0, 0), (0, 0)]
        pages = (jnp.pad(x, filled).reshape(-1, key_block(), N, K) for x in (k_BSNK, v_BSNK))
        tables_BJ = jnp.arange(batch * (-(-slots // key_block())), dtype=jnp.int32).reshape(batch, -1)
        out_BTHK = paged_attention(q_BTHK, *pages, tables_BJ, readable_BT)
    out_MD = linear(format, out_BTHK.reshape(batch * length, H * K), weights["o"].stored, weights["o"].master)
    return out_MD, (k_BSNK, v_BSNK)


def _mlp_block(policy, layer, weights, x_MD):
    config = policy.config
    format = policy.format_of(EXPERTS if config.is_moe else MLP, layer)
    x = normed(format, x_MD, _value(weights["mlp_norm"]), eps=config.rms_norm_eps, keep=config.is_moe)
    if config.is_moe:
        return moe(config, format, weights, x)
    gate_up_MF = linear(format, x, weights["gate_up"].stored, weights["gate_up"].master)
    return linear(format, gated(format, gate_up_MF), weights["down"].stored, weights["down"].master)


def _layer(policy, layer, weights, x_MD, *, positions_BT, angles, cached):
    format = policy.format_of(ATTENTION, layer)
    # The scopes are for profiles: an operation's name tells which part of the model it belongs to.
    with jax.named_scope("attention"):
        x = normed(format, x_MD, _value(weights["attention_norm"]), eps=policy.config.rms_norm_eps)
        attended_MD, kv = _attention_block(policy, layer, weights, x, positions_BT, angles, cached)
        x_MD = _add(x_MD, attended_MD)
    with jax.named_scope("moe" if policy.config.is_moe else "mlp"):
        return _add(x_MD, _mlp_block(policy, layer, weights, x_MD)), kv


def hidden_states(
    policy: Policy,
    tokens: Int[Array, "B T"],
    cache: KVCache | None = None,
    *,
    num_new: Int[Array, "B"] | None = None,
    scan_layers: bool = True,
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Hidden states after the final norm, for a whole batch from its start or for the next tokens of a cache.

    Args:
      policy: weights, config and recipe; with masters inside a gradient.
      tokens: [B, T] int32. Sequences start at column 0; what lies behind a sequence's end (padding) touches nothing before it.
      cache: None, or the cache that the tokens continue: they take the positions from ``cache.length`` on.
      num_new: [B] int32, how many of the T tokens are real (with a cache); None: all.
      scan_layers: run layers of the same formats as one loop over their stacked weights, so that compiling takes as long
        as one layer does; False: one after another, which copies no weights. Same bits.
      remat: recompute each layer in the backward instead of keeping its residuals. Same bits.

    Returns:
      Hidden states [B, T, D] in the recipe's type, and the cache with `num_new` more tokens (None without a cache).

    Raises:
      ValueError: no tokens, or more than the cache has slots.
    """
    config = policy.config
    batch, length = tokens.shape
    weights = policy.paired_weights()
    if 0 in tokens.shape:
        raise ValueError(f"tokens of shape {tokens.shape} hold nothing to compute; give at least one sequence of one token")
    if cache is not None and length > cache.capacity:
        raise ValueError(
            f"{length} tokens do not fit a cache of {cache.capacity} slots; make the cache larger or the prompt shorter"
        )
    first_B = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    positions_BT = first_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]

    num_positions = length if cache is None else cache.capacity
    cos_SK, sin_SK = rotary_table(num_positions, config.head_dim, config.rope_theta)
    position_M = jnp.minimum(positions_BT, num_positions - 1).reshape(-1)
    angles = (jnp.asarray(cos_SK)[position_M], jnp.asarray(sin_SK)[position_M])

    with jax.named_scope("embed"):
        x_MD = embed(tokens.reshape(-1), weights["embed"].stored, master=weights["embed"].master)
    cached = None if cache is None else tuple(zip(cache.keys, cache.values, strict=True))
    shape = policy.replace(weights=None, masters=None)
    kv = []
    for first, last in _runs(policy) if scan_layers else ((i, i + 1) for i in range(config.num_hidden_layers)):
        layer = functools.partial(_layer, shape, first, positions_BT=positions_BT, angles=angles)
        run_cached = None if cached is None else cached[first:last]
        x_MD, run_kv = _run_layers(jax.checkpoint(layer) if remat else layer, weights["layers"][first:last], x_MD, run_cached)
        kv += run_kv
    with jax.named_scope("head"):
        hidden_MD = rms_norm(x_MD, _value(weights["final_norm"]), eps=config.rms_norm_eps)
    if cache is not None:
        added_B = length if num_new is None else num_new
        keys, values = zip(*kv, strict=True)
        cache = KVCache(keys=keys, values=values, length=cache.length + added_B)
    return hidden_MD.reshape(batch, length, config.hidden_size), cache


def _runs(policy: Policy) -> list[tuple[int, int]]:
    """Cuts the layers into the longest runs (first, last + 1) whose matmuls have the same formats."""
    formats = [tuple(policy.format_of(kind, i) for kind in KINDS) for i in range(policy.config.num_hidden_layers)]
    starts = [i for i, each in enumerate(formats) if i == 0 or each != formats[i - 1]]
    return list(zip(starts, [*starts[1:], len(formats)], strict=True))


def _run_layers(layer, weights, x_MD, cached):
    """Applies layers of one format one after another. Several become one loop, so that compiling does not grow with depth.

    Returns the hidden states and, with a cache, each layer's keys and values.
    """
    if len(weights) == 1:
        x_MD, kv = layer(weights[0], x_MD, cached=None if cached is None else cached[0])
        return x_MD, [] if cached is None else [kv]

    def body(x_MD, each):
        x_MD, kv = layer(each[0], x_MD, cached=each[1])
        return x_MD, None if cached is None else kv

    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    x_MD, kv = lax.scan(body, x_MD, (stack(weights), None if cached is None else stack(cached)))
    return x_MD, [] if cached is None else [jax.tree.map(lambda leaf, i=i: leaf[i], kv) for i in range(len(weights))]


def output_head(policy: Policy) -> Weight:
    """The output embedding [V, D]: the input embedding where the two are tied."""
    weights = policy.paired_weights()
    return weights["embed"] if policy.config.tie_word_embeddings else weights["lm_head"]


@jax.named_scope("head")
def logits_of(policy: Policy, hidden: Float[Array, "M D"]) -> Float[Array, "M V"]:
    """Float32 logits of hidden states. Not differentiable in the head: the learner uses `token_log_probs`."""
    return matmul(hidden, output_head(policy).stored, out_dtype=jnp.float32)


@jax.jit
def forward(policy: Policy, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, float32 [B, T, V]. Holds B T V numbers: for log-probs of given tokens use `token_log_probs`."""
    hidden_BTD, _ = hidden_states(policy, tokens)
    logits_MV = logits_of(policy, hidden_BTD.reshape(-1, hidden_BTD.shape[-1]))
    return logits_MV.reshape(*tokens.shape, -1)


def scored_tokens(
    policy: Policy, tokens: Int[Array, "B T"], truncation: Truncation, *, remat: bool = False
) -> tuple[Float[Array, "B T1"], Float[Array, "B T1"]]:
    """Log-probs of tokens 1..T-1 given what lies before them, and the entropies of the distributions; differentiable.

    Column t of the result belongs to token t + 1 and is computed from the hidden state of token t.

    Args:
      policy: with masters, gradients flow to them.
      tokens: [B, T] int32, T >= 2.
      truncation: the sampler's temperature, top-k and top-p: see `pallas_kernels.log_prob.api`.
      remat: see `hidden_states`.

    Returns:
      Log-probs and entropies, each [B, T-1] float32 nats.
    """
    hidden_BTD, _ = hidden_states(policy, tokens, remat=remat)
    batch, length, width = hidden_BTD.shape
    head = output_head(policy)
    with jax.named_scope("head"):
        log_prob_M, entropy_M = token_log_prob(
            hidden_BTD[:, :-1].reshape(batch * (length - 1), width),
            head.stored,
            tokens[:, 1:].reshape(-1),
            truncation,
            head_master=head.master,
        )
    return log_prob_M.reshape(batch, length - 1), entropy_M.reshape(batch, length - 1)


@functools.partial(jax.jit, static_argnames=("truncation",))
def token_log_probs(policy: Policy, tokens: Int[Array, "B T"], truncation: Truncation = Truncation()) -> Float[Array, "B T1"]:  # noqa: B008
    """Log-probs of tokens 1..T-1, float32 [B, T-1] nats: what the sampler returned for them, to the last bit."""
    return scored_tokens(policy, tokens, truncation)[0]
