"""The pictures of a diagnosis as vector graphics, each with what it shows in words."""

import dataclasses
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from minite_jax.diagnostics.alignment import Alignment, split_name
from minite_jax.diagnostics.differences import Difference
from minite_jax.diagnostics.gap import gap_metrics
from minite_jax.diagnostics.trace_file import Trace
from minite_jax.errors import UserError
from minite_jax.metrics.plots import COLOURS, new_figure

LOG_PROB = "final/log_prob"
_CODES = ".codes"
_INCHES = (5.2, 3.3)  # so that a picture's letters are legible when the page is 360 pixels wide
_SMALLEST = 1e-9  # relative error that the pictures' logarithmic axes begin with; equal bits lie on it
_gap = jax.jit(gap_metrics)


ALONE, CHOSEN = "alone", "one after the other"
EVERYTHING = "everything"


@dataclasses.dataclass(frozen=True)
class Share:
    """A bar of the attribution.

    Attributes:
      name: the operation, or group of operations, that was swapped.
      share: of the gap that the swap takes away; 1: all of it, below 0: the gap grows.
      low, high: where the share lies for other choices of sequences (a confidence interval), or None.
      question: `ALONE`, or `CHOSEN` where the bars before it are swapped too; the last of those may be `EVERYTHING`.
    """

    name: str
    share: float
    low: float | None = None
    high: float | None = None
    question: str = ALONE


def shares_of(results: Mapping[str, Any], where: str = "the table") -> list[Share]:
    """The bars of a table that `experiments.attribution` made (`minite_jax.metrics.results`).

    Raises:
      UserError: it is another table.
    """
    rows = [row for row in results["rows"] if {"question", "swapped", "share", "low", "high"} <= row.keys()]
    shown = [row for row in rows if row["question"] in (ALONE, CHOSEN) or row["swapped"] == EVERYTHING]
    numbers = [row[key] for row in shown for key in ("share", "low", "high")]
    if not shown or not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"{where} is no table of shares: give one that experiments.attribution wrote")
    found = []
    for row in sorted(shown, key=lambda row: row["swapped"] == EVERYTHING):
        question = CHOSEN if row["swapped"] == EVERYTHING else row["question"]
        found.append(Share(row["swapped"], *(row[key] / 100 for key in ("share", "low", "high")), question))
    return found


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """The log-probs of both traces, a row for each sequence.

    Attributes:
      first, second: [B, T] float32; 0 where there is none.
      mask: [B, T] bool, where both have one.
      tokens: [B, T] int32, the token that the log-prob belongs to (the one after the row's), -1 where it is not known.
      sequences: [B] int32, their numbers.
    """

    first: np.ndarray
    second: np.ndarray
    mask: np.ndarray
    tokens: np.ndarray
    sequences: np.ndarray

    def metrics(self) -> dict[str, float]:
        """`gap_metrics` of the first minus the second."""
        return {name: float(x) for name, x in _gap(self.first, self.second, self.mask).items()}


def log_probs_of(a: Trace, b: Trace) -> LogProbs | None:
    """The log-probs that two traces have in common, or None."""
    alignment = Alignment(a, b)
    pair = alignment.pair(LOG_PROB) if LOG_PROB in alignment.names else None
    if pair is None or not len(pair.rows):
        return None
    sequences, row = np.unique(pair.rows[:, 0], return_inverse=True)
    column, width = pair.rows[:, 1], int(pair.rows[:, 1].max()) + 1
    shape = (len(sequences), width)
    first, second, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, bool)
    first[row, column], second[row, column], mask[row, column] = pair.a.reshape(-1), pair.b.reshape(-1), True
    tokens = np.full(shape, -1, np.int32)
    number = {int(s): i for i, s in enumerate(sequences)}
    for token, position, sequence in zip(a.rows.token_ids, a.rows.positions, a.rows.sequences, strict=True):
        if int(sequence) in number and 1 <= position <= width:
            tokens[number[int(sequence)], position - 1] = token
    return LogProbs(first, second, mask, tokens, sequences)


def _figure(title: str, meaning: str, draw: Callable[[Any, Any], None], height: float = _INCHES[1]) -> str:
    with new_figure(figure_figsize=(_INCHES[0], height), svg_fonttype="none", svg_hashsalt=title) as figure:
        draw(figure, figure.add_subplot())
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
    return f"<figure><figcaption><b>{html.escape(title)}</b><br>{html.escape(meaning)}</figcaption>{svg}</figure>"


def error_by_layer(differences: Sequence[Difference]) -> str:
    """Relative error of each operation's output against the layer."""
    operations: dict[str, list[tuple[int, float]]] = {}
    for each in differences:
        layer, local = split_name(each.name)
        if layer >= 0 and "." not in local and local != "moe/router/experts":
            operations.setdefault(local, []).append((layer, each.relative))
    if not operations:
        return ""
    # The largest are named; what is left stands behind them in grey.
    order = sorted(operations, key=lambda name: -max(error for _, error in operations[name]))

    def draw(figure, axes):
        for i, name in reversed(list(enumerate(order))):
            layers, errors = zip(*operations[name], strict=True)
            colour = f"C{i}" if i < 6 else "#c8c8c8"
            label = name if i < 6 else None
            axes.plot(layers, np.maximum(errors, _SMALLEST), ".-", color=colour, label=label, linewidth=1.2, markersize=4)
        axes.set_yscale("log")
        axes.set_ylim(_SMALLEST / 2, None)
        axes.axhline(_SMALLEST, color="#888888", linewidth=0.6)
        # Beside the axis, in the place of a number: inside, lines that begin or end there would cross it.
        powers = [round(np.log10(tick)) for tick in axes.get_yticks() if 5 * _SMALLEST < tick <= axes.get_ylim()[1]]
        ticks = {_SMALLEST: "equal bits"} | {10.0**power: f"$10^{{{power}}}$" for power in powers}
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")

    return _figure("Error by layer", "|second - first| over |first| of each operation's output; the six largest by name.", draw)


