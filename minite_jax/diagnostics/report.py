"""A diagnosis on one HTML page: what differs, where, and how much, with pictures. One file, no scripts, nothing to load.

    write_report("diagnosis.html", a, b, causes, comparison)

The page is for people who were not there: it names both engines, the place to look at, and says what each picture shows. It reads
on a telephone too: pictures are vector graphics in columns that become one, tables scroll by themselves.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from minite_jax.diagnostics import pictures
from minite_jax.diagnostics.causes import Cause
from minite_jax.diagnostics.compare import Comparison
from minite_jax.diagnostics.differences import Difference
from minite_jax.diagnostics.gap import gap_warnings, worst_tokens
from minite_jax.diagnostics.pictures import LogProbs, Share, log_probs_of
from minite_jax.diagnostics.trace_file import Trace
from minite_jax.files import replaced


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
      attribution: of their gap, see `minite_jax.diagnostics.pictures.shares_of`.
      decode: from token ids to text, for the worst tokens.

    Raises:
      ImportError: matplotlib is not installed; says which extra has it.
    """
    log_probs = None if comparison is None else log_probs_of(a, b)
    body = [_verdict(causes, comparison, attribution), _engines(a, b), _causes(causes)]
    figures = []
    if comparison is not None:
        figures += [pictures.error_by_layer(comparison.differences), pictures.flipped_codes(comparison.differences)]
    if log_probs is not None:
        figures += [pictures.gap_by_position(log_probs), pictures.ratios(log_probs)]
    figures += pictures.attribution(attribution)
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


def _verdict(causes: Sequence[Cause], comparison: Comparison | None, attribution: Sequence[Share]) -> str:
    chosen = [each for each in attribution if each.question == pictures.CHOSEN and each.name != pictures.EVERYTHING]
    place = None if comparison is None else comparison.location
    if causes:
        text, kind = f"{_text(causes[0].kind.capitalize())}: {_text(causes[0].text)}", "bad"
    elif place is not None:
        text, kind = f"Look at <code>{_text(place.name)}</code>{_text(_where(place))}", "bad"
    elif comparison.first is None:
        text, kind = "Every common tensor has equal bits", "good"
    elif comparison.only_log_probs and chosen:
        swapped = [name for each in chosen for name in each.name.removeprefix("+ ").split(" and ")]
        names = ", ".join(f"<code>{_text(name)}</code>" for name in swapped)
        text, kind = f"{names} explain {100 * chosen[-1].share:.0f} % of the gap", "bad"
    elif comparison.only_log_probs:
        text, kind = "Log-probs differ; by themselves they do not show where: record tensors too", "open"
    else:
        text, kind = "Rounding only: no operation adds an error that its inputs do not explain", "good"
    lines = [f'<p class="verdict {kind}">{text}</p>']
    if comparison is not None and comparison.first is not None and not comparison.only_log_probs:
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
    return f"<details><summary>Tensors in execution order ({len(rows)})</summary>{table}</details>"


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", classes: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in titles)
    lines = []
    for i, row in enumerate(rows):
        mark = f' class="{classes[i]}"' if classes and classes[i] else ""
        name, *cells = map(_text, row)
        name = name.replace("_", "_<wbr>").replace("/", "/<wbr>")  # where a telephone may break it
        wide = [' class="wide"' if len(cell) > _LONG else "" for cell in cells]
        rest = "".join(f"<td{each}>{cell}</td>" for each, cell in zip(wide, cells, strict=True))
        lines.append(f"<tr{mark}><td>{name}</td>{rest}</tr>")
    heading = f"<h2>{_text(title)}</h2>" if title else ""
    caption = f"<p>{_text(note)}</p>" if note else ""
    return f'{heading}{caption}<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value))


_LONG = 40  # letters of a cell from which on its lines may break, so that the table need not be scrolled
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
td{font-variant-numeric:tabular-nums}td:first-child{white-space:normal;min-width:9rem}
td.wide{white-space:normal;min-width:14rem}
.place td{background:#fdecec;font-weight:600}.same td{color:#2e7d4f}
summary{cursor:pointer;font-weight:600;margin:1.2rem 0 .4rem}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
