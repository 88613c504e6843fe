"""What the metrics of single updates come to together."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from minite_jax.metrics import names


class RunGap(NamedTuple):
    """The gap between sampler and learner over some updates.

    Attributes:
      updates: how many.
      tokens: that were compared.
      largest: difference of any token's log-probs, nats; NaN if one update's is.
      equal_bits: share of the tokens whose log-probs have equal bits; NaN if there are none, or if one update's is.
    """

    updates: int
    tokens: int
    largest: float
    equal_bits: float


def run_gap(rows: Iterable[Mapping[str, Any]]) -> RunGap | None:
    """The gap over the updates among rows of `read_metrics`: those that compared the two. None where there is no such row."""
    updates = [row for row in rows if names.GAP_MAX in row]
    if not updates:
        return None
    # NumPy keeps a NaN, which Python's `max` orders by chance.
    largest, exact, tokens = (
        np.asarray([row[name] for row in updates], np.float64)
        for name in (names.GAP_MAX, names.GAP_EXACT_FRACTION, names.TOKENS_COMPARED)
    )
    total = int(tokens.sum())
    return RunGap(len(updates), total, float(largest.max()), float((exact * tokens).sum() / total) if total else float("nan"))
