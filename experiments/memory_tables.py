"""The tables of docs/models.md, and the page."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.memory_programs import Case, Growth, parts
from minite_jax.errors import UserError
from minite_jax.files import replaced
from minite_jax.metrics.results import NOT_RUN, read_results, to_markdown

MODELS = ("qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b")
RECIPES = ("bf16", "nvfp4")
H200_BYTES = 141e9
# The estimate may be a tenth too low, and the allocator needs some room.
USABLE = 0.9
_LENGTH, _PROMPT, _SAMPLES = 4096, 1024, 8
_UPDATE_ROWS, _SAMPLE_ROWS = (8, 32), (64, 512)

HELD, UPDATE, SAMPLER = "What a device holds", "The learner's update", "The sampler"
_GB = "GB"
COLUMNS = (
    dict(key="table", label="table", unit=""),
    dict(key="model", label="model", unit=""),
    dict(key="devices", label="GPUs", unit=""),
    dict(key="recipe", label="recipe", unit=""),
    dict(key="remat", label="remat", unit=""),
    dict(key="parameters", label="parameters", unit="10^9"),
    dict(key="masters", label="masters", unit=_GB),
    dict(key="moments", label="optimiser", unit=_GB),
    dict(key="gradients", label="gradients", unit=_GB),
    dict(key="stored", label="stored weights", unit=_GB),
    dict(key="cache", label="cache of a token", unit="kB"),
    dict(key="arguments", label="there before", unit=_GB),
    dict(key="results", label="new weights or tokens", unit=_GB),
    dict(key="temporaries", label="most in between", unit=_GB),
    dict(key="peak", label="peak", unit=_GB),
    dict(key="fits", label="fits an H200", unit=""),
    dict(key="most", label="most sequences on an H200", unit=""),
)
NOTES = (
    f"GB are 10^9 bytes; an H200 has 141, of which {USABLE:.0%} are counted on. Everything is for one device. Update: "
    f"{_UPDATE_ROWS[0]} sequences of {_LENGTH} tokens on each device. Sampler: {_SAMPLE_ROWS[0]} sequences of {_PROMPT} + "
    f"{_LENGTH - _PROMPT} tokens, {_SAMPLES} of each prompt, prompts read at once. On 8 GPUs experts are divided, each has "
    "the rest and as many tokens as its experts get from all (routing in balance); what travels between devices is not counted. "
    '"8, rest divided": masters, optimiser and gradients of the rest divided too, stored weights whole.'
)


def rows(models: Sequence[str]) -> Iterator[dict]:
    """The rows of all tables, as they are estimated."""
    blank = {column["key"]: "" for column in COLUMNS}
    for model in models:
        for recipe in RECIPES:
            for devices, case, state_devices in _layouts(model, recipe):
                held = parts(case, state_devices=state_devices)
                figures = {key: getattr(held, key) / 1e9 for key in ("parameters", "masters", "moments", "gradients", "stored")}
                yield blank | dict(table=HELD, model=model, devices=devices, recipe=recipe, **figures, cache=held.cache / 1e3)
    for table, program in ((UPDATE, _update), (SAMPLER, _sample)):
        for model in models:
            for recipe in RECIPES:
                for devices, case, state_devices in _layouts(model, recipe):
                    if state_devices == 1:
                        for changes, numbers in program():
                            row = dict(table=table, model=model, devices=devices, recipe=recipe)
                            yield blank | row | _program_row(dataclasses.replace(case, **changes), numbers)


def _layouts(model: str, recipe: str) -> Iterator[tuple[str, Case, int]]:
    """Ways to lay a model on GPUs: name, a case on one of them, over how many the state of what is no expert is divided."""
    case = Case(program="update", model=model, layers=0, recipe=recipe, rows=_UPDATE_ROWS[0], length=_LENGTH)
    yield "1" if case.config.is_moe else "1, or each of 8", case, 1
    shared = dataclasses.replace(case, expert_devices=8) if case.config.is_moe else case
    if case.config.is_moe:
        yield "8", shared, 1
    yield "8, rest divided", shared, 8


def _update() -> Iterator[tuple[dict, tuple[int, int]]]:
    for remat in (False, True):
        yield dict(remat=remat), _UPDATE_ROWS


def _sample() -> Iterator[tuple[dict, tuple[int, int]]]:
    yield (
        dict(program="sample", length=_PROMPT, new_tokens=_LENGTH - _PROMPT, samples=_SAMPLES, rows=_SAMPLE_ROWS[0]),
        _SAMPLE_ROWS,
    )


def _program_row(case: Case, numbers: tuple[int, int]) -> dict:
    growth, layers = Growth(case, numbers), case.config.num_hidden_layers
    peak, (arguments, results) = growth.peak(case.rows, layers), growth.outside(case.rows, layers)
    most = growth.most_rows(USABLE * H200_BYTES, layers) // case.samples * case.samples
    return dict(
        remat="" if case.program == "sample" else "yes" if case.remat else "no",
        arguments=arguments / 1e9,
        results=results / 1e9,
        temporaries=(peak - arguments - results) / 1e9,
        peak=peak / 1e9,
        fits="yes" if peak <= USABLE * H200_BYTES else "no",
        most=most or "none",
    )


def write_page(path: Path, folder: Path) -> Path:
    """Writes the result files of `folder` into a page, each block between its two marks; what is not there says "not run".

    Raises:
      UserError: there is no such page, or it lacks a mark.
    """
    if not path.is_file():
        raise UserError(f"there is no page {path}: give --page=FILE with the marks of docs/models.md")
    estimated = folder / "memory_estimate.json"
    measured = [each for each in sorted(folder.glob("memory_*.json")) if each != estimated]
    blocks = dict(estimates=[estimated] if estimated.exists() else [], calibration=measured)
    text = path.read_text()
    for name, files in blocks.items():
        begin, end = f"<!-- {name}: made by experiments.memory -->\n", f"<!-- end of {name} -->"
        if not 0 <= text.find(begin) < text.find(end):
            raise UserError(f"{path} lacks the lines {begin.strip()!r} and {end!r}, between which the {name} stand: put them in")
        before, rest = text.split(begin, 1)
        inside = "\n".join(to_markdown(read_results(each)) for each in files) or f"{NOT_RUN}\n"
        text = f"{before}{begin}\n{inside}\n{end}{rest.split(end, 1)[1]}"
    with replaced(path) as unfinished:
        unfinished.write_text(text)
    return path
