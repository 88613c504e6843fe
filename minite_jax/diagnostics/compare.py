"""Where two engines part: every tensor compared, the first difference, and the first that its inputs do not explain.

    result = compare(open_trace("ours"), open_trace("theirs"))
    result.location, result.causes

**First difference** is exact: the first tensor, in execution order, with other bits. Between two engines that are meant to be
equal that is the place. Between engines that round differently everything differs a little, so there is a second question.

**First abrupt difference.** Each tensor's error is set against what its inputs' errors explain. Let e(x) be a row's relative
error |b - a| / |a|, u the unit roundoff of the coarser type.

* A matmul, norm, gate or rotation passes relative errors on about as they are, and rounds: expected = max e(inputs) + 2 u.
* A sum passes absolute errors on: |d1| + |d2| + 2 u (|x1| + |x2| + |sum|).
* Rounding to FP4 turns an error into flips of codes and scales by a whole step: expected = e + sqrt(e) + 2 u.
* Attention reads the rows before: their largest error counts.
* Router probabilities: an exponential's relative error is the logit's absolute one: 4 (e + 2 u), with bfloat16's u.

The excess of a row is error / expected; of a tensor, its largest row's. What a trained model amplifies, it amplifies in every
layer, so excess is divided by the median excess of the same operation in the other layers, where there are at least three (never
by less than 1). The first tensor whose excess is above `ABRUPT` is abrupt.

Router: another expert is explained where the engine's own probabilities say so. Tokens that went to other experts are left out of
what follows in that layer. `experiments/fault_study.py` measures how often all this is right.
"""

import dataclasses

import numpy as np

from minite_jax.diagnostics.alignment import MOST_EXPERTS, QUANTIZED, Alignment, Pair, split_name, unit_roundoff
from minite_jax.diagnostics.differences import Difference, flat, measure
from minite_jax.diagnostics.trace_file import Trace, TraceError
from minite_jax.model.taps import PARTS

