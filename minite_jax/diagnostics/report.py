"""A diagnosis on one HTML page: what differs, where, and how much, with pictures. One file, no scripts, nothing to load.

    write_report("diagnosis.html", a, b, causes, comparison)

The page is for people who were not there: it names both engines, the place to look at, and says what each picture shows. It reads
on a telephone too: pictures are vector graphics in columns that become one, tables scroll by themselves.
"""

import dataclasses
import html
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from minite_jax.diagnostics.alignment import Alignment, split_name
from minite_jax.diagnostics.causes import Cause
from minite_jax.diagnostics.compare import Comparison, Difference
from minite_jax.diagnostics.gap import gap_metrics, gap_warnings, worst_tokens
from minite_jax.diagnostics.trace_file import Trace
from minite_jax.files import replaced
from minite_jax.metrics.plots import COLOURS, new_figure

LOG_PROB = "final/log_prob"
_CODES = ".codes"
_FIGURE_INCHES = (5.2, 3.3)  # so that its letters are legible when the page is 360 pixels wide
_SMALLEST = 1e-9  # relative error that the pictures' logarithmic axes begin with; equal bits lie on it
_gap = jax.jit(gap_metrics)


@dataclasses.dataclass(frozen=True)
class Share:
    """A bar of the attribution.

    Attributes:
      name: the operation, or group of operations, that was swapped.
      share: of the gap that the swap takes away; 1: all of it, below 0: the gap grows.
      low, high: where the share lies for other choices of sequences (a confidence interval), or None.
    """

    name: str
    share: float
    low: float | None = None
    high: float | None = None


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


def html_report(
    a: Trace,
    b: Trace,
    causes: Sequence[Cause],
    comparison: Comparison | None,
    *,
    attribution: Sequence[Share] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
) -> str:
    """The page.

    Args:
      a, b: the traces; a is the reference.
      causes: what no layer makes, from `minite_jax.diagnostics.causes`.
      comparison: of their tensors; None where the causes make it meaningless.
      attribution: the largest first.
      decode: from token ids to text, for the worst tokens.

    Raises:
      ImportError: matplotlib is not installed; says which extra has it.
    """
    log_probs = None if comparison is None else log_probs_of(a, b)
    body = [_verdict(causes, comparison), _engines(a, b), _causes(causes)]
    figures = []
    if comparison is not None:
        figures += [_error_by_layer(comparison.differences), _flipped_codes(comparison.differences)]
    if log_probs is not None:
        figures += [_gap_by_position(log_probs), _ratios(log_probs)]
    figures += [_attribution(attribution)]
    body.append(f'<div class="figures">{"".join(filter(None, figures))}</div>')
    if log_probs is not None:
        body += [_metrics(log_probs), _worst(log_probs, decode)]
    if comparison is not None:
        body += [_tensors(comparison), _notes(comparison.notes)]
    return _PAGE.format(title="Where two engines part", style=_STYLE, body="\n".join(filter(None, body)))


def write_report(path: str | Path, *arguments: Any, **options: Any) -> Path:
    """Writes `html_report(*arguments, **options)` under a temporary name that is then renamed."""
    text = html_report(*arguments, **options)
    with replaced(Path(path)) as unfinished:
        unfinished.write_text(text)
    return Path(path)


# --- the words


def _verdict(causes: Sequence[Cause], comparison: Comparison | None) -> str:
    place = None if comparison is None else comparison.location
    if causes:
        text, kind = f"{_text(causes[0].kind.capitalize())}: {_text(causes[0].text)}", "bad"
    elif place is not None:
        text, kind = f"Look at <code>{_text(place.name)}</code>{_text(_where(place))}", "bad"
    elif comparison.first is None:
        text, kind = "Every common tensor has equal bits", "good"
    elif comparison.only_log_probs:
        text, kind = "Log-probs differ; by themselves they do not show where: record tensors too", "open"
    else:
        text, kind = "Rounding only: no operation adds an error that its inputs do not explain", "good"
    lines = [f'<p class="verdict {kind}">{text}</p>']
    if comparison is not None and comparison.first is not None:
        lines.append(f"<p>First difference: <code>{_text(comparison.first.name)}</code>{_text(_where(comparison.first))}. ")
        lines.append("First whose error its inputs do not explain: ")
        lines.append(f"<code>{_text(comparison.abrupt.name)}</code>.</p>" if comparison.abrupt else "none.</p>")
    return "".join(lines)


def _where(each: Difference) -> str:
    experts = f", experts {', '.join(map(str, each.experts))}" if each.experts else ""
    return experts + (f", first at sequence {each.first[0]}, position {each.first[1]}" if each.first else "")


def _engines(a: Trace, b: Trace) -> str:
    rows = []
    for which, trace in (("first", a), ("second", b)):
        engine = trace.header["engine"]
        versions = ", ".join(f"{name} {value}" for name, value in sorted(engine.get("versions", {}).items()))
        said = [engine.get(key, "") for key in ("name", "point", "recipe", "device")]
        rows.append([which, trace.where, *map(str, said), versions, f"{len(trace.rows):,}", f"{len(trace.names):,}"])
    return _table("Engines", ["trace", "where", "engine", "point", "recipe", "device", "versions", "tokens", "tensors"], rows)


def _causes(causes: Sequence[Cause]) -> str:
    if not causes:
        return ""
    items = "".join(f"<li><b>{_text(each.kind)}</b>: {_text(each.text)}</li>" for each in causes)
    return f"<h2>What no layer makes</h2><ul>{items}</ul>"


