"""Writes a model's answer to a prompt, as it is sampled.

    python -m experiments.sample --checkpoint=runs/quickstart --prompt='26455?'
    python -m experiments.sample --checkpoint=models/Qwen3-0.6B --chat --nothinking --prompt='What is 2+2?' --temperature=0
    python -m experiments.sample --checkpoint=model.gguf --chat --prompt='What is 2+2?' --temperature=0

The checkpoint is the workdir of a run, a folder in Hugging Face's layout (plain or NVFP4), or a GGUF file. What flags do not say
is as the run sampled, or as the folder's generation_config.json says; the recipe is the run's or the NVFP4 folder's, or bf16. The
text goes to stdout, everything else to stderr.
With `--log_probs` there is a line for each token instead: its log-prob in nats (nine digits: every bit of the float32), its id,
and the text that is whole with it, as JSON. The same flags and seed give the same bits on the same machine.
"""

import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.model_files import open_model
from experiments.training import stored_run
from minite_jax.checkpoint.gguf import is_gguf
from minite_jax.errors import UserError
from minite_jax.text import TextStream, TextTokenizer, Tokenizer

_CHECKPOINT = cli.checkpoint_flag()
_PROMPT = flags.DEFINE_string("prompt", None, "What the model is given.")
_CHAT = flags.DEFINE_bool("chat", False, "Whether the prompt is what a user says, put into the model's chat template.")
_SYSTEM = flags.DEFINE_string("system", None, "With --chat: a message of the system before the prompt.")
_THINKING = flags.DEFINE_bool("thinking", None, "With --chat: whether the model may think first, where its template asks that.")
_RECIPE = cli.recipe_flag()
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy. Default: the checkpoint's.")
_TOP_P = flags.DEFINE_float("top_p", None, "Keep the most probable tokens up to this probability. Default: the checkpoint's.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Keep this many tokens; 0 keeps all. Default: the checkpoint's.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Most new tokens. Default: the run's; 512 for other models.")
_LOG_PROBS = flags.DEFINE_bool("log_probs", False, "Write log-prob, id and text of each token, a line for each.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.", lower_bound=0, upper_bound=2**32 - 1)

_MAX_NEW_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Source:
    """What a checkpoint gives.

    Attributes:
      load: reads the weights and quantises them by the recipe; slow, so everything else is checked before.
      tokenizer: the model's.
      sampling: how to sample where flags say nothing.
      max_prompt: most tokens of a prompt.
      max_sequence: most tokens of prompt and answer.
      limit: why there are no more, in words.
    """

    load: Callable[[], mt.Policy]
    tokenizer: TextTokenizer
    sampling: mt.SamplingParams
    max_prompt: float
    max_sequence: float
    limit: str


def open_checkpoint(folder: Path, recipe: str | None = None) -> Source:
    """Looks into a checkpoint of either kind.

    Raises:
      UserError: there is none, or it does not fit together.
    """
    if is_gguf(folder):
        return _open_model(folder, recipe)
    if folder.is_file():
        raise UserError(f"--checkpoint={folder} is no GGUF file; give one, or the workdir of a run or the folder of a model")
    if not folder.is_dir():
        raise UserError(f"--checkpoint={folder}: there is no such folder; give the workdir of a run or the folder of a model")
    if (folder / "checkpoints").is_dir():
        return _open_run(folder, recipe)
    if (folder / "config.json").is_file():
        return _open_model(folder, recipe)
    raise UserError(
        f"--checkpoint={folder} has neither checkpoints/, as the workdir of a run has, nor config.json, as a model's folder has"
    )


def _open_run(folder: Path, recipe: str | None) -> Source:
    run = stored_run(folder)
    setup, task = run.setup, run.setup.task
    chosen = mt.recipe(recipe) if recipe else setup.recipe
    return Source(
        load=lambda: mt.prepare(run.state.train.params, setup.model, chosen),
        tokenizer=task.tokenizer,
        sampling=dataclasses.replace(setup.sampling, n=1),
        max_prompt=task.max_prompt_tokens,
        max_sequence=math.inf,
        limit=f"prompts of its task, {run.config.task.name}, have at most {task.max_prompt_tokens}, such as "
        f"{task.example('heldout', 0).prompt!r}",
    )


