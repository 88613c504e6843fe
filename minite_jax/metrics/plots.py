"""The plots of a run, made from its `metrics.jsonl` alone."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minite_jax.files import replaced
from minite_jax.metrics import names
from minite_jax.metrics.writer import MetricsError, read_metrics
from minite_jax.optional import require

STYLE = {
    "figure.figsize": (7.2, 4.2),
    "figure.dpi": 130,
    "font.size": 10.5,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}
COLOURS = ("#1f6fb4", "#d1495b")  # this run, the run beside it

Rows = list[dict[str, Any]]


def plot_metrics(
    workdir: str | os.PathLike,
    also: str | os.PathLike | None = None,
    labels: tuple[str, str] = ("this run", "also"),
    about: str = "",
) -> list[Path]:
    """Draws reward, gap, loss, entropy and held-out accuracy over the steps into `workdir/plots/*.png`.

    The gap's axis is logarithmic with a linear piece around 0, so that an exact zero is a line one can see.
    Steps with a value that is not finite are marked on the upper edge and counted in the legend.

    Args:
        workdir: folder of the run (or its `metrics.jsonl`'s folder).
        also: folder of a second run to draw beside it, for instance one with the naive engine.
        labels: names of the two runs in the legends; the second is used only with `also`.
        about: what both runs have in common, for instance their recipe; follows each title.

    Returns:
        The files written. A plot none of whose metrics was recorded is left out.

    Raises:
        MetricsError: a run has no metrics, or they cannot be read.
        ImportError: matplotlib is not installed; says which extra has it.
    """
    runs = [(labels[0], read_metrics(workdir))]
    if also is not None:
        runs.append((labels[1], read_metrics(also)))
    for folder, (_, rows) in zip((workdir, also), runs, strict=False):
        if not rows:
            raise MetricsError(f"the metrics of {folder} hold no step yet: nothing to plot")
    figures: dict[str, Callable] = {
        "reward": _reward,
        "gap": _gap,
        "loss": _loss,
        "entropy": _entropy,
        "accuracy": _accuracy,
    }
    folder = Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in figures.items():
        with new_figure() as figure:
            axes = figure.add_subplot()
            if not draw(axes, runs):
                continue
            if about:
                axes.set_title(f"{axes.get_title(loc='left')}, {about}")
            axes.set_xlabel(_warm_up(axes, runs[0][1]))
            entries = len(axes.get_legend_handles_labels()[0])
            columns = 2 if entries > 3 else 3  # four entries fill their columns run by run
            figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
            written.append(save_figure(figure, folder / f"{name}.png"))
    return written


@contextlib.contextmanager
def new_figure(**settings: Any) -> Iterator[Any]:
    """Gives a matplotlib figure in the style of the project, which holds inside the `with` block.

    Args:
        **settings: matplotlib's rc settings on top of the style, with `_` for `.` (`figure_figsize=(8, 3)`).

    Raises:
        ImportError: matplotlib is not installed; says which extra has it.
    """
    matplotlib = require("matplotlib", "experiments")
    canvas = require("matplotlib.backends.backend_agg", "experiments")
    shape = require("matplotlib.figure", "experiments")
    with matplotlib.rc_context(STYLE | {key.replace("_", "."): value for key, value in settings.items()}):
        # Not pyplot: that has global state, wants a display and would change a notebook's backend.
        figure = shape.Figure(layout="constrained")
        canvas.FigureCanvasAgg(figure)
        yield figure


def save_figure(figure: Any, path: Path) -> Path:
    """Saves a matplotlib figure under a temporary name and renames it: `path` is never half a picture."""
    with replaced(path) as unfinished:
        figure.savefig(unfinished, format="png")
    return path


def _reward(axes: Any, runs: list[tuple[str, Rows]]) -> bool:
    axes.set_title("Mean reward of the rollouts")
    axes.set_ylabel("reward")
    return _lines(axes, runs, {names.REWARD_MEAN: ("", "-")})


def _loss(axes: Any, runs: list[tuple[str, Rows]]) -> bool:
    axes.set_title("Loss")
    axes.set_ylabel("loss (nats per token in the warm-up)")
    return _lines(axes, runs, {names.LOSS: ("", "-")})


def _entropy(axes: Any, runs: list[tuple[str, Rows]]) -> bool:
    axes.set_title("Entropy of the policy")
    axes.set_ylabel("entropy per token (nats)")
    return _lines(axes, runs, {names.ENTROPY: ("", "-")})


def _accuracy(axes: Any, runs: list[tuple[str, Rows]]) -> bool:
    axes.set_title("Accuracy on held-out prompts")
    axes.set_ylabel("share answered right")
    axes.set_ylim(-0.03, 1.03)
    return _lines(axes, runs, {names.ACCURACY_GREEDY: ("greedy", "o-"), names.ACCURACY_SAMPLED: ("T = 1", "s--")})


def _gap(axes: Any, runs: list[tuple[str, Rows]]) -> bool:
    axes.set_title("Log-prob gap between rollout and update")
    axes.set_ylabel("|difference| per token (nats)")
    keys = {names.GAP_MAX: ("max", "-"), names.GAP_MEAN: ("mean", "--")}
    values = [row[key] for _, rows in runs for row in rows for key in keys if _finite(row.get(key))]
    if not values:
        return _lines(axes, runs, keys)
    positive = [value for value in values if value > 0]
    # The linear piece ends at the decade below the smallest gap: only an exact 0 lies on the zero line.
    smallest = 10.0 ** math.floor(math.log10(min(positive))) if positive else 1e-9
    largest = 10.0 ** math.ceil(math.log10(max(positive))) if positive else 1e-5
    axes.set_yscale("symlog", linthresh=smallest, linscale=0.6)
    axes.set_ylim(-smallest, max(largest, 10 * smallest) * 3)
    first, last = round(math.log10(smallest)), round(math.log10(max(largest, 10 * smallest)))
    powers = range(first, last + 1, max(1, (last - first) // 6))
    ticks = {10.0**power: f"$10^{{{power}}}$" for power in powers}
    axes.set_yticks([0.0, *ticks], ["exactly 0", *ticks.values()])
    axes.set_yticks([], minor=True)
    axes.axhline(0.0, color="#444444", linewidth=0.8, zorder=1)
    return _lines(axes, runs, keys)


def _lines(axes: Any, runs: list[tuple[str, Rows]], keys: dict[str, tuple[str, str]]) -> bool:
    """Draws the given metrics of every run; returns whether there was any."""
    drawn = False
    for (run, rows), colour in zip(runs, COLOURS, strict=False):
        for position, (key, (kind, style)) in enumerate(keys.items()):
            points = [(row[names.STEP], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            label = ", ".join(part for part in (run, kind) if part)
            bad = [step for step, value in points if not _finite(value)]
            if bad:
                label += f" ({len(bad)} not finite: ×)"
                top = axes.get_xaxis_transform()
                axes.plot(bad, [0.98] * len(bad), "x", color=colour, transform=top, clip_on=False)
            shown = [value if _finite(value) else math.nan for value in values]
            fade = 1.0 if position == 0 else 0.6
            axes.plot(steps, shown, style, color=colour, alpha=fade, label=label, markersize=4.5)
            drawn = True
    return drawn


def _warm_up(axes: Any, rows: Rows) -> str:
    """Shades the supervised steps. Returns the label of the axis of steps, which names them where nothing of them is drawn."""
    first = min((row[names.STEP] for row in rows if row.get(names.PHASE) == "rl"), default=0)
    if not first:
        return "step"
    if axes.dataLim.x0 >= first:
        return f"step (those before {first} are the supervised warm-up)"
    left, right = axes.get_xlim()
    axes.axvspan(left, first - 0.5, color="#f3efe2", zorder=0, label="supervised warm-up")
    axes.set_xlim(left, right)
    return "step"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
