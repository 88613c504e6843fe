"""Token ids and log-probs from the JSONL files that RL frameworks write, as a trace without activations.

Known fields, tried in this order; a record is one sequence. Names are those of the frameworks' batches as of November 2026;
where a logger calls them otherwise, say how (`log_probs=`).

==============  ==========================  ============================  ============================================
framework       all tokens                  prompt, completion            log-probs of the completion
==============  ==========================  ============================  ============================================
slime, Miles    tokens + response_length                                  rollout_log_probs, log_probs
verl            input_ids                   prompts, responses            rollout_log_probs, old_log_probs
NeMo-RL         token_ids, input_ids                                      generation_logprobs, prev_logprobs (all tokens)
TRL             prompt_completion_ids       prompt_ids, completion_ids    sampling_per_token_logps, old_per_token_logps
vLLM                                        prompt_token_ids, token_ids   logprobs
==============  ==========================  ============================  ============================================

Log-probs may be as many as the completion, as all tokens (the first is then nobody's), or as all tokens but the first.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, Trace, TraceError, add_row_set, new_header

_ALL = ("tokens", "token_ids", "input_ids", "prompt_completion_ids")
_PROMPT = ("prompt_token_ids", "prompt_ids", "prompts", "prompt_tokens")
_COMPLETION = ("completion_ids", "responses", "response_ids", "output_token_ids", "completion_token_ids", "token_ids")
LOG_PROBS = (
    "rollout_log_probs", "generation_logprobs", "sampling_per_token_logps", "rollout_logprobs", "logprobs", "log_probs",
    "prev_logprobs", "old_log_probs", "old_per_token_logps",
)  # fmt: skip


def read_log(path: str | Path, log_probs: str | None = None) -> Trace:
    """Reads a JSONL file.

    Args:
      path: the file, one JSON object a line.
      log_probs: name of the field, None: the first of `LOG_PROBS` that the first record has.

    Returns:
      A trace with ``final/log_prob`` alone; sequence i is line i + 1.

    Raises:
      TraceError: a line that is no JSON object, lacks a field, or whose lengths do not fit; names line and field.
    """
    path = Path(path)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error}): give a JSONL file") from None
    ids, positions, sequences, scored, values = [], [], [], [], []
    temperature = None
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        record = _record(where, line)
        log_probs = log_probs or next((name for name in LOG_PROBS if name in record), None)
        if log_probs is None or log_probs not in record:
            raise TraceError(f"{where}: no log-probs; it has {', '.join(sorted(record))}: say which field with --log_probs")
        tokens, prompt = _tokens(where, record, len(_numbers(where, log_probs, record[log_probs])))
        start, logged = len(ids), _numbers(where, log_probs, record[log_probs])
        first = {len(tokens) - prompt: prompt, len(tokens): 0, len(tokens) - 1: 1}.get(len(logged))
        if first is None:
            raise TraceError(f"{where}: {len(logged)} {log_probs} for {len(tokens)} tokens, of which {prompt} are the prompt")
        for i, value in enumerate(logged, start=first):
            if i >= max(prompt, 1):  # the log-prob of token i stands in the row of token i - 1
                scored.append(start + i - 1)
                values.append(value)
        ids += tokens
        positions += range(len(tokens))
        sequences += [number - 1] * len(tokens)
        temperature = record.get("temperature", temperature)
    if not values:
        raise TraceError(f"{path} holds no log-prob")
    sampling = {} if temperature is None else {"temperature": float(temperature)}
    engine = {"name": f"log {path.name}", "field": log_probs}
    header = new_header(Rows(ids, positions, sequences), engine=engine, sampling=sampling)
    add_row_set(header, "scored", scored)
    trace = MemoryTrace(header)
    trace.add("final/log_prob", np.array(values, np.float32), "scored")
    return trace.close()


def _record(where: str, line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON ({error}): the file is cut off or of another kind") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where} is no JSON object")
    return record


def _tokens(where: str, record: Mapping[str, Any], num_log_probs: int) -> tuple[list[int], int]:
    """All tokens, and how many of them are the prompt."""
    prompt = next((name for name in _PROMPT if _is_ids(record.get(name))), None)
    completion = next((name for name in _COMPLETION if _is_ids(record.get(name))), None)
    if prompt and completion:
        return [*record[prompt], *record[completion]], len(record[prompt])
    whole = next((name for name in _ALL if _is_ids(record.get(name))), None)
    if whole is None:
        raise TraceError(f"{where}: no token ids; it has {', '.join(sorted(record))}: see minite_jax/diagnostics/logs.py")
    tokens = list(record[whole])
    length = record.get("response_length", num_log_probs)
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise TraceError(f"{where}: response_length {length!r} does not fit {len(tokens)} {whole}")
    return tokens, len(tokens) - length if length < len(tokens) else 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _numbers(where: str, name: str, value: Any) -> list[float]:
    """Numbers as they are; null is NaN, which a comparison reports."""
    if not isinstance(value, list):
        raise TraceError(f"{where}: {name} is {type(value).__name__}, not a list of numbers")
    numbers = [math.nan if each is None else each for each in value]
    if not all(isinstance(each, int | float) for each in numbers):
        raise TraceError(f"{where}: {name} holds something that is no number")
    return [float(each) for each in numbers]