def flipped_codes(differences: Sequence[Difference]) -> str:
    """Share of FP4 codes that differ, layers by operands."""
    cells: dict[str, dict[int, float]] = {}
    for each in differences:
        layer, local = split_name(each.name)
        if local.endswith(_CODES):
            cells.setdefault(local.removesuffix(_CODES), {})[layer] = 100 * each.differing
    if not cells:
        return ""
    layers = sorted({layer for row in cells.values() for layer in row})
    share = np.array([[row.get(layer, np.nan) for layer in layers] for row in cells.values()])

    def draw(figure, axes):
        edges = np.arange(share.shape[1] + 1) - 0.5, np.arange(share.shape[0] + 1) - 0.5
        mesh = axes.pcolormesh(*edges, share, cmap="magma_r", vmin=0, vmax=max(1e-3, np.nanmax(share)))
        axes.set_yticks(range(len(cells)), list(cells))
        step = max(1, len(layers) // 8)
        axes.set_xticks(range(0, len(layers), step), layers[::step])
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xlabel("layer")
        figure.colorbar(mesh, ax=axes, label="flipped codes (%)")

    return _figure("Flipped FP4 codes", "Share of the 4-bit codes that differ, by quantised operand and layer.", draw)


def gap_by_position(log_probs: LogProbs) -> str:
    gap_BT = np.abs(log_probs.first.astype(np.float64) - log_probs.second)
    positions = np.flatnonzero(log_probs.mask.any(axis=0))
    mean = [np.mean(gap_BT[log_probs.mask[:, t], t]) for t in positions]
    largest = [np.max(gap_BT[log_probs.mask[:, t], t]) for t in positions]

    def draw(figure, axes):
        axes.plot(positions + 1, largest, color=COLOURS[1], linewidth=1.0, label="largest")
        axes.plot(positions + 1, mean, color=COLOURS[0], linewidth=1.4, label="mean")
        smallest = min((x for x in (*mean, *largest) if np.isfinite(x) and x > 0), default=1e-9)
        axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(smallest)))
        axes.set_ylim(0, None)
        axes.set_xlabel("position of the token")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("|difference| (nats)")
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")

    return _figure("Gap by position", "Log-prob of each token in the first engine against the second; 0 is equal bits.", draw)


def ratios(log_probs: LogProbs) -> str:
    difference = (log_probs.first.astype(np.float64) - log_probs.second)[log_probs.mask]
    finite = difference[np.isfinite(difference)]
    widest = max(1e-6, float(np.abs(finite).max(initial=0.0)))
    lost = len(difference) - len(finite)
    if not len(finite):
        return ""

    def draw(figure, axes):
        axes.hist(np.exp(finite), bins=np.exp(np.linspace(-widest, widest, 61)), color=COLOURS[0])
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.axvline(1.0, color="#555555", linewidth=0.8)
        axes.minorticks_off()
        ticks = np.exp(np.array([-widest, 0.0, widest]))
        axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
        axes.set_xlabel("probability in the first engine over that in the second")
        axes.set_ylabel("tokens")

    meaning = f"Of {len(difference):,} tokens" + (f"; {lost:,} are not finite and not shown." if lost else ".")
    return _figure("Probability ratios", meaning, draw)


def attribution(shares: Sequence[Share]) -> list[str]:
    """Two pictures of bars: each operation alone, and those that were chosen one after the other."""
    titles = {
        ALONE: ("What causes the gap", "Each operation alone, swapped for the other engine's; lines: 95 % by sequences."),
        CHOSEN: ("How much is explained", "Each bar has its operation and those above it swapped; lines: 95 % by sequences."),
    }
    kinds = {kind: [each for each in shares if each.question == kind] for kind in titles}
    return [_bars(*titles[kind], bars) for kind, bars in kinds.items() if bars]


def _bars(title: str, meaning: str, shares: Sequence[Share]) -> str:
    def draw(figure, axes):
        y = np.arange(len(shares))
        axes.barh(y, [100 * each.share for each in shares], color=COLOURS[0])
        for i, each in enumerate(shares):
            if each.low is not None and each.high is not None:
                axes.plot([100 * each.low, 100 * each.high], [i, i], color="#333333", linewidth=1.2)
        axes.set_yticks(y, [each.name.replace(" and ", "\nand ") for each in shares])
        axes.invert_yaxis()
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.set_xlabel("share of the gap that it takes away (%)")
        axes.grid(axis="y", visible=False)

    return _figure(title, meaning, draw, height=max(_INCHES[1], 0.8 + 0.24 * len(shares)))
