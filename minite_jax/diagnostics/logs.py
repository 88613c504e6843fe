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

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, Trace, TraceError, add_row_set, new_header
from minite_jax.diagnostics.trace_header import check_numbers, json_of, text_of

_Host = Array | np.ndarray
_ALL = ("tokens", "token_ids", "input_ids", "prompt_completion_ids")
_PROMPT = ("prompt_token_ids", "prompt_ids", "prompts", "prompt_tokens")
_COMPLETION = ("completion_ids", "responses", "response_ids", "output_token_ids", "completion_token_ids", "token_ids")
_MOST_IDS = 1 << 31
LOG_PROBS = (
    "rollout_log_probs", "generation_logprobs", "sampling_per_token_logps", "rollout_logprobs", "logprobs", "log_probs",
    "prev_logprobs", "old_log_probs", "old_per_token_logps",
)  # fmt: skip


def read_log(path: str | Path, log_probs: str | None = None) -> Trace:
    """Reads a JSONL file.

    Args:
      path: the file, one JSON object a line; empty lines are skipped.
      log_probs: name of the field, None: the first of `LOG_PROBS` that the first record has.

    Returns:
      A trace with ``final/log_prob`` alone; sequence i is record i, from 0 on.

    Raises:
      TraceError: a line that is no JSON object, lacks a field, or whose lengths do not fit; names line and field.
    """
    path = Path(path)
    text = text_of(path, "a JSONL file, or the folder of a trace")
    if not text.strip():
        raise TraceError(f"{path} is empty: give a file of one JSON object a line")
    ids, positions, sequences, scored, values = [], [], [], [], []
    temperature = None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    for sequence, (number, line) in enumerate(lines):
        where = f"{path}, line {number}"
        record = _record(where, line)
        log_probs = log_probs or next((name for name in LOG_PROBS if name in record), None)
        if log_probs is None or log_probs not in record:
            raise TraceError(f"{where}: no log-probs{_fields(record)}: say which field holds them (--log_prob_field)")
        logged = _numbers(where, log_probs, record[log_probs])
        tokens, prompt = _tokens(where, record, len(logged))
        start = len(ids)
        first = {len(tokens) - prompt: prompt, len(tokens): 0, len(tokens) - 1: 1}.get(len(logged))
        if first is None:
            raise TraceError(f"{where}: {len(logged)} {log_probs} for {len(tokens)} tokens, of which {prompt} are the prompt")
        for i, value in enumerate(logged, start=first):
            if i >= max(prompt, 1):  # the log-prob of token i stands in the row of token i - 1
                scored.append(start + i - 1)
                values.append(value)
        ids += tokens
        positions += range(len(tokens))
        sequences += [sequence] * len(tokens)
        temperature = _temperature(where, record, temperature)
    if not values:
        raise TraceError(f"{path} holds no log-prob: no record has a completion")
    sampling = {} if temperature is None else {"temperature": temperature}
    engine = {"name": f"log {path.name}", "field": log_probs}
    header = new_header(Rows(ids, positions, sequences), engine=engine, sampling=sampling)
    add_row_set(header, "scored", scored)
    trace = MemoryTrace(header, str(path))
    trace.add("final/log_prob", np.array(values, np.float32), "scored")
    return trace.close()


def trace_of_log_probs(
    tokens: Int[_Host, "B T"],
    log_probs: Float[_Host, "B T1"],
    mask: Bool[_Host, "B T1"],
    *,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any] | None = None,
) -> Trace:
    """Log-probs in arrays as a trace with ``final/log_prob`` alone.

    Args:
      tokens: [B, T], padded behind each sequence.
      log_probs: [B, T - 1] nats; column t belongs to token t + 1, as in `minite_jax.token_log_probs`.
      mask: [B, T - 1], where they count. A sequence ends behind its last one.
      engine, sampling: for the header, see docs/trace_format.md.
    """
    tokens, log_probs, mask = (np.asarray(each) for each in (tokens, log_probs, mask))
    length_B = np.where(mask.any(1), mask.shape[1] - np.argmax(mask[:, ::-1], axis=1) + 1, 0)
    there_BT = np.arange(tokens.shape[1]) < length_B[:, None]
    sequence_BT, position_BT = np.indices(tokens.shape)
    header = new_header(Rows(tokens[there_BT], position_BT[there_BT], sequence_BT[there_BT]), engine=engine, sampling=sampling)
    number_BT = np.cumsum(there_BT.reshape(-1)).reshape(tokens.shape) - 1
    add_row_set(header, "scored", number_BT[:, :-1][mask])
    trace = MemoryTrace(header, str(engine.get("name", "log-probs")))
    trace.add("final/log_prob", log_probs[mask].astype(np.float32), "scored")
    return trace.close()


def _record(where: str, line: str) -> Mapping[str, Any]:
    if line.lstrip().startswith("["):
        raise TraceError(f"{where} begins a JSON array: JSONL has one object a line (`jq -c '.[]'` makes that of an array)")
    record = json_of(line, where)
    if not isinstance(record, dict):
        raise TraceError(f"{where} is no JSON object")
    return record


def _fields(record: Mapping[str, Any]) -> str:
    return f"; it has {', '.join(sorted(record))}" if record else "; it has no field"


def _temperature(where: str, record: Mapping[str, Any], before: float | None) -> float | None:
    """The temperature of the file, which is that of every record that says one."""
    value = record.get("temperature")
    if value is None:
        return before
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: temperature is {value!r}, not a number from 0 on")
    if before is not None and value != before:
        raise TraceError(f"{where}: temperature {value:g}, but {before:g} on the lines before; split the file by temperature")
    return float(value)


def _tokens(where: str, record: Mapping[str, Any], num_log_probs: int) -> tuple[list[int], int]:
    """All tokens, and how many of them are the prompt."""
    prompt = next((name for name in _PROMPT if _is_ids(record.get(name))), None)
    completion = next((name for name in _COMPLETION if _is_ids(record.get(name))), None)
    whole = next((name for name in _ALL if _is_ids(record.get(name))), None)
    if not (prompt and completion) and whole is None:
        # A field that looks like them says more than that there are none.
        for name in (*_COMPLETION, *_ALL, *_PROMPT):
            if isinstance(record.get(name), list):
                check_numbers(where, name, record[name], _MOST_IDS)
        raise TraceError(f"{where}: no token ids{_fields(record)}: see minite_jax/diagnostics/logs.py for the names")
    for name in (prompt, completion) if prompt and completion else (whole,):
        check_numbers(where, name, record[name], _MOST_IDS)
    if prompt and completion:
        return [*record[prompt], *record[completion]], len(record[prompt])
    tokens = list(record[whole])
    length = record.get("response_length", num_log_probs)
    if type(length) is not int or not 0 <= length <= len(tokens):
        raise TraceError(f"{where}: response_length {length!r} does not fit {len(tokens)} {whole}")
    return tokens, len(tokens) - length if length < len(tokens) else 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _numbers(where: str, name: str, value: Any) -> list[float]:
    """Numbers as they are; null is NaN, which a comparison reports."""
    if not isinstance(value, list):
        raise TraceError(f"{where}: {name} is {type(value).__name__}, not a list of numbers")
    wrong = next((each for each in value if type(each) not in (int, float, type(None))), None)
    if wrong is not None:
        raise TraceError(f"{where}: {name} holds {str(wrong)[:60]!r}, which is no number")
    try:
        return [math.nan if each is None else float(each) for each in value]
    except OverflowError:
        raise TraceError(f"{where}: {name} holds an integer that is no float") from None
