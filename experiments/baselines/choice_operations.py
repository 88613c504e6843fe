"""The operations of the one forward with the choices of `choices` in them. Each calls `ours` where no choice is on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.baselines import operations as xla
from minite_jax.model.policy import with_fp8_exact
from minite_jax.model.substitutes import choose
from pallas_kernels import dispatch, nvfp4
from pallas_kernels.numerics import divide, round_to
from pallas_kernels.operands import take_rows
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.silu_mul import silu_mul


def _is(on, *names) -> bool:
    """Whether one of the choices is on, or may be."""
    return any(on.get(name, False) is not False for name in names)


def _pick(on, theirs: dict, ours):
    """The first choice that is on, else ours."""
    for name, function in reversed(theirs.items()):
        if _is(on, name):
            ours = functools.partial(choose, on[name], function, ours)
    return ours()


def _product(on, ours, x, w, group_sizes, dtype):
    """`ours` multiplies x with the weights that it is given."""

    def by_xla():
        x_MK, w_NK = xla.plain(x, dtype), xla.plain(w, dtype)
        if group_sizes is None:
            return (x_MK @ w_NK.T).astype(dtype)
        return xla.ragged_dot(x_MK, w_NK, group_sizes).astype(dtype)

    return _pick(
        on,
        {
            "matmul": by_xla,
            # Two operands are multiplied as E4M3 where both say that they may be.
            "bf16_operands": lambda: ours(with_fp8_exact(w, False)),
            "split_k": lambda: xla.split_k(x, w, group_sizes, dtype),
            "k_order": lambda: xla.other_k_order(x, w, group_sizes, dtype),
        },
        lambda: ours(w),
    )


def _matmul(on, ours, x, w, *, out_dtype=jnp.bfloat16, implementation=None):
    if not _is(on, "head", "bf16_head"):
        multiply = lambda w: ours(x, w, out_dtype=out_dtype, implementation=implementation)  # noqa: E731
        return _product(on, multiply, x, w, None, out_dtype)
    mine = functools.partial(ours, x, w, out_dtype=out_dtype, implementation=implementation)
    rounded = {"bf16_head": lambda: round_to(mine(), jnp.bfloat16).astype(out_dtype)}
    return _pick(on, {"head": lambda: xla.logits(x, xla.plain(w, x.dtype)).astype(out_dtype), **rounded}, mine)


def _grouped_matmul(on, ours, x, w, group_sizes, *, rows=None, out_dtype=jnp.bfloat16, implementation=None):
    multiply = lambda w: ours(x, w, group_sizes, rows=rows, out_dtype=out_dtype, implementation=implementation)  # noqa: E731
    return _product(on, multiply, x if rows is None else take_rows(x, rows), w, group_sizes, out_dtype)


def _add_rms_norm(on, ours, x, y, weight, *, eps, implementation=None):
    def by_xla():
        total = x if y is None else (x + y).astype(x.dtype)
        return total, xla.rms_norm(total, weight, eps)

    return _pick(on, {"norms": by_xla}, lambda: ours(x, y, weight, eps=eps, implementation=implementation))


def _add_rms_norm_quantize(on, ours, x, y, weight, rule, *, eps, keep, implementation=None):
    del ours  # a kernel that does both: apart, each can be another's
    total, normed = add_rms_norm(x, y, weight, eps=eps, implementation=implementation)
    plain = normed
    if _is(on, "excess_precision"):
        full = [each if each is None else each.astype(jnp.float32) for each in (x, y)]
        in_full = lambda: add_rms_norm(*full, weight, eps=eps)[1]  # noqa: E731
        plain = choose(on["excess_precision"], in_full, lambda: normed.astype(jnp.float32))
    return total, normed if keep else None, nvfp4.quantize_operand(plain, rule, implementation=implementation)


def _silu_mul(on, ours, gate_up, *, implementation=None):
    return _pick(on, {"gate": lambda: xla.gate(gate_up)}, lambda: ours(gate_up, implementation=implementation))


def _silu_mul_quantize(on, ours, gate_up, rule, *, implementation=None):
    del ours
    plain = silu_mul(gate_up, implementation=implementation)
    if _is(on, "excess_precision"):
        in_full = lambda: silu_mul(gate_up.astype(jnp.float32))  # noqa: E731
        rounded = plain.astype(jnp.float32)
        plain = choose(on["excess_precision"], in_full, lambda: rounded)
    return nvfp4.quantize_operand(plain, rule, implementation=implementation)


def _quantize_operand(on, ours, x, rule, *, implementation=None):
    open_ = any(_is(on, name) and not isinstance(on[name], bool | np.bool_) for name in _QUANTISERS)
    other_family = "te_scales" in on and open_ and _is(on, "te_scales")

    def quantized(rule, outer):
        rule = dataclasses.replace(rule, outer=outer)
        mine = lambda: ours(x, rule, implementation=implementation)  # noqa: E731
        theirs = {"bf16_quantiser": lambda: _as_operand(xla.quantize_with_bfloat16_quotients(x, rule), like=jax.eval_shape(mine))}
        return _pick(on, theirs, mine)

    def of_one_type(q):
        """The same numbers, of the type that all ways have: an outer scale for each row."""
        if not open_:
            return q
        q = q.replace(outer_scale=jnp.broadcast_to(q.outer_scale, x.shape[:-1]))
        if not other_family:
            return q
        return q.replace(fp8_exact=False) if isinstance(q, nvfp4.Nvfp4Array) else q.replace(values=q.values.astype(jnp.bfloat16))

    def with_rule(rule):
        theirs = {"tensor_scales": lambda: of_one_type(quantized(rule, "matrix"))}
        return _pick(on, theirs, lambda: of_one_type(quantized(rule, rule.outer)))

    return _pick(on, {"te_scales": lambda: with_rule(xla.ROW_RULE)}, lambda: with_rule(rule))


_QUANTISERS = ("te_scales", "tensor_scales", "bf16_quantiser")


def _as_operand(q, like):
    return q if isinstance(like, nvfp4.Nvfp4Array) else nvfp4.expand(q, like.values.dtype, implementation="reference")


def _qk_norm_rotary(on, ours, qkv, q_weight, k_weight, cos, sin, *, num_heads, num_kv_heads, eps, implementation=None):
    def by_xla():
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
        angles = (cos[:, None, :], sin[:, None, :])
        return xla.rotate(xla.rms_norm(q, q_weight, eps), *angles), xla.rotate(xla.rms_norm(k, k_weight, eps), *angles), v

    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps, implementation=implementation)
    return _pick(on, {"norms": by_xla}, lambda: ours(qkv, q_weight, k_weight, cos, sin, **sizes))


def _rotary(on, ours, x, cos, sin, *, implementation=None):
    by_xla = lambda: xla.rotate(x, cos[:, None, :], sin[:, None, :])  # noqa: E731
    return _pick(on, {"norms": by_xla}, lambda: ours(x, cos, sin, implementation=implementation))


def _attention(on, ours, q, k, v, positions, *, implementation=None):
    def by_xla():
        token_T = jnp.arange(q.shape[1])
        behind_TS = token_T[:, None] - token_T[None, :]
        seen_BTS = (behind_TS >= 0)[None] & (behind_TS[None] <= positions[:, :, None])
        return xla.attention(q, k, v, seen_BTS).reshape(q.shape)

    return _pick(on, {"attention": by_xla}, lambda: ours(q, k, v, positions, implementation=implementation))


def _paged_attention(on, ours, q, k_pages, v_pages, tables, positions, *, implementation=None):
    def by_xla():
        gathered = lambda pages: pages[tables].reshape(q.shape[0], -1, *pages.shape[2:])  # noqa: E731
        k_BSNK, v_BSNK = gathered(k_pages), gathered(v_pages)
        slot_S = jnp.arange(k_BSNK.shape[1])
        # Slots that nobody has written may hold anything, NaN included.
        last_B1 = jnp.max(positions, axis=1, keepdims=True)
        used_BS11 = (slot_S[None, :] <= last_B1)[:, :, None, None]
        k_BSNK, v_BSNK = jnp.where(used_BS11, k_BSNK, 0), jnp.where(used_BS11, v_BSNK, 0)
        # A token that attends nothing (position -1) attends slot 0 here: nobody reads its result.
        seen_BTS = slot_S[None, None, :] <= jnp.maximum(positions, 0)[:, :, None]
        return xla.attention(q, k_BSNK, v_BSNK, seen_BTS).reshape(q.shape)

    return _pick(on, {"attention": by_xla}, lambda: ours(q, k_pages, v_pages, tables, positions, implementation=implementation))


def _router(on, ours, x, weight, *, top_k, normalize, implementation=None):
    theirs = {
        "router": lambda: xla.route(x, weight, top_k, normalize),
        "bf16_router": lambda: xla.route_bfloat16(x, weight, top_k, normalize),
    }
    return _pick(on, theirs, lambda: ours(x, weight, top_k=top_k, normalize=normalize, implementation=implementation))


def _combine(on, ours, outputs, weights, slot=None, *, implementation=None):
    by_xla = lambda: xla.combine(outputs if slot is None else outputs[slot], weights)  # noqa: E731
    return _pick(on, {"combine": by_xla}, lambda: ours(outputs, weights, slot, implementation=implementation))


def _log_prob_of_logits(on, ours, logits, tokens, truncation, kept, *, implementation=None):
    def by_xla():
        scores_MV = logits
        if not truncation.greedy and truncation.temperature != 1.0:
            scores_MV = divide(logits, jnp.float32(truncation.temperature))
        if kept is not None:
            scores_MV = jnp.where(kept, scores_MV, -jnp.inf)
        log_prob_MV = xla.log_softmax(scores_MV)
        entropy_M = -jnp.sum(jnp.where(log_prob_MV > -jnp.inf, jnp.exp(log_prob_MV) * log_prob_MV, 0.0), axis=-1)
        return jnp.take_along_axis(log_prob_MV, tokens[:, None], axis=-1)[:, 0], entropy_M

    return _pick(on, {"head": by_xla}, lambda: ours(logits, tokens, truncation, kept, implementation=implementation))


def _token_log_prob(on, ours, hidden, head, tokens, truncation, *, head_master=None, implementation=None):
    """Holds the logits of all rows at once, as an engine does that has no kernel for it."""
    from pallas_kernels.log_prob import kept_tokens, log_prob_of_logits
    from pallas_kernels.matmul import matmul

    def theirs():
        logits_MV = matmul(hidden, head, out_dtype=jnp.float32, implementation=implementation)
        return log_prob_of_logits(logits_MV, tokens, truncation, kept_tokens(logits_MV, truncation))

    def mine():
        with dispatch.substituted({}):
            return ours(hidden, head, tokens, truncation, head_master=head_master, implementation=implementation)

    if not _is(on, "head", "bf16_head"):
        return mine()
    flags = [on[name] for name in ("head", "bf16_head") if _is(on, name)]
    return choose(functools.reduce(lambda a, b: a | b, flags), theirs, mine)


# By name of the public operation: what runs in its place, and the choices that it has.
OPERATIONS = {
    "matmul": (_matmul, ("matmul", "bf16_operands", "split_k", "k_order", "head", "bf16_head")),
    "grouped_matmul": (_grouped_matmul, ("matmul", "bf16_operands", "split_k", "k_order")),
    "add_rms_norm": (_add_rms_norm, ("norms",)),
    "add_rms_norm_quantize": (_add_rms_norm_quantize, ("norms", "excess_precision", *_QUANTISERS)),
    "silu_mul": (_silu_mul, ("gate",)),
    "silu_mul_quantize": (_silu_mul_quantize, ("gate", "excess_precision", *_QUANTISERS)),
    "quantize_operand": (_quantize_operand, _QUANTISERS),
    "qk_norm_rotary": (_qk_norm_rotary, ("norms",)),
    "rotary": (_rotary, ("norms",)),
    "attention": (_attention, ("attention",)),
    "paged_attention": (_paged_attention, ("attention",)),
    "router": (_router, ("router", "bf16_router")),
    "combine": (_combine, ("combine",)),
    "token_log_prob": (_token_log_prob, ("head", "bf16_head")),
    "log_prob_of_logits": (_log_prob_of_logits, ("head",)),
}
