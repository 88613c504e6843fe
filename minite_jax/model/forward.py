"""The one forward of Qwen3, dense and MoE, and of Llama-type models. Sampler, learner, reference policy, evaluation and
diagnostics all call `hidden_states`.

Every operation works on rows (tokens) and is bit-exact in the row: see `pallas_kernels.rows`. Between operations there are
only reshapes, gathers and single adds.
"""

import functools
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minite_jax.model import cache as cache_lib
from minite_jax.model.cache import PagedCache
from minite_jax.model.moe import moe
from minite_jax.model.policy import Policy, Weight
from minite_jax.model.rope import angle_tables
from minite_jax.model.taps import Taps
from minite_jax.precision.activation import activation, gated, normed
from minite_jax.precision.bias import add_bias
from minite_jax.precision.linear import linear, stored_value
from minite_jax.precision.recipe import ATTENTION, EXPERTS, KINDS, MLP
from pallas_kernels import dispatch
from pallas_kernels.attention import attention, paged_attention
from pallas_kernels.embedding import embed
from pallas_kernels.log_prob import Truncation, token_log_prob
from pallas_kernels.matmul import matmul
from pallas_kernels.numerics import round_to
from pallas_kernels.qk_norm_rotary import qk_norm_rotary
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rotary import rotary
from pallas_kernels.silu_mul import silu_mul


def _add(x_MD, y_MD):
    """The add of `add_rms_norm`, where no norm follows: one float32 add, rounded to the stream's type."""
    return round_to(x_MD.astype(jnp.float32) + y_MD.astype(jnp.float32), x_MD.dtype)


def _value(weight: Weight) -> jax.Array:
    return stored_value(weight.stored, weight.master)


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class _Places:
    """Where the tokens at hand stand: what all layers share.

    Attributes:
      positions: [B, T] int32, the position up to which each token attends.
      angles: cosines and sines at each token's position, each [B T, K/2].
      tables: [B, J] of the cache, or None.
      slots: page and place of each token's key and value, each [B, T], or None.
    """

    positions: Int[Array, "B T"]
    angles: tuple[Float[Array, "M K2"], Float[Array, "M K2"]]
    tables: Int[Array, "B J"] | None = None
    slots: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None


def _attention_block(config, format, weights, x, places, pages, taps):
    """Projections, biases and norms where the model has them, rotation, attention of an `Activation`. Returns the block's output
    and, with a cache, this layer's pages of keys and values.
    """
    batch, length = places.positions.shape
    H, N, K = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    qkv_MF = linear(format, x, weights["qkv"].stored, weights["qkv"].master)
    if config.attention_bias:
        qkv_MF = add_bias(qkv_MF, _value(weights["qkv_bias"]))
    qkv_MF = taps("attention/qkv", qkv_MF)
    qkv_MHK = qkv_MF.reshape(-1, H + 2 * N, K)
    if config.qk_norm:
        norms = (_value(weights["q_norm"]), _value(weights["k_norm"]))
        sizes = dict(num_heads=H, num_kv_heads=N, eps=config.rms_norm_eps)
        q_MHK, k_MNK, v_MNK = qk_norm_rotary(qkv_MHK, *norms, *places.angles, **sizes)
        for which, name in enumerate(("attention/q_norm", "attention/k_norm")):
            taps.beside(name, lambda *x, which=which: _normed_heads(*x, **sizes)[which], qkv_MHK, *norms, *places.angles)
    else:
        q_MHK, k_MNK, v_MNK = jnp.split(qkv_MHK, (H, H + N), axis=1)
        q_MHK, k_MNK = rotary(q_MHK, *places.angles), rotary(k_MNK, *places.angles)
    q_MHK, k_MNK = taps("attention/q", q_MHK), taps("attention/k", k_MNK)
    q_BTHK = q_MHK.reshape(batch, length, H, K)
    k_BTNK, v_BTNK = k_MNK.reshape(batch, length, N, K), v_MNK.reshape(batch, length, N, K)
    if pages is None:
        out_BTHK = attention(q_BTHK, k_BTNK, v_BTNK, places.positions)
    else:
        pages = tuple(cache_lib.write(old, new, places.slots) for old, new in zip(pages, (k_BTNK, v_BTNK), strict=True))
        out_BTHK = paged_attention(q_BTHK, *pages, places.tables, places.positions)
    heads_MF = out_BTHK.reshape(batch * length, H * K)
    heads = taps.operand("attention/heads", format, activation(format, heads_MF), lambda x: x, heads_MF)
    out_MD = linear(format, heads, weights["o"].stored, weights["o"].master)
    if config.attention_bias:
        out_MD = add_bias(out_MD, _value(weights["o_bias"]))
    return taps("attention/o", out_MD), pages


