"""Differences that no layer makes: other tokens, positions, conventions of log-probs, vocabularies, sampling masks, weights.

Each is recognised from what the traces hold, not from what their engines say about themselves: a temperature, for example, is
fitted to the log-probs, and named only where it explains them.
"""

import dataclasses

import numpy as np

from minite_jax.diagnostics.alignment import split_name
from minite_jax.diagnostics.compare import ABRUPT, Comparison
from minite_jax.diagnostics.trace_file import Trace

TOKENS, POSITIONS, ROTATION = "other token ids", "shifted positions", "positions of the rotation"
TEMPERATURE, RAW, DIVIDED = "temperature", "raw against processed log-probs", "log-prob divided by the temperature"
VOCABULARY, MASK, WEIGHTS = "vocabulary width", "sampling mask", "weights"
POSITIVE = "log-probs above 0"
# Beyond these rows a log-prob convention is not fitted: it is the same for all.
_MOST_ROWS = 512
_ABOVE = 1e-2  # nats, more than rounding puts a log-prob above 0
_EXACT = 2e-4  # nats: sums over a vocabulary in another order
_WEIGHTLESS = ("attention/q", "attention/k", "attention/heads", "mlp/gated", "moe/experts/gated", "attention/stream", "input")
_WEIGHTED = ("attention/qkv", "attention/o", "mlp/gate_up", "mlp/down", "moe/experts/gate_up", "moe/experts/down")


@dataclasses.dataclass(frozen=True)
class Cause:
    """A named difference.

    Attributes:
      kind: one of this module's names.
      text: one line with the evidence.
      first: whether it makes a comparison of tensors meaningless.
    """

    kind: str
    text: str
    first: bool = False


def row_causes(a: Trace, b: Trace) -> list[Cause]:
    """Other token ids and shifted positions."""
    rows_a, rows_b = _by_sequence(a), _by_sequence(b)
    found, different = [], []
    for s in sorted(set(rows_a) & set(rows_b)):
        ids_a, ids_b = a.rows.token_ids[rows_a[s]], b.rows.token_ids[rows_b[s]]
        at_a, at_b = a.rows.positions[rows_a[s]], b.rows.positions[rows_b[s]]
        n = min(len(ids_a), len(ids_b))
        if (ids_a[:n] == ids_b[:n]).all():
            shift = at_b[:n] - at_a[:n]
            if n and shift.any():
                found.append(Cause(POSITIONS, f"sequence {s}: the second trace's positions are {_signed(int(shift[0]))}", True))
            continue
        for front in range(1, min(n, 65)):
            more, less = (ids_b, ids_a) if (ids_b[front:n] == ids_a[: n - front]).all() else (ids_a, ids_b)
            if n - front >= 2 and (more[front:n] == less[: n - front]).all():
                which = "second" if more is ids_b else "first"
                text = f"sequence {s}: the {which} trace has {front} more tokens in front ({more[:front].tolist()[:4]})"
                found.append(Cause(POSITIONS, text, True))
                break
        else:
            different.append((s, int(np.argmax(ids_a[:n] != ids_b[:n])), int((ids_a[:n] != ids_b[:n]).sum()), n))
            place = different[0][1]
            if len(different) == 1:
                text = f"sequence {s}, token {place}: {ids_a[place]} in the first trace, {ids_b[place]} in the second"
                found.append(Cause(TOKENS, text, True))
    return found[:4]


def _by_sequence(trace: Trace) -> dict[int, np.ndarray]:
    """The rows of each sequence by position."""
    order = np.lexsort((trace.rows.positions, trace.rows.sequences))
    sequences = trace.rows.sequences[order]
    return {int(s): order[sequences == s] for s in np.unique(sequences)}


def _signed(shift: int) -> str:
    return f"{abs(shift)} {'larger' if shift > 0 else 'smaller'}"


def weight_causes(a: Trace, b: Trace, comparison: Comparison | None = None) -> list[Cause]:
    """Other weights: from fingerprints, or from the operations that differ."""
    one, two = a.header["model"], b.header["model"]
    if one.get("weights") and two.get("weights") and one.get("weights_of") == two.get("weights_of"):
        common = [name for name in one["weights"] if name in two["weights"]]
        other = [name for name in common if one["weights"][name] != two["weights"][name]]
        if len(other) > len(common) // 2:
            return [Cause(WEIGHTS, f"{len(other)} of {len(common)} weights differ: stale weights, or another checkpoint")]
        if other:
            return [Cause(WEIGHTS, f"{len(other)} of {len(common)} weights differ: {', '.join(other[:4])}")]
        return []
    if comparison is None:
        return []
    judged = [(split_name(each.name)[1], each.excess) for each in comparison.differences if each.excess is not None]
    weighted = [excess for local, excess in judged if local in _WEIGHTED]
    plain = [excess for local, excess in judged if local in _WEIGHTLESS]
    if len(weighted) >= 6 and np.median(weighted) > ABRUPT and plain and np.median(plain) < ABRUPT:
        share = f"{sum(each > ABRUPT for each in weighted)} of {len(weighted)}"
        return [Cause(WEIGHTS, f"{share} products with weights are abrupt, and what has none is not: stale or other weights")]
    return []


