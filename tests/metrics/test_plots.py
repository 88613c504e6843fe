"""Plots: every recorded metric is drawn, zeros and non-finite values are visible, nothing is half written."""

import math

import pytest

from minite_jax.metrics import names, plots
from minite_jax.metrics.writer import JsonlWriter, MetricsError


def make_run(folder, gap, accuracy=True):
    writer = JsonlWriter(folder)
    for step in range(6):
        row = {names.PHASE: "sft" if step < 3 else "rl", names.LOSS: 1 / (step + 1)}
        if step >= 3:
            row |= {
                names.REWARD_MEAN: step / 6,
                names.ENTROPY: 0.5,
                names.GAP_MAX: gap,
                names.GAP_MEAN: gap / 9,
            }
        if accuracy and step == 5:
            row |= {names.ACCURACY_GREEDY: 0.5, names.ACCURACY_SAMPLED: 0.25}
        writer.write(step, row)
    writer.close()
    return folder


@pytest.fixture
def caught(monkeypatch):
    """The figures that would be saved, by file name; drawing a PNG costs most of the time."""
    figures = {}
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.setdefault(path.name, figure) and path)
    return figures


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_files_of_a_run(tmp_path):
    run = make_run(tmp_path / "aligned", 0.0)
    files = plots.plot_metrics(run, also=make_run(tmp_path / "naive", 1e-3), labels=("aligned", "naive"))
    assert [path.name for path in files] == [
        "reward.png",
        "gap.png",
        "loss.png",
        "entropy.png",
        "accuracy.png",
    ]
    assert sorted(path.name for path in (run / "plots").iterdir()) == sorted(path.name for path in files)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_exact_zero_is_a_visible_line_below_the_other_run(tmp_path, caught):
    run = make_run(tmp_path / "aligned", 0.0)
    plots.plot_metrics(run, also=make_run(tmp_path / "naive", 1e-3), labels=("aligned", "naive"))
    axes = caught["gap.png"].axes[0]
    assert axes.get_yscale() == "symlog"
    low, high = axes.get_ylim()
    assert low < 0 < 1e-3 < high
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["aligned, max"] == [0.0, 0.0, 0.0]
    assert lines["naive, max"] == [1e-3, 1e-3, 1e-3]
    assert axes.get_yticklabels()[0].get_text() == "exactly 0"
    positions = axes.transData.transform([(0, 0.0), (0, 1e-3 / 9)])[:, 1]
    assert positions[1] - positions[0] > 20  # pixels


def test_not_finite_is_marked_and_counted(tmp_path, caught):
    plots.plot_metrics(make_run(tmp_path, math.nan))
    assert "this run, max (3 not finite: ×)" in texts(caught["gap.png"])
    crosses = [line for line in caught["gap.png"].axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[3, 4, 5], [3, 4, 5]]


def test_a_metric_that_was_not_recorded_has_no_plot(tmp_path, caught):
    files = plots.plot_metrics(make_run(tmp_path, 0.0, accuracy=False))
    assert "accuracy.png" not in [path.name for path in files]
    assert "supervised warm-up" in texts(caught["loss.png"])
    assert "supervised warm-up" not in texts(caught["reward.png"])


def test_errors_are_one_line(tmp_path):
    with pytest.raises(MetricsError, match="there is no metrics file"):
        plots.plot_metrics(tmp_path)
    JsonlWriter(tmp_path).close()
    with pytest.raises(MetricsError, match="hold no step yet"):
        plots.plot_metrics(tmp_path)
    assert not (tmp_path / "plots").exists()


def test_axes_carry_units(tmp_path, caught):
    plots.plot_metrics(make_run(tmp_path, 0.0))
    labels = {name: figure.axes[0].get_ylabel() for name, figure in caught.items()}
    assert "nats" in labels["gap.png"] and "nats" in labels["entropy.png"] and "share" in labels["accuracy.png"]
    before = "step (those before 3 are the supervised warm-up)"
    steps = {name: figure.axes[0].get_xlabel() for name, figure in caught.items()}
    assert steps == {name: "step" if name == "loss.png" else before for name in steps}


def test_titles_say_what_the_runs_have_in_common(tmp_path, caught):
    plots.plot_metrics(make_run(tmp_path, 0.0), about="recipe nvfp4")
    titles = [figure.axes[0].get_title(loc="left") for figure in caught.values()]
    assert "Log-prob gap between rollout and update, recipe nvfp4" in titles
    assert all(title.endswith(", recipe nvfp4") for title in titles)