def _normed_heads(qkv_MHK, q_weight, k_weight, cos_MK, sin_MK, **sizes):
    """Queries and keys before they are turned: turned by an angle of 0."""
    return qk_norm_rotary(qkv_MHK, q_weight, k_weight, jnp.ones_like(cos_MK), jnp.zeros_like(sin_MK), **sizes)


def _mlp_block(config, format, weights, x, is_moe, taps):
    """Gate, up and down, or the experts, of an `Activation`."""
    if is_moe:
        return moe(config, format, weights, x, taps)
    gate_up_MF = taps("mlp/gate_up", linear(format, x, weights["gate_up"].stored, weights["gate_up"].master))
    x = taps.operand("mlp/gated", format, gated(format, gate_up_MF), silu_mul, gate_up_MF)
    return taps("mlp/down", linear(format, x, weights["down"].stored, weights["down"].master))


def _layer(policy, layer, weights, stream, pages, *, places, one_part, taps):
    """One layer. The residual stream comes and goes as (x, what the last block adds to it), since the norm that reads the sum
    adds the two in its own kernel; with `one_part` it goes as (sum, None).

    Returns the stream, and this layer's pages beside the tensors that were wanted of it (a layer may be traced more than once, in
    a loop or for a gradient, so they are returned like everything else).
    """
    taps = taps.in_layer(policy, layer)
    with policy.running(layer, weights.get("switches")):
        return _layer_blocks(policy, layer, weights, stream, pages, places, one_part, taps)


def _layer_blocks(policy, layer, weights, stream, pages, places, one_part, taps):
    """Attention and MLP of one layer."""
    config = policy.config
    # The scopes are for profiles: an operation's name tells which part of the model it belongs to.
    with jax.named_scope("attention"):
        format, weight = policy.format_of(ATTENTION, layer), _value(weights["attention_norm"])
        x_MD, x = _normed(config, format, stream, weight, taps, ("input", "attention/norm"))
        block_MD, pages = _attention_block(config, format, weights, x, places, pages, taps)
    is_moe = config.is_moe_layer(layer)
    with jax.named_scope(block := "moe" if is_moe else "mlp"):
        format, weight = policy.format_of(EXPERTS if is_moe else MLP, layer), _value(weights["mlp_norm"])
        names = ("attention/stream", f"{block}/norm")
        x_MD, x = _normed(config, format, (x_MD, block_MD), weight, taps, names, keep=is_moe)
        block_MD = _mlp_block(config, format, weights, x, is_moe, taps)
        return (_add(x_MD, block_MD), None) if one_part else (x_MD, block_MD), (pages, taps.tensors)


def _normed(config, format, stream, weight, taps, names, keep=False):
    """The sum of the stream's parts, and its norm as an `Activation`."""
    sum_name, norm_name = names
    if sum_name in taps.edits:  # the sum must be there before the kernel that would add it
        stream = (taps(sum_name, stream[0] if stream[1] is None else _add(*stream)), None)
    eps = config.rms_norm_eps
    x_MD, x = normed(format, *stream, weight, eps=eps, keep=keep)
    if sum_name not in taps.edits:
        taps(sum_name, x_MD)
    return x_MD, taps.operand(norm_name, format, x, lambda x, w: add_rms_norm(x, None, w, eps=eps)[1], x_MD, weight)


