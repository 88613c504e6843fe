"""Where do two engines part? Traces of our engine, and the comparison of any two.

    python -m experiments.diagnose trace --checkpoint=MODEL --tokens=theirs --out=ours      # our engine on the tokens of a trace
    python -m experiments.diagnose compare --first=ours --second=theirs

A trace is a folder of named tensors (docs/trace_format.md) that another engine writes with
`minite_jax/diagnostics/writers/torch_hooks.py`. In place of a trace, `--tokens`, `--first` and `--second` take a JSONL file of
token ids and log-probs as RL frameworks write it. `compare` says what is different that no layer makes (tokens, positions,
temperature, mask, vocabulary, weights), the first tensor that differs, and the first whose error its inputs do not explain. Its
status is 0 where nothing points anywhere, 3 where something does. `--html=page.html` writes it with pictures on one page,
`--attribution=docs/benchmarks/attribution_naive.json` adds what each operation explains of the gap (`experiments.attribution`).
"""

import math
from pathlib import Path

import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from minite_jax.diagnostics import causes
from minite_jax.diagnostics.compare import ABRUPT, Comparison, compare
from minite_jax.diagnostics.differences import Difference
from minite_jax.diagnostics.gap import GAP, gap_warnings
from minite_jax.diagnostics.logs import read_log
from minite_jax.diagnostics.pictures import LogProbs, log_probs_of, shares_of
from minite_jax.diagnostics.report import write_report
from minite_jax.diagnostics.trace_file import Trace, TraceError, open_trace
from minite_jax.diagnostics.trace_header import HEADER
from minite_jax.errors import UserError
from minite_jax.files import hindrance
from minite_jax.metrics.results import read_results
from minite_jax.optional import require
from pallas_kernels.log_prob import Truncation