def _open_model(path: Path, recipe: str | None) -> Source:
    model, chosen = open_model(path), mt.recipe(recipe) if recipe else None

    def load():
        _note(f"reading {path}")
        return model.prepare(chosen)

    return Source(
        load=load,
        tokenizer=model.tokenizer,
        sampling=mt.SamplingParams(**model.sampling, max_tokens=_MAX_NEW_TOKENS, stop_ids=model.tokenizer.stop_ids),
        max_prompt=model.positions,
        max_sequence=model.positions,
        limit=f"the model has {model.positions} positions",
    )


def sampling_params(source: Source) -> mt.SamplingParams:
    """The checkpoint's, changed by the flags."""
    given = dict(
        temperature=_TEMPERATURE.value, top_p=_TOP_P.value, top_k=_TOP_K.value, max_tokens=_MAX_TOKENS.value
    )  # fmt: skip
    return dataclasses.replace(source.sampling, **{name: value for name, value in given.items() if value is not None})


def prompt_ids(source: Source, max_tokens: int) -> list[int]:
    """Token ids of the prompt as the flags want it.

    Raises:
      UserError: flags that do not go together, a model without a chat template, a prompt that is too long.
    """
    tokenizer, prompt = source.tokenizer, _PROMPT.value
    if _CHAT.value:
        if not isinstance(tokenizer, Tokenizer):
            raise UserError(f"--chat: {_CHECKPOINT.value} is no chat model, its tokens are bytes; leave --chat out")
        system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value is not None else []
        messages = [*system, {"role": "user", "content": prompt}]
        ids = tokenizer.encode_chat(messages, add_generation_prompt=True, enable_thinking=_THINKING.value)
    else:
        for name, value in (("system", _SYSTEM.value), ("thinking", _THINKING.value)):
            if value is not None:
                raise UserError(f"--{name} is for a chat: give --chat too, or leave it out")
        ids = tokenizer.encode(prompt, add_special=True) if isinstance(tokenizer, Tokenizer) else tokenizer.encode(prompt)
    if len(ids) > source.max_prompt:
        raise UserError(f"the prompt is too long, {len(ids)} tokens: {source.limit}")
    if len(ids) + max_tokens > source.max_sequence:
        parts = f"the prompt, {len(ids)} tokens, and --max_tokens={max_tokens}"
        raise UserError(f"{parts} are too long together: {source.limit}; lower --max_tokens")
    return ids


def write(policy: mt.Policy, tokenizer: TextTokenizer, ids: list[int], params: mt.SamplingParams) -> None:
    """Samples and writes, to stdout; then how it ended and how fast it was, to stderr."""
    # Lines of tokens show all of them; text leaves out the marks.
    text = TextStream(tokenizer, hide=() if _LOG_PROBS.value else tokenizer.special_ids)
    start, first, count, token, total = time.perf_counter(), 0.0, 0, -1, 0.0
    for token, log_prob in mt.stream(policy, ids, params, key=jax.random.key(_SEED.value)):
        first = first or time.perf_counter() - start
        count, total = count + 1, total + log_prob
        piece = text.push(token)
        if _LOG_PROBS.value:
            piece = f"{log_prob:.9g}\t{token}\t{json.dumps(piece, ensure_ascii=False)}\n"
        sys.stdout.write(piece)
        sys.stdout.flush()
    rest = text.finish()
    if not _LOG_PROBS.value:
        print(rest)
    elif rest:
        print(f"\t\t{json.dumps(rest, ensure_ascii=False)}")
    seconds = time.perf_counter() - start - first
    mark = json.dumps(tokenizer.decode([token]), ensure_ascii=False)
    ended = f"ended by {mark}" if token in params.stop_ids else f"cut at --max_tokens={params.max_tokens}"
    speed = f", then {(count - 1) / seconds:.3g} a second" if count > 1 else ""
    _note(f"{len(ids)} tokens in, {count} out, {ended}; log-prob {total:.6g} nats; the first after {first:.1f} s{speed}")


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def main(argv):
    del argv
    if jax.default_backend() != "gpu":
        logging.getLogger("pallas_kernels").setLevel(logging.WARNING)  # every operation runs as the reference: nothing to say
    source = open_checkpoint(Path(_CHECKPOINT.value), _RECIPE.value)
    params = sampling_params(source)
    ids = prompt_ids(source, params.max_tokens)
    write(source.load(), source.tokenizer, ids, params)


if __name__ == "__main__":
    cli.run(main, required=("checkpoint", "prompt"))