def rotation_causes(a: Trace, b: Trace, comparison: Comparison) -> list[Cause]:
    """Queries that were turned by other angles than their positions say."""
    judged = {each.name: each for each in comparison.differences}
    for name, each in judged.items():
        layer, local = split_name(name)
        if local != "attention/q" or not each.excess or each.excess <= ABRUPT:
            continue
        (query_a, rows_a), (query_b, rows_b) = a.read(name), b.read(name)
        theta = a.header["model"].get("config", {}).get("rope_theta")
        if not isinstance(theta, int | float) or query_a.shape != query_b.shape or query_a.ndim != 3 or (rows_a != rows_b).any():
            return []
        half = query_a.shape[-1] // 2
        one, two = (x[..., :half].astype(np.float64) + 1j * x[..., half:].astype(np.float64) for x in (query_a, query_b))
        one, two = one[:_MOST_ROWS], two[:_MOST_ROWS]
        shifts = np.arange(-128, 129)
        angle_SK = shifts[:, None] * theta ** (-np.arange(half) / half)
        error_SM = np.array([np.abs(one * np.exp(1j * angle) - two).sum((1, 2)) for angle in angle_SK])
        best = shifts[np.argmin(error_SM, axis=0)]
        unturned = error_SM[len(shifts) // 2]
        explained = error_SM.min(axis=0) < 0.2 * unturned
        if explained[best != 0].all() and (best != 0).any():
            values, counts = np.unique(best[best != 0], return_counts=True)
            shift = _signed(int(values[counts.argmax()]))
            return [Cause(ROTATION, f"{name}: {int(counts.sum())} of {len(best)} tokens are turned as at positions {shift}")]
        return []
    return []


def log_prob_causes(a: Trace, b: Trace) -> list[Cause]:
    """Another convention of log-probs. Needs log-probs in both traces, and logits in one for all but their sign."""
    if "final/log_prob" not in a or "final/log_prob" not in b:
        return []
    found = [cause for trace, which in ((a, "first"), (b, "second")) for cause in _positive(trace, which)]
    return found or _convention(a, b, "second") or _convention(b, a, "first")


def _positive(trace: Trace, which: str) -> list[Cause]:
    """Numbers that no log-prob can have."""
    values, rows = trace.read("final/log_prob")
    above = np.flatnonzero(np.asarray(values, np.float64).reshape(-1) > _ABOVE)
    if not len(above):
        return []
    row = rows[above[0]]
    place = f"first at sequence {trace.rows.sequences[row]}, position {trace.rows.positions[row]}"
    how = "negated ones, or" if len(above) > len(rows) // 2 else "some are"
    text = f"{len(above)} of {len(rows)} of the {which} trace, {place}: {how} no logarithms of probabilities"
    return [Cause(POSITIVE, text)]


def width_causes(a: Trace, b: Trace) -> list[Cause]:
    """Logits of unequal width."""
    if "final/logits" in a and "final/logits" in b:
        one, two = (trace.header["tensors"]["final/logits"]["shape"][-1] for trace in (a, b))
        if one != two:
            common = f"the common {min(one, two)} are compared"
            return [Cause(VOCABULARY, f"{one} logits in the first trace, {two} in the second: {common}")]
    return []


def _convention(a: Trace, b: Trace, which: str) -> list[Cause]:
    """How b's log-probs come from logits under another convention than a's."""
    source = b if "final/logits" in b else a
    if "final/logits" not in source:
        return []
    ours, theirs = ({k: float(v) for k, v in _by_key(trace, "final/log_prob")} for trace in (a, b))
    ids = {key: int(i) for key, i in zip(_all_keys(a), a.rows.token_ids, strict=True)}
    logits, rows = source.read("final/logits")
    keys = [_all_keys(source)[row] for row in rows]
    logits = np.asarray(logits).reshape(len(rows), -1)
    width = logits.shape[1]
    usable = [i for i, k in enumerate(keys) if k in ours and k in theirs and 0 <= ids.get((k[0], k[1] + 1), -1) < width]
    usable = usable[:: max(1, len(usable) // _MOST_ROWS)]
    if len(usable) < 4:
        return []
    logits = logits[usable].astype(np.float64)
    token = np.array([ids[(keys[i][0], keys[i][1] + 1)] for i in usable])
    lp_a, lp_b = (np.array([which_one[keys[i]] for i in usable]) for which_one in (ours, theirs))
    if not (np.isfinite(lp_a).all() and np.isfinite(lp_b).all() and np.isfinite(logits).all()):
        return []
    temperature = a.header["sampling"].get("temperature") or 1.0
    mine = logits[np.arange(len(token)), token]
    score = lambda t: mine / t - _lse(logits / t)  # noqa: E731
    miss = lambda expected: float(np.median(np.abs(expected - lp_b)))  # noqa: E731
    if miss(lp_a) <= _EXACT or (source is b and miss(score(temperature)) <= _EXACT and not _truncated(a)):
        return []
    worst = miss(lp_a)
    # An explanation leaves next to nothing, though the two engines' logits differ by roundings.
    good = lambda expected: miss(expected) <= max(_EXACT, 0.05 * worst)  # noqa: E731
    if temperature != 1.0 and good(score(1.0)):
        return [Cause(RAW, f"the {which} trace's log-probs are raw (temperature 1); the other's are at {temperature:g}")]
    if _truncated(a) and good(score(temperature)):
        return [Cause(RAW, f"the {which} trace's log-probs are of all tokens; the other's of those that top-k or top-p keep")]
    fitted = _fit_temperature(score, miss)
    if good(score(fitted)) and abs(fitted / temperature - 1) > 1e-3:
        text = f"the {which} trace's log-probs are at temperature {fitted:.4g}, the other's at {temperature:g}"
        return [Cause(TEMPERATURE, text)]
    ratio = float(np.median(lp_b / np.where(score(1.0) == 0, -1.0, score(1.0))))
    if ratio > 0 and abs(ratio - 1) > 1e-3 and good(score(1.0) * ratio):
        text = f"the {which} trace's log-probs are raw ones times {ratio:.4g}: the logits should be divided instead"
        return [Cause(DIVIDED, text)]
    needed = mine / temperature - lp_b  # the logarithm of the sum that b divided by
    ratio_logits = logits / temperature
    prefix = np.logaddexp.accumulate(ratio_logits, axis=1)
    columns = np.array([np.searchsorted(row, x - 1e-6) + 1 for row, x in zip(prefix, needed, strict=True)])
    columns = int(np.median(np.clip(columns, 1, width)))
    if columns < width and good(mine / temperature - prefix[:, columns - 1]):
        return [Cause(VOCABULARY, f"the {which} trace's log-probs are normalised over {columns} tokens, the logits have {width}")]
    return _mask_cause(ratio_logits, needed, miss, lp_b, mine / temperature, which, good)


def _mask_cause(logits, needed, miss, lp_b, mine, which, good) -> list[Cause]:
    falling = -np.sort(-logits, axis=1)
    sums = np.logaddexp.accumulate(falling, axis=1)
    kept = np.array([np.argmin(np.abs(row - x)) + 1 for row, x in zip(sums, needed, strict=True)])
    if not good(mine - sums[np.arange(len(kept)), kept - 1]) or (kept == logits.shape[1]).all():
        return []
    mass = np.exp(sums - sums[:, -1:])
    least = np.array([0.0 if n == 1 else mass[i, n - 2] for i, n in enumerate(kept)])
    most = mass[np.arange(len(kept)), kept - 1]
    if (kept == np.median(kept)).mean() > 0.9:
        rule = f"top_k = {int(np.median(kept))}"
    elif np.quantile(least, 0.95) <= np.quantile(most, 0.05) + 1e-3:
        rule = f"top_p about {float(np.quantile(most, 0.05)):.3g}"
    else:
        rule = f"a mask of another rule: {int(kept.min())} to {int(kept.max())} tokens kept"
    return [Cause(MASK, f"the {which} trace's log-probs are those under {rule}")]


def _truncated(trace: Trace) -> bool:
    sampling = trace.header["sampling"]
    return (sampling.get("top_k") or 0) > 0 or (sampling.get("top_p") or 1.0) < 1.0


def _fit_temperature(score, miss) -> float:
    """The temperature whose log-probs miss least: a grid, then finer ones around the best."""
    low, high = np.log(0.05), np.log(20.0)
    for _ in range(4):
        grid = np.linspace(low, high, 41)
        best = int(np.argmin([miss(score(np.exp(t))) for t in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return float(np.exp((low + high) / 2))


def _lse(x: np.ndarray) -> np.ndarray:
    top = x.max(1)
    return top + np.log(np.exp(x - top[:, None]).sum(1))


def _all_keys(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.rows.sequences.tolist(), trace.rows.positions.tolist(), strict=True))


def _by_key(trace: Trace, name: str):
    values, rows = trace.read(name)
    keys = _all_keys(trace)
    return [(keys[row], value) for row, value in zip(rows, np.asarray(values).reshape(-1), strict=True)]
