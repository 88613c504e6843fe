"""Log-probabilities and sampling in plain jnp: the specification of the kernels."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import operands
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.reference import dot_nk
from pallas_kernels.numerics import divide, ordered_sum
from pallas_kernels.rows import ROW_TILE, map_row_tiles

# Rows whose logits are held at once: 256 x 151,936 float32 are 156 MB.
ROW_CHUNK = 8 * ROW_TILE


def _processed(logits_RV, truncation, kept_RV):
    """Logits after temperature and truncation; -inf where a token is dropped."""
    if not truncation.greedy and truncation.temperature != 1.0:
        logits_RV = divide(logits_RV, jnp.float32(truncation.temperature))
    return logits_RV if kept_RV is None else jnp.where(kept_RV, logits_RV, -jnp.inf)


def kept_tokens(logits_MV, truncation):
    """Row by row, and no row that is not there: sorting a vocabulary takes tens of milliseconds, so a tile that is filled up with
    zeros would cost a token seconds.
    """
    num_rows = logits_MV.shape[0]
    trips = max(2, num_rows)  # a loop of one trip is no loop: see `pallas_kernels.rows`
    rows_TV = jnp.pad(logits_MV, [(0, trips - num_rows), (0, 0)])

    def body(trip):
        logits_V, is_there = trip
        none_V = jnp.zeros(logits_V.shape, bool)
        return lax.cond(is_there, lambda: _kept_of_row(logits_V, truncation), lambda: none_V)

    return lax.map(body, (rows_TV, jnp.arange(trips) < num_rows))[:num_rows]


def _kept_of_row(logits_V, truncation):
    vocab_size = logits_V.shape[0]
    logits_V = _processed(logits_V, truncation, None)
    if 0 < truncation.top_k < vocab_size:
        # The head of the order, equals by their index; NaN is the last.
        number_V = jnp.where(jnp.isnan(logits_V), -jnp.inf, jnp.where(logits_V == 0.0, 0.0, logits_V))
        head, order = lax.top_k(number_V, truncation.top_k)
    else:
        rising, order = lax.sort((-logits_V, jnp.arange(vocab_size)), num_keys=1, is_stable=True)
        head = -rising
    keep = jnp.ones(head.shape, bool)
    if truncation.top_p < 1.0:
        # Padded, so that sums do not depend on how the head was found.
        exp_V = jnp.pad(jnp.exp(head - head[:1]), (0, vocab_size - head.shape[0]))
        before = (jnp.cumsum(exp_V) - exp_V)[: head.shape[0]]
        # Kept while what lies before does not reach top_p: the first token always is.
        keep = (before < truncation.top_p * ordered_sum(exp_V[None, :])[0]) | (jnp.arange(head.shape[0]) == 0)
    # NaN sorts last and would be cut; kept, it makes the row's log-probs NaN.
    return jnp.zeros((vocab_size,), bool).at[order].set(keep, unique_indices=True) | jnp.isnan(logits_V)


def log_prob_of_logits(logits_MV, tokens_M, truncation, kept_MV):
    def body(tile):
        logits_RV, tokens_R, kept_RV = tile
        logits_RV = _processed(logits_RV, truncation, kept_RV)
        max_R1 = jnp.max(logits_RV, axis=-1, keepdims=True)
        shifted_RV = logits_RV - max_R1
        exp_RV = jnp.exp(shifted_RV)
        sum_R = ordered_sum(exp_RV)
        log_sum_R = jnp.log(sum_R)
        chosen_R = jnp.take_along_axis(logits_RV, tokens_R[:, None], axis=-1)[:, 0]
        weighted_RV = jnp.where(exp_RV > 0, exp_RV * shifted_RV, 0.0 * exp_RV)  # dropped tokens: 0 x -inf counts as 0
        return (chosen_R - max_R1[:, 0]) - log_sum_R, log_sum_R - ordered_sum(weighted_RV) / sum_R

    return map_row_tiles(body, (logits_MV, tokens_M, kept_MV))


def sample_tokens(logits_MV, keys_M, truncation, kept_MV):
    def body(tile):
        logits_RV, key_data_R, kept_RV = tile
        logits_RV = _processed(logits_RV, truncation, kept_RV)
        if not truncation.greedy:
            keys_R = jax.random.wrap_key_data(key_data_R, impl=jax.random.key_impl(keys_M))
            noise_RV = jax.vmap(lambda key: jax.random.gumbel(key, logits_RV.shape[1:], jnp.float32))(keys_R)
            logits_RV = logits_RV + noise_RV
        return jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)

    return map_row_tiles(body, (logits_MV, jax.random.key_data(keys_M), kept_MV))


def _chunks(rows):
    """Cuts arrays [M, ...] into [C, ROW_CHUNK, ...], the last chunk filled up with zeros; also gives the function that undoes
    it.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    chunks = -(-num_rows // ROW_CHUNK)

    def to_chunks(x):
        x = jnp.pad(x, [(0, chunks * ROW_CHUNK - num_rows)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, ROW_CHUNK, *x.shape[1:])

    return jax.tree.map(to_chunks, rows), lambda x: x.reshape(chunks * ROW_CHUNK, *x.shape[2:])[:num_rows]


def token_log_prob(hidden_MD, head, tokens_M, truncation):
    """Log-probs and entropies; and what the backward wants of the forward: nothing."""
    if hidden_MD.shape[0] <= ROW_CHUNK:
        return _chunk_log_prob(hidden_MD, head, tokens_M, truncation), ()
    chunks, restore = _chunks((hidden_MD, tokens_M))
    log_prob, entropy = lax.map(lambda chunk: _chunk_log_prob(chunk[0], head, chunk[1], truncation), chunks)
    return (restore(log_prob), restore(entropy)), ()


def _chunk_log_prob(hidden_CD, head, tokens_C, truncation):
    # The same two tile programs that the sampler runs: same bits.
    logits_CV = matmul(hidden_CD, head, out_dtype=jnp.float32)
    kept_CV = None if truncation.keeps_all(logits_CV.shape[-1]) else kept_tokens(logits_CV, truncation)
    return log_prob_of_logits(logits_CV, tokens_C, truncation, kept_CV)


def token_log_prob_gradients(hidden_MD, head, tokens_M, truncation, saved, dlog_prob_M, dentropy_M, *, wants_head):
    """Gradients of `hidden` and of `head` (float32), chunk by chunk; that of the head is always made."""
    del saved, wants_head
    head_VD = operands.dequantized(head)
    temperature = 1.0 if truncation.greedy else truncation.temperature

    def body(dhead_VD, chunk):
        hidden_CD, tokens_C, dlog_prob_C, dentropy_C = chunk
        logits_CV = matmul(hidden_CD, head, out_dtype=jnp.float32)
        kept_CV = None if truncation.keeps_all(logits_CV.shape[-1]) else kept_tokens(logits_CV, truncation)
        log_prob_CV = jax.nn.log_softmax(_processed(logits_CV, truncation, kept_CV), axis=-1)
        prob_CV = jnp.exp(log_prob_CV)
        safe_log_prob_CV = jnp.where(prob_CV > 0, log_prob_CV, 0.0)
        entropy_C1 = -jnp.sum(prob_CV * safe_log_prob_CV, axis=-1, keepdims=True)
        onehot_CV = jax.nn.one_hot(tokens_C, logits_CV.shape[-1], dtype=jnp.float32)
        dlogits_CV = dlog_prob_C[:, None] * (onehot_CV - prob_CV)
        dlogits_CV -= dentropy_C[:, None] * prob_CV * (safe_log_prob_CV + entropy_C1)
        dlogits_CV = dlogits_CV / temperature
        dhead_VD += dot_nk(dlogits_CV.T, hidden_CD.astype(jnp.float32).T)
        return dhead_VD, dot_nk(dlogits_CV, head_VD.T)

    chunks, restore = _chunks((hidden_MD, tokens_M, dlog_prob_M, dentropy_M))
    dhead_VD, dhidden_CD = lax.scan(body, jnp.zeros(head_VD.shape, jnp.float32), chunks)
    return restore(dhidden_CD), dhead_VD
