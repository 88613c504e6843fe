"""How far one tensor of two engines is apart."""

import dataclasses
import math

import numpy as np

from minite_jax.diagnostics.alignment import Pair, ordered_integers, split_name, unit_roundoff


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor of both engines.

    Attributes:
      name: of the tensor.
      rows: how many were compared.
      equal: whether all bits are equal.
      differing: share of the numbers that differ; for codes and scales, those that flipped; for experts, tokens with another set.
      max_abs, mean_abs: of the absolute difference.
      max_ulp: most numbers of the coarser type between two values, None for integers.
      relative: |b - a| / |a| over all numbers.
      cosine: of the two as vectors; 1 where both are 0.
      first: (sequence, position) of the first row that differs, or None.
      not_finite: "" or a line about NaN and infinity, with the first place.
      excess: error over what the inputs explain, None where that is not known.
      experts: the experts whose rows have excess, of an expert's tensor.
    """

    name: str
    rows: int
    equal: bool
    differing: float
    max_abs: float
    mean_abs: float
    max_ulp: int | None
    relative: float
    cosine: float
    first: tuple[int, int] | None
    not_finite: str = ""
    excess: float | None = None
    experts: tuple[int, ...] = ()


def measure(pair: Pair) -> Difference:
    """Compares one tensor, see `Difference`. NaN where the same NaN is on both sides counts as different."""
    a, b = flat(pair.a), flat(pair.b)
    local = split_name(pair.name)[1]
    if local == "moe/router/experts":
        a, b = np.sort(a, axis=1), np.sort(b, axis=1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and infinity are said, not warned of
        return _measured(pair, local, a, b)


def flat(x: np.ndarray) -> np.ndarray:
    """[n, m] of rows of any shape."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _measured(pair: Pair, local: str, a: np.ndarray, b: np.ndarray) -> Difference:
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    unequal = (x != y) | ~finite
    bad = unequal.any(axis=1)
    gap = np.where(finite, np.abs(y - x), np.inf) if not finite.all() else np.abs(y - x)
    norm, other = np.sqrt((x * x).sum()), np.sqrt((y * y).sum())
    cosine = 1.0 if not unequal.any() else float((x * y).sum() / (norm * other)) if norm and other else 0.0
    return Difference(
        name=pair.name,
        rows=len(a),
        equal=not unequal.any() and (a.dtype != b.dtype or a.tobytes() == b.tobytes() or not (a != b).any()),
        differing=float(bad.mean() if local == "moe/router/experts" else unequal.mean()) if unequal.size else 0.0,
        max_abs=float(gap.max(initial=0.0)),
        mean_abs=float(gap.mean()) if gap.size else 0.0,
        max_ulp=_ulps(a, b, finite),
        relative=float(np.sqrt((gap * gap).sum()) / norm) if norm else float(bool(unequal.any())),
        cosine=cosine,
        first=tuple(pair.rows[np.argmax(bad)].tolist()) if bad.any() else None,
        not_finite=_not_finite(pair, x, y),
    )


def _ulps(a: np.ndarray, b: np.ndarray, finite: np.ndarray) -> int | None:
    if not unit_roundoff(a.dtype) or not unit_roundoff(b.dtype):
        return None
    dtype = max(a.dtype, b.dtype, key=unit_roundoff)
    steps = np.abs(ordered_integers(a.astype(dtype)) - ordered_integers(b.astype(dtype)))
    return int(np.where(finite, steps, 0).max(initial=0))


def _not_finite(pair: Pair, x: np.ndarray, y: np.ndarray) -> str:
    for engine, values in (("first", x), ("second", y)):
        bad = ~np.isfinite(values)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            sequence, position = pair.rows[row]
            what = "NaN" if np.isnan(values[row, column]) else "infinity"
            return f"{int(bad.sum())} not finite in the {engine} trace, first {what} at sequence {sequence}, position {position}"
    return ""