_CHECKPOINT = cli.checkpoint_flag()
_RECIPE = cli.recipe_flag()
_TOKENS = flags.DEFINE_string("tokens", None, "trace: trace or JSONL file whose sequences are run.")
_TENSORS = flags.DEFINE_list("tensors", ["*"], "trace: patterns of names, such as 'layer.0/*,final/*'.")
_POINT = flags.DEFINE_enum("point", "learner", ("learner", "sampler"), "trace: the forward of which side.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 1, "trace, sampler: tokens that are prefilled.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("log_prob_temperature", 1.0, "trace: of the log-probs.")
_MAX_GIB = flags.DEFINE_float("max_gib", 8.0, "trace: most GiB of tensors on the device at once; more run the forward again.")
_FIRST = flags.DEFINE_string("first", None, "compare: trace or JSONL file of the reference.")
_SECOND = flags.DEFINE_string("second", None, "compare: trace or JSONL file of the other engine.")
_FIELD = flags.DEFINE_string("log_prob_field", None, "Field of log-probs in JSONL files. Default: the first that is known.")
_HTML = cli.html_flag()
_ATTRIBUTION = flags.DEFINE_string("attribution", None, "compare: table of experiments.attribution whose bars go on the page.")
_ALL = flags.DEFINE_bool("all", False, "compare: show every tensor, not only those around the place.")
_OUT = cli.out_flag()


def read(path: str) -> Trace:
    """A trace (its folder, or the header in it), or a JSONL file as one."""
    place = Path(path)
    if not place.exists():
        raise UserError(f"there is no {path}: give the folder of a trace, or a JSONL file of token ids and log-probs")
    if place.is_file() and place.name != HEADER:
        return read_log(place, _FIELD.value)
    return open_trace(place.parent if place.is_file() else place)


def padded(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of a trace, [B, T], and their lengths [B].

    Raises:
      UserError: a sequence that does not have each position once, from 0 on.
    """
    numbers = np.unique(trace.rows.sequences)
    lengths = np.array([(trace.rows.sequences == s).sum() for s in numbers])
    tokens = np.zeros((len(numbers), max(2, lengths.max(initial=0))), np.int32)
    for row, s in enumerate(numbers):
        here = trace.rows.sequences == s
        if sorted(trace.rows.positions[here].tolist()) != list(range(lengths[row])):
            raise UserError(f"{trace.where}: sequence {s} does not have positions 0 to {lengths[row] - 1}, each once")
        tokens[row, trace.rows.positions[here]] = trace.rows.token_ids[here]
    return tokens, lengths


def write_trace() -> None:
    """The `trace` command."""
    from minite_jax.diagnostics.trace import trace_learner, trace_sampler, writer_to

    _check_new(Path(_OUT.value))
    tokens, lengths = padded(read(_TOKENS.value))
    if not len(lengths):
        raise UserError(f"{_TOKENS.value} holds no token: there is nothing to run")
    if not _MAX_GIB.value > 0:
        raise UserError(f"--max_gib={_MAX_GIB.value:g}: say how many GiB of tensors the device has room for, more than 0")
    policy = _policy(Path(_CHECKPOINT.value), _RECIPE.value)
    if tokens.max() >= policy.config.vocab_size or tokens.min() < 0:
        raise UserError(f"{_TOKENS.value} holds token {tokens.max()}, the model has {policy.config.vocab_size}: not its tokens")
    common = dict(patterns=_TENSORS.value, truncation=Truncation(temperature=_TEMPERATURE.value), sink=writer_to(_OUT.value))
    if _POINT.value == "learner":
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        max_bytes = None if math.isinf(_MAX_GIB.value) else int(_MAX_GIB.value * 2**30)
        trace = trace_learner(policy, tokens, mask=mask, max_bytes=max_bytes, **common)
    else:
        prompts = np.minimum(_PROMPT_TOKENS.value, lengths)
        trace = trace_sampler(policy, tokens, prompts, lengths=lengths, **common)
    print(f"written: {_OUT.value}, {len(trace.names)} tensors of {len(trace.rows)} tokens in {len(lengths)} sequences")


def _check_new(folder: Path) -> None:
    """Refuses a folder that cannot be made, before a model is loaded for it."""
    if folder.exists():
        raise UserError(f"--out={folder} exists: give the name of a new folder, or remove it")
    if (why := hindrance(folder)) is not None:
        raise UserError(f"--out={folder} cannot be made: {why}; give another folder")


def _policy(folder: Path, recipe: str | None) -> mt.Policy:
    if not folder.is_dir():
        raise UserError(f"--checkpoint={folder} is no folder: give the workdir of a run, or the folder of a Hugging Face model")
    if (folder / "checkpoints").is_dir():
        from experiments.training import stored_run

        run = stored_run(folder)
        return mt.prepare(run.state.train.params, run.setup.model, mt.recipe(recipe) if recipe else run.setup.recipe)
    config, params = mt.load_huggingface(folder)
    return mt.prepare(params, config, mt.recipe(recipe or "bf16"))


def diagnose(a: Trace, b: Trace) -> tuple[list[causes.Cause], Comparison | None]:
    """Everything that is known of two traces. No comparison of tensors where the tokens are not the same."""
    found = causes.row_causes(a, b)
    if any(cause.first for cause in found):
        return found, None
    try:
        comparison = compare(a, b)
    except TraceError:
        if found:
            return found, None
        raise
    found += causes.width_causes(a, b) + causes.log_prob_causes(a, b) + causes.weight_causes(a, b, comparison)
    return found + causes.rotation_causes(a, b, comparison), comparison


def report(a: Trace, b: Trace) -> int:
    """Prints a diagnosis; returns the status of the process."""
    console_module, table_module = require("rich.console", "experiments"), require("rich.table", "experiments")
    console = console_module.Console(highlight=False)
    if not console.is_terminal:
        console = console_module.Console(highlight=False, width=140)  # a file has no width of its own
    shares = shares_of(read_results(_ATTRIBUTION.value), _ATTRIBUTION.value) if _ATTRIBUTION.value else ()
    found, comparison = diagnose(a, b)
    status = _say(console, table_module, a, b, found, comparison)
    if _HTML.value:
        print(f"written: {write_report(_HTML.value, a, b, found, comparison, attribution=shares)}")
    return status


def _say(console, table_module, a: Trace, b: Trace, found: list[causes.Cause], comparison: Comparison | None) -> int:
    """The diagnosis in the terminal."""
    for which, trace in (("first ", a), ("second", b)):
        engine = trace.header["engine"]
        console.print(f"{which} {trace.where}: {engine.get('name', '?')} {engine.get('recipe', '')}, {len(trace.rows)} tokens")
    for cause in found:
        console.print(f"[bold red]{cause.kind}[/]: {cause.text}")
    if comparison is None:
        console.print("tensors are not compared: mend that first")
        return 3
    shown = comparison.differences if _ALL.value else _around(comparison)
    table = table_module.Table(box=None, pad_edge=False)
    for title in ("tensor", "rows", "differing", "max |d|", "mean |d|", "ulp", "relative", "cosine", "excess", "first at"):
        table.add_column(title, justify="left" if title == "tensor" else "right", no_wrap=title == "tensor")
    for each in shown:
        table.add_row(*_cells(each), style=_style(each, comparison))
    console.print(table)
    for each in comparison.differences:
        if each.not_finite:
            console.print(f"[bold red]not finite[/]: {each.name}: {each.not_finite}")
            break
    for note in comparison.notes:
        console.print(f"note: {note}")
    log_probs = log_probs_of(a, b)
    for line in [] if log_probs is None else _gap_lines(log_probs):
        console.print(line)
    console.print(f"first difference: {_place(comparison.first) or 'none, all bits are equal'}")
    console.print(f"first abrupt difference (excess above {ABRUPT:g}): {_place(comparison.abrupt) or 'none'}")
    nothing = "what is said above" if found else "nothing"
    if not found and comparison.first and comparison.only_log_probs:
        nothing = "nothing that log-probs alone can show: record tensors too (docs/diagnostics.md)"
    console.print(f"look at: {_place(comparison.location) or nothing}")
    return 3 if found or comparison.location or any(each.not_finite for each in comparison.differences) else 0


def _gap_lines(log_probs: LogProbs) -> list[str]:
    """The gap in a line, and one for each bound of other projects that it leaves."""
    values = log_probs.metrics()
    gap = f"mean |difference| {values[f'{GAP}/mean']:.3g} nats, largest {values[f'{GAP}/max']:.3g}"
    exact = f"{100 * values[f'{GAP}/exact_fraction']:.3g} % of {int(values['tokens_compared'])} tokens of equal bits"
    warnings = [f"warning: {text}" for text in gap_warnings(values).values()]
    return [f"log-probs: {gap}, {exact}, k3 {values['gen_kl_error']:.3g}", *warnings]


def _around(comparison: Comparison) -> list[Difference]:
    """The tensors before and behind the places, and the end."""
    places = [comparison.differences.index(x) for x in (comparison.first, comparison.abrupt) if x is not None]
    last = len(comparison.differences) - 1
    wanted = {i for p in places for i in range(p - 4, p + 5)} | {last - 1, last}
    return [each for i, each in enumerate(comparison.differences) if i in wanted]


def _place(each: Difference | None) -> str:
    if each is None:
        return ""
    where = f", first at sequence {each.first[0]}, position {each.first[1]}" if each.first else ""
    experts = f", experts {', '.join(map(str, each.experts))}" if each.experts else ""
    return f"{each.name}{experts}{where}"


def _style(each: Difference, comparison: Comparison) -> str:
    if each in (comparison.location, comparison.abrupt):
        return "bold red"
    return "green" if each.equal else ""


def _cells(each: Difference) -> list[str]:
    if each.equal:
        return [each.name, str(each.rows), "equal", "", "", "", "", "", "", ""]
    return [
        each.name, str(each.rows), f"{100 * each.differing:.3g} %", f"{each.max_abs:.3g}", f"{each.mean_abs:.3g}",
        "" if each.max_ulp is None else str(each.max_ulp), f"{each.relative:.3g}", f"{each.cosine:.6f}",
        "" if each.excess is None else f"{each.excess:.3g}", "" if each.first is None else f"{each.first[0]}:{each.first[1]}",
    ]  # fmt: skip


def main(argv):
    needed = {"trace": ("checkpoint", "tokens", "out"), "compare": ("first", "second")}[argv[1]]
    for name in needed:
        if not flags.FLAGS[name].value:
            raise UserError(f"--{name} is missing: {argv[1]} needs it ({flags.FLAGS[name].help.rstrip('.')})")
    if argv[1] == "trace":
        return write_trace()
    cli.check_page(_HTML.value)
    if _ATTRIBUTION.value and not _HTML.value:
        raise UserError("--attribution goes on a page: give --html=FILE too")
    return report(read(_FIRST.value), read(_SECOND.value))


if __name__ == "__main__":
    cli.run(main, commands=("trace", "compare"))