def hidden_states(
    policy: Policy,
    tokens: Int[Array, "B T"],
    cache: PagedCache | None = None,
    *,
    positions: Int[Array, "B T"] | None = None,
    num_new: Int[Array, "B"] | None = None,
    scan_layers: bool | None = None,
    remat: bool = False,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T D"], PagedCache | None]:
    """Hidden states after the final norm, for a whole batch from its start or for the next tokens of a cache.

    Args:
      policy: weights, config and recipe; with masters inside a gradient.
      tokens: [B, T] int32. What lies behind a sequence's end (padding) touches nothing before it.
      cache: None, or the cache that the tokens continue: they take the positions from ``cache.length`` on.
      positions: [B, T] int32 without a cache, each token's position in its sequence; None: one sequence a row, from column 0
        on. Several sequences in a row start at multiples of `pallas_kernels.attention.key_block`, see
        `minite_jax.rollout.pack_sequences`, and have the bits that each has alone.
      num_new: [B] int32 with a cache, how many of the T tokens are real; None: all. The others take no room in the cache.
      scan_layers: run layers of the same kind and formats as one loop over their stacked weights, so that compiling takes as long
        as one layer does; False: one after another, which copies no weights and no pages. Same bits. None: a loop, except on a
        GPU, where the copies would cost more time than the layers' kernels.
      remat: recompute each layer in the backward instead of keeping its residuals. Same bits.
      taps: which named tensors to hand out (into ``taps.tensors``) or to replace. Those handed out change no bit of the result.

    Returns:
      Hidden states [B, T, D] in the recipe's type, and the cache with `num_new` more tokens (None without a cache). NaN
      everywhere if the cache's pool was given too few pages.

    Raises:
      ValueError: no tokens, more than the cache has slots, or positions beside a cache.
    """
    config = policy.config
    batch, length = tokens.shape
    weights = policy.paired_weights()
    taps = Taps() if taps is None else taps
    if 0 in tokens.shape:
        raise ValueError(f"tokens of shape {tokens.shape} hold nothing to compute; give at least one sequence of one token")
    if cache is None:
        places = _places_in_rows(config, batch, length, positions)
    elif positions is not None:
        raise ValueError("positions beside a cache: its tokens follow those that it holds; leave positions out")
    elif length > cache.capacity:
        raise ValueError(
            f"{length} tokens do not fit a cache of {cache.capacity} slots; make the cache larger or the prompt shorter"
        )
    else:
        cache, places = _places_in_cache(config, cache, length, num_new)

    with jax.named_scope("embed"):
        x_MD = taps("embed", embed(tokens.reshape(-1), weights["embed"].stored, master=weights["embed"].master))
    pages = [None] * config.num_hidden_layers if cache is None else list(zip(cache.keys, cache.values, strict=True))
    shape = policy.replace(weights=None, masters=None, switches=None)
    layers = weights["layers"]
    if policy.switches is not None:  # as a layer's weights are: a loop hands each layer its own
        layers = [{**each, "switches": policy.switches[i]} for i, each in enumerate(layers)]
    scan_layers = dispatch.platform() != "gpu" if scan_layers is None else scan_layers
    stream, new_pages = (x_MD, None), []
    for first, last in _runs(policy, taps) if scan_layers else ((i, i + 1) for i in range(config.num_hidden_layers)):
        # Between layers of a loop, and where the backward starts again, the stream is one array: two would be kept in its place.
        layer = functools.partial(_layer, shape, first, places=places, one_part=scan_layers or remat, taps=taps)
        layer = jax.checkpoint(layer) if remat else layer
        stream, given = _run_layers(layer, layers[first:last], stream, pages[first:last])
        new_pages += [written for written, _ in given]
        for i, (_, tensors) in enumerate(given, start=first):
            taps.collect(i, tensors)
    with jax.named_scope("head"), policy.running():
        if "final/stream" in taps.edits:
            stream = (taps("final/stream", stream[0] if stream[1] is None else _add(*stream)), None)
        x_MD, hidden_MD = add_rms_norm(*stream, _value(weights["final_norm"]), eps=config.rms_norm_eps)
        if "final/stream" not in taps.edits:
            taps("final/stream", x_MD)
        hidden_MD = taps("final/norm", hidden_MD)
    if cache is not None:
        keys, values = zip(*new_pages, strict=True)
        cache = cache.replace(keys=keys, values=values)
    return hidden_MD.reshape(batch, length, config.hidden_size), cache


def _angles(config, positions_BT, num_positions):
    """Cosines and sines at each position; those behind the last one (padding) take its."""
    cos_SK, sin_SK = angle_tables(num_positions, config.head_dim, config.rope_theta, config.rope_scaling)
    position_M = jnp.minimum(positions_BT, num_positions - 1).reshape(-1)
    return jnp.asarray(cos_SK)[position_M], jnp.asarray(sin_SK)[position_M]


def _places_in_rows(config, batch, length, positions_BT):
    """Places without a cache."""
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return _Places(positions=positions_BT, angles=_angles(config, positions_BT, length))


def _places_in_cache(config, cache, length, num_new_B):
    """The cache with room for the new tokens, and their places."""
    positions_BT = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    cache = cache.extend(jnp.full_like(cache.length, length) if num_new_B is None else num_new_B, length)
    # A cache without pages for all of them has no answer: NaN, not somebody else's keys.
    angles = tuple(jnp.where(cache.overdrawn(), jnp.nan, x) for x in _angles(config, positions_BT, cache.capacity))
    # Padding reads what its sequence has, and is ignored.
    readable_B1 = jnp.clip(cache.length - 1, 0, cache.capacity - 1)[:, None]
    return cache, _Places(
        positions=jnp.minimum(positions_BT, readable_B1), angles=angles, tables=cache.tables, slots=cache.slots(positions_BT)
    )


def _runs(policy: Policy, taps: Taps) -> list[tuple[int, int]]:
    """Cuts the layers into the longest runs (first, last + 1) of one kind, MoE or dense, whose matmuls have the same formats and
    of which the same tensors are wanted.
    """
    config = policy.config
    programs = [
        (
            config.is_moe_layer(i),
            *(policy.format_of(kind, i) for kind in KINDS),
            taps.in_layer(policy, i).program,
            policy.substitutes and policy.substitutes.fixed(i),
        )
        for i in range(config.num_hidden_layers)
    ]
    starts = [i for i, each in enumerate(programs) if i == 0 or each != programs[i - 1]]
    return list(zip(starts, [*starts[1:], len(programs)], strict=True))


def _run_layers(layer, weights, stream, pages):
    """Applies layers of one kind and format one after another. Several become one loop, so that compiling does not grow with
    depth.

    Returns the residual stream, and of each layer its pages (None without a cache) and the tensors that were wanted of it.
    """
    if len(weights) == 1:
        stream, given = layer(weights[0], stream, pages[0])
        return stream, [given]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    stream, given = lax.scan(lambda stream, each: layer(each[0], stream, each[1]), stream, (stack(weights), stack(pages)))
    return stream, [jax.tree.map(lambda leaf, i=i: leaf[i], given) for i in range(len(weights))]


def output_head(policy: Policy) -> Weight:
    """The output embedding [V, D]: the input embedding where the two are tied."""
    weights = policy.paired_weights()
    return weights["embed"] if policy.config.tie_word_embeddings else weights["lm_head"]


@jax.named_scope("head")
def logits_of(policy: Policy, hidden: Float[Array, "M D"]) -> Float[Array, "M V"]:
    """Float32 logits of hidden states. Not differentiable in the head: the learner uses `token_log_probs`."""
    with policy.running():
        return matmul(hidden, output_head(policy).stored, out_dtype=jnp.float32)


@jax.jit
def forward(policy: Policy, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, float32 [B, T, V]. Holds B T V numbers: for log-probs of given tokens use `token_log_probs`."""
    hidden_BTD, _ = hidden_states(policy, tokens)
    logits_MV = logits_of(policy, hidden_BTD.reshape(-1, hidden_BTD.shape[-1]))
    return logits_MV.reshape(*tokens.shape, -1)


def scored_tokens(
    policy: Policy,
    tokens: Int[Array, "B T"],
    truncation: Truncation,
    *,
    positions: Int[Array, "B T"] | None = None,
    remat: bool = False,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T1"], Float[Array, "B T1"]]:
    """Log-probs of tokens 1..T-1 given what lies before them, and the entropies of the distributions; differentiable.

    Column t of the result belongs to token t + 1 and is computed from the hidden state of token t.

    Args:
      policy: with masters, gradients flow to them.
      tokens: [B, T] int32, T >= 2.
      truncation: the sampler's temperature, top-k and top-p: see `pallas_kernels.log_prob.api`.
      positions: see `hidden_states`. Where a sequence ends inside a row, the column of its last token scores what follows, which
        is no token of that sequence: mask it.
      remat, taps: see `hidden_states`. Tensors of the head have one row for each column of the result.

    Returns:
      Log-probs and entropies, each [B, T-1] float32 nats.
    """
    taps = Taps() if taps is None else taps
    hidden_BTD, _ = hidden_states(policy, tokens, positions=positions, remat=remat, taps=taps)
    batch, length, width = hidden_BTD.shape
    head = output_head(policy)
    hidden_MD = hidden_BTD[:, :-1].reshape(batch * (length - 1), width)
    taps.beside("final/logits", functools.partial(logits_of, policy), hidden_MD)
    with jax.named_scope("head"), policy.running():
        log_prob_M, entropy_M = token_log_prob(
            hidden_MD,
            head.stored,
            tokens[:, 1:].reshape(-1),
            truncation,
            head_master=head.master,
        )
    log_prob_M, entropy_M = taps("final/log_prob", log_prob_M), taps("final/entropy", entropy_M)
    return log_prob_M.reshape(batch, length - 1), entropy_M.reshape(batch, length - 1)


@functools.partial(jax.jit, static_argnames=("truncation",))
def token_log_probs(policy: Policy, tokens: Int[Array, "B T"], truncation: Truncation = Truncation()) -> Float[Array, "B T1"]:  # noqa: B008
    """Log-probs of tokens 1..T-1, float32 [B, T-1] nats: what the sampler returned for them, to the last bit."""
    return scored_tokens(policy, tokens, truncation)[0]