def _metrics(log_probs: LogProbs) -> str:
    values = log_probs.metrics()
    warned = gap_warnings(values)
    rows = [[name, f"{value:.6g}", warned.get(name, "")] for name, value in values.items() if "/worst_" not in name]
    return _table("The gap under the names that others use", ["metric", "value", "warning"], rows, "first minus second; raw")


def _worst(log_probs: LogProbs, decode) -> str:
    found = worst_tokens(log_probs.first, log_probs.second, log_probs.mask, log_probs.tokens, decode=decode)
    rows = [
        [
            str(log_probs.sequences[each.row]), str(each.column + 1), str(each.token), each.text, f"{each.log_prob:.6g}",
            f"{each.sampler_log_prob:.6g}", f"{each.log_prob - each.sampler_log_prob:+.3g}",
        ]
        for each in found
    ]  # fmt: skip
    titles = ["sequence", "position", "token", "text up to it", "first", "second", "difference"]
    return _table("Tokens whose log-probs differ most", titles, rows) if rows else ""


def _tensors(comparison: Comparison) -> str:
    rows, classes = [], []
    for each in comparison.differences:
        ulps = "" if each.max_ulp is None else f"{each.max_ulp:,}"
        excess = "" if each.excess is None else f"{each.excess:.3g}"
        shown = [f"{100 * each.differing:.3g} %", f"{each.max_abs:.3g}", f"{each.mean_abs:.3g}", ulps, f"{each.relative:.3g}"]
        row = [each.name, f"{each.rows:,}", *shown, f"{each.cosine:.6f}", excess, each.not_finite]
        rows.append([each.name, f"{each.rows:,}", "equal", *[""] * 7] if each.equal else row)
        classes.append("place" if each is comparison.location else "same" if each.equal else "")
    titles = ["tensor", "rows", "differing", "max |d|", "mean |d|", "ulps", "relative", "cosine", "excess", "not finite"]
    table = _table("", titles, rows, "excess: error over what the errors of the inputs explain", classes)
    return f"<details><summary>All {len(rows)} tensors, in execution order</summary>{table}</details>"


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", classes: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in titles)
    lines = []
    for i, row in enumerate(rows):
        mark = f' class="{classes[i]}"' if classes and classes[i] else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>")
    heading = f"<h2>{_text(title)}</h2>" if title else ""
    caption = f"<p>{_text(note)}</p>" if note else ""
    return f'{heading}{caption}<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value))


# --- the pictures


def _figure(title: str, meaning: str, draw: Callable[[Any, Any], None]) -> str:
    with new_figure(figure_figsize=_FIGURE_INCHES, svg_fonttype="none", svg_hashsalt=title) as figure:
        draw(figure, figure.add_subplot())
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{_text(title)}" ', 1)
    return f"<figure><figcaption><b>{_text(title)}</b><br>{_text(meaning)}</figcaption>{svg}</figure>"


def _error_by_layer(differences: Sequence[Difference]) -> str:
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
        axes.text(0.01, _SMALLEST * 2, "equal bits", fontsize="small", color="#555555", transform=axes.get_yaxis_transform())
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")

    return _figure("Error by layer", "|second - first| over |first| of each operation's output; the six largest by name.", draw)


def _flipped_codes(differences: Sequence[Difference]) -> str:
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


def _gap_by_position(log_probs: LogProbs) -> str:
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
        axes.set_ylabel("|difference| (nats)")
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")

    return _figure("Gap by position", "Log-prob of each token in the first engine against the second; 0 is equal bits.", draw)


def _ratios(log_probs: LogProbs) -> str:
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


def _attribution(shares: Sequence[Share]) -> str:
    if not shares:
        return ""

    def draw(figure, axes):
        y = np.arange(len(shares))
        axes.barh(y, [100 * each.share for each in shares], color=COLOURS[0])
        for i, each in enumerate(shares):
            if each.low is not None and each.high is not None:
                axes.plot([100 * each.low, 100 * each.high], [i, i], color="#333333", linewidth=1.2)
        axes.set_yticks(y, [each.name for each in shares])
        axes.invert_yaxis()
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.set_xlabel("share of the gap that swapping it takes away (%)")
        axes.grid(axis="y", visible=False)

    return _figure("What causes the gap", "Each operation alone, swapped for the other engine's; lines: 95 % by sequences.", draw)


_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:#1c1c1c;background:#fff;max-width:1180px;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.2rem 0 .6rem}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
code{background:#f2f2f2;padding:.05rem .3rem;border-radius:3px;overflow-wrap:anywhere}
.verdict{font-size:1.15rem;padding:.7rem 1rem;border-left:5px solid;border-radius:3px;margin:.4rem 0}
.bad{background:#fdecec;border-color:#c0392b}.open{background:#fdf6e3;border-color:#c08a1e}.good{background:#ebf7ee;border-color:#2e8b57}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1.2rem;margin:1rem 0}
figure{margin:0}figcaption{font-size:.9rem;margin-bottom:.3rem}svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #e4e4e4;white-space:nowrap}
td{font-variant-numeric:tabular-nums}td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:9rem}
.place td{background:#fdecec;font-weight:600}.same td{color:#2e7d4f}
summary{cursor:pointer;font-weight:600;margin:1.2rem 0 .4rem}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