ABRUPT = 5.0
_ROUNDINGS = 2.0
_BLOCK, _ROUNDING = 6, 0.25
_BFLOAT16 = 2.0**-8  # some engines compute router logits in it
_TIE = 1e-5  # of a probability: two engines' last bits
# What an operation reads, in its layer; "<" is the layer before. Several stand for one another: the first that was recorded
# counts, and those before it are operations that nobody recorded (of a layer before: what the other kind of layer has).
_IN_EXPERTS = (
    "moe/experts/down", "moe/experts/gated.quantized", "moe/experts/gated", "moe/experts/gate_up",
    "moe/norm.quantized", "moe/norm",
)  # fmt: skip
_INPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention/norm": (("input",),),
    "attention/qkv": (("attention/norm.quantized", "attention/norm", "input"),),
    "attention/q_norm": (("attention/qkv",),),
    "attention/k_norm": (("attention/qkv",),),
    "attention/q": (("attention/q_norm", "attention/qkv"),),
    "attention/k": (("attention/k_norm", "attention/qkv"),),
    "attention/heads": (("attention/q", "attention/qkv"), ("attention/k", "attention/qkv"), ("attention/qkv",)),
    "attention/o": (("attention/heads.quantized", "attention/heads", "attention/qkv"),),
    "attention/stream": (("input",), ("attention/o",)),
    "mlp/norm": (("attention/stream",),),
    "mlp/gate_up": (("mlp/norm.quantized", "mlp/norm", "attention/stream"),),
    "mlp/gated": (("mlp/gate_up", "mlp/norm.quantized", "mlp/norm"),),
    "mlp/down": (("mlp/gated.quantized", "mlp/gated", "mlp/gate_up", "mlp/norm.quantized", "mlp/norm"),),
    "moe/norm": (("attention/stream",),),
    "moe/router/logits": (("moe/norm",),),
    "moe/router/probs": (("moe/norm",),),
    "moe/router/weights": (("moe/router/probs",), ("moe/norm",)),
    "moe/experts/gate_up": (("moe/norm.quantized", "moe/norm"),),
    "moe/experts/gated": (("moe/experts/gate_up", "moe/norm.quantized", "moe/norm"),),
    "moe/experts/down": (_IN_EXPERTS[1:],),
    "moe/out": (_IN_EXPERTS, ("moe/router/weights",)),
    "input": (("</attention/stream",), ("</moe/out", "</mlp/down")),
    "final/stream": (("</attention/stream",), ("</moe/out", "</mlp/down")),
    "final/norm": (("final/stream", "</attention/stream"),),
    "final/logits": (("final/norm",),),
}  # fmt: skip
_SUMS = ("attention/stream", "input", "final/stream")
_SILENT = (*PARTS, "final/log_prob", "final/entropy")  # judged otherwise


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is known of two traces.

    Attributes:
      differences: of every common tensor, in execution order.
      first: the first difference, None if all bits are equal.
      abrupt: the first abrupt one, or None.
      location: where to look: `first` where the engines have equal bits before it, else `abrupt`.
      notes: what was not compared, and why.
    """

    differences: list[Difference]
    first: Difference | None
    abrupt: Difference | None
    location: Difference | None
    notes: list[str]

    @property
    def only_log_probs(self) -> bool:
        """Whether nothing else was compared, so that no place can be found."""
        return all(each.name == "final/log_prob" for each in self.differences)


class _Errors:
    """Errors of the rows of the tensors that were read.

    A row's code is an integer that says its sequence, position and, for an assignment, its expert. `quantized`: names of the
    operands that one of the engines rounds to FP4.
    """

    def __init__(self, quantized: set[str]):
        self._tensors: dict[str, tuple[np.ndarray, ...]] = {}
        self.last_layer = -1
        self.quantized = quantized

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def add(self, pair: Pair) -> None:
        x, y = (flat(value).astype(np.float64) for value in (pair.a, pair.b))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            gap, size = np.sqrt(((y - x) ** 2).sum(1)), np.sqrt((x * x).sum(1))
            gap = np.where(np.isfinite(gap), gap, np.inf)
            relative = np.where(gap == 0, 0.0, gap / size)
        codes = _codes(pair)
        order = np.argsort(codes, kind="stable")
        self._tensors[pair.name] = tuple(each[order] for each in (codes, relative, gap, size))
        self.last_layer = max(self.last_layer, split_name(pair.name)[0])

    def of(self, name: str, codes: np.ndarray) -> np.ndarray:
        """[3, n]: relative error, absolute error and size of rows; of a token, those of its expert with the largest error; of an
        assignment, the token's where the tensor has one row a token. NaN where there is none.
        """
        known, *values = self._tensors[name]
        if not len(known):
            return np.full((3, len(codes)), np.nan)
        by_expert, wants_expert = known[0] % _EXPERT != 0, len(codes) and codes[0] % _EXPERT != 0
        if wants_expert and not by_expert:
            codes = codes - codes % _EXPERT
        if by_expert and not wants_expert:
            tokens = known - known % _EXPERT
            order = np.lexsort((-values[0], tokens))
            known, first = np.unique(tokens[order], return_index=True)
            values = [value[order][first] for value in values]
        place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
        there = known[place] == codes
        return np.array([np.where(there, value[place], np.nan) for value in values])


_EXPERT = MOST_EXPERTS + 1


def _codes(pair: Pair) -> np.ndarray:
    sequence, position = pair.rows[:, 0].astype(np.int64), pair.rows[:, 1].astype(np.int64)
    return (sequence << 40) + position * _EXPERT + (0 if pair.experts is None else pair.experts.astype(np.int64) + 1)


def compare(a: Trace, b: Trace) -> Comparison:
    """Compares two traces tensor by tensor; only one tensor of each is in memory at once.

    Args:
      a: the reference, whose order of tensors counts.
      b: the other.

    Returns:
      `Comparison`. Other token ids, vocabularies, log-probs and weights are looked at by `minite_jax.diagnostics.causes`.

    Raises:
      TraceError: see `Alignment`.
    """
    alignment = Alignment(a, b)
    quantized = {name.removesuffix(".codes") for trace in (a, b) for name in trace.names if name.endswith(".codes")}
    errors, found, ratios = _Errors(quantized), [], {}
    moved: dict[int, np.ndarray] = {}  # by layer, codes of the tokens that went to other experts
    for name in alignment.names:
        pair = alignment.pair(name)
        if pair is None:
            alignment.notes.append(f"{name}: the two traces have no row of it in common")
            continue
        layer, local = split_name(name)
        if not name.endswith(QUANTIZED):
            found.append(measure(pair))
        if local == "moe/router/experts":
            moved[layer] = _codes(pair)[(np.sort(pair.a, axis=1) != np.sort(pair.b, axis=1)).any(axis=1)]
            ratios[name] = (_unexplained_choices(alignment, layer, pair), None)
            continue
        numbers = [not np.issubdtype(value.dtype, np.integer) for value in (pair.a, pair.b)]
        if numbers[0] != numbers[1]:
            alignment.notes.append(f"{name} is {pair.a.dtype} in the first trace, {pair.b.dtype} in the second")
        if all(numbers):
            errors.add(pair)
        if all(numbers) and not local.endswith(_SILENT):
            ratios[name] = (_excess(pair, errors, moved), pair.experts)
    if not found:
        raise TraceError(f"{a.where} and {b.where} have no row of any tensor in common, of {', '.join(alignment.names[:4])}")
    scores = {name: float(rows.max(initial=0.0)) for name, (rows, _) in ratios.items()}
    usual = {name: _usual(name, scores) for name in scores}
    judged = []
    for each in found:
        names = [each.name, each.name + QUANTIZED] if each.name + QUANTIZED in scores else [each.name]
        known = [name for name in names if name in scores]
        if known:
            excess = max(scores[name] / usual[name] for name in known)
            rows, experts = ratios[known[0]]
            hit = () if experts is None else np.unique(experts[rows > ABRUPT * usual[known[0]]]).tolist()
            each = dataclasses.replace(each, excess=excess, experts=tuple(hit))
        judged.append(each)
    first = next((each for each in judged if not each.equal), None)
    abrupt = next((each for each in judged if each.excess is not None and each.excess > ABRUPT), None)
    location = first if first is not None and _equal_before(judged, first) else abrupt
    notes = list(alignment.notes)
    for each in judged:
        if split_name(each.name)[1] == "moe/router/experts" and not each.equal:
            where = f"first at sequence {each.first[0]}, position {each.first[1]}"
            notes.append(f"{each.name}: {round(each.differing * each.rows)} of {each.rows} tokens went to other experts, {where}")
    for where, names in (("first", alignment.only_in_a), ("second", alignment.only_in_b)):
        if names:
            notes.append(f"{len(names)} tensors only in the {where} trace, e.g. {names[0]}")
    return Comparison(judged, first, abrupt, location, notes)


def first_difference(a: Trace, b: Trace) -> Difference | None:
    """The first tensor whose numbers have other bits, without a look at those behind it; None if there is none.

    Of a quantised operand the numbers count that codes and scales stand for: engines may scale otherwise and mean the same.

    Args, Raises: see `compare`.
    """
    alignment = Alignment(a, b)
    for name in alignment.names:
        if name.endswith(PARTS):
            continue
        pair = alignment.pair(name)
        if pair is not None and not (difference := measure(pair)).equal:
            return difference
    return None


def _equal_before(judged: list[Difference], first: Difference) -> bool:
    """Whether the engines compute the same bits where the first difference is not: the same operation in an earlier layer, or a
    whole block of operations before a difference that is more than a few roundings.
    """
    before = judged[: judged.index(first)]
    local = split_name(first.name)[1]
    return any(split_name(each.name)[1] == local for each in before) or (
        len(before) >= _BLOCK and (first.excess is None or first.excess >= _ROUNDING)
    )


def _usual(name: str, scores: dict[str, float]) -> float:
    """The median excess of the same operation in the other layers, at least 1."""
    layer, local = split_name(name)
    others = [score for each, score in scores.items() if split_name(each)[1] == local and split_name(each)[0] != layer]
    return max(1.0, float(np.median(others))) if len(others) >= 3 else 1.0


def _unexplained_choices(alignment: Alignment, layer: int, pair: Pair) -> np.ndarray:
    """[n] infinity for tokens whose experts are not the most probable ones of the same engine, else 0."""
    name = f"layer.{layer}/moe/router/probs"
    probs = alignment.pair(name) if name in alignment.names else None
    wrong = np.zeros(len(pair.a), bool)
    if probs is None or len(probs.a) != len(pair.a):
        return wrong.astype(float)
    for experts, prob in ((pair.a, probs.a), (pair.b, probs.b)):
        rest, experts = prob.astype(np.float64), experts.astype(np.int64)
        chosen = np.take_along_axis(rest, experts, axis=1)
        np.put_along_axis(rest, experts, -np.inf, axis=1)
        wrong |= chosen.min(1) < rest.max(1) * (1 - _TIE)
    return np.where(wrong, np.inf, 0.0)


def _excess(pair: Pair, errors: _Errors, moved: dict[int, np.ndarray]) -> np.ndarray:
    """[n] error of each row over what its inputs explain."""
    layer, local = split_name(pair.name)
    quantized, codes = local.endswith(QUANTIZED), _codes(pair)
    groups = ((local.removesuffix(QUANTIZED),),) if quantized else _INPUTS.get(local, ())
    names = [_recorded(layer, group, errors) for group in groups]
    u = _ROUNDINGS * max(unit_roundoff(pair.a.dtype), unit_roundoff(pair.b.dtype))
    if local == "input" and layer == 0:
        names = ["embed" if "embed" in errors else None]
    inputs = [errors.of(name, codes) for name in names if name]
    for name, group in zip(names, groups, strict=False):
        between = _between(name, group)
        u *= 1 + sum(not each.endswith(QUANTIZED) for each in between)  # what nobody recorded rounds too
        quantized |= any(f"layer.{layer}/{each.removesuffix(QUANTIZED)}" in errors.quantized for each in between)
    error, gap, size = errors.of(pair.name, codes)
    if local in _SUMS and len(inputs) == 2:
        allowed = sum(each[1] + u * each[2] for each in inputs) + u * size
        error, expected = gap, np.where(np.isnan(allowed), np.inf, allowed)
    else:
        source = np.nan_to_num(np.max([each[0] for each in inputs], axis=0)) if inputs else np.zeros(len(codes))
        if local == "attention/heads":
            source = _largest_so_far(source, pair.rows)
        expected = source + (np.sqrt(source) if quantized else 0.0) + u
        if local in ("moe/router/probs", "moe/router/weights"):  # an exponential: its relative error is the logit's absolute one
            expected = 4 * (source + _BFLOAT16)
    with np.errstate(invalid="ignore"):
        excess = np.where((error == 0) | np.isinf(expected), 0.0, error / expected)
    return np.where(np.isin(codes, moved.get(layer, [])), 0.0, excess) if local == "moe/out" else excess


def _largest_so_far(source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The largest of the rows of the same sequence up to each row's position."""
    result, order = np.empty_like(source), np.lexsort((rows[:, 1], rows[:, 0]))
    for part in np.split(order, np.flatnonzero(np.diff(rows[order, 0])) + 1):
        result[part] = np.maximum.accumulate(source[part])
    return result


def _between(name: str | None, group: tuple[str, ...]) -> tuple[str, ...]:
    """The alternatives before the one that was recorded, where they are operations of the same layer."""
    local = split_name(name)[1] if name else None
    return group[: group.index(local)] if local in group else ()


def _recorded(layer: int, group: tuple[str, ...], errors: _Errors) -> str | None:
    """The first of alternative inputs that was recorded."""
    for local in group:
        if local.startswith("final/"):
            name = local
        elif local.startswith("<"):
            name = f"layer.{layer - 1 if layer >= 0 else errors.last_layer}/{local[2:]}"
        else:
            name = f"layer.{layer}/{local}"
        if name in errors:
            return name
    return None
