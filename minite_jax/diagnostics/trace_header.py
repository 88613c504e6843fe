"""What a trace says of itself, and whether it can be so: rows, row sets, tensors and files of docs/trace_format.md."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minite_jax.checkpoint.huggingface.files import without_duplicates
from minite_jax.errors import UserError

FORMAT, VERSION = "minite_jax trace", 1
HEADER = "trace.json"
_ROWS = {"token_ids": 1 << 31, "positions": 1 << 24, "sequences": 1 << 22}  # each list of the rows, and what is too large in it


class TraceError(UserError):
    """A trace that cannot be read or written; the message says which file and which tensor."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows of a trace are: one for each token that the engine read.

    Attributes:
      token_ids: [R] int32 (any integers are taken).
      positions: [R] int32, from 0 in each sequence.
      sequences: [R] int32, number of the sequence.
    """

    token_ids: Any
    positions: Any
    sequences: Any

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), np.int32).reshape(-1))
        if not len(self.token_ids) == len(self.positions) == len(self.sequences):
            raise TraceError(
                f"{len(self.token_ids)} token ids, {len(self.positions)} positions and {len(self.sequences)} sequence numbers: "
                "a trace has one of each for every row"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


def json_of(text: str, where: str) -> Any:
    """Reads JSON from a file of somebody else.

    Raises:
      TraceError: it is no JSON, has a key twice, or is nested beyond reason.
    """
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON ({error}): it is cut off, was edited, or is of another kind") from None


def text_of(path: Path, what: str) -> str:
    """A text file, without the mark that some editors put in front.

    Raises:
      TraceError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): give {what}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8 (byte {error.start}): give {what}") from None


def check_numbers(where: str, what: str, values: Any, end: int) -> None:
    """Refuses what is no list of integers from 0 to `end` - 1.

    Raises:
      TraceError: names the first wrong entry.
    """
    if not isinstance(values, list):
        raise TraceError(f"{where}: {what} are {_short(values)}, not a list of integers")
    wrong = next((i for i, each in enumerate(values) if type(each) is not int or not 0 <= each < end), None)
    if wrong is not None:
        raise TraceError(f"{where}: entry {wrong} of {what} is {_short(values[wrong])}, not an integer from 0 to {end - 1}")


def check_rows(where: str, rows: Mapping[str, Any]) -> None:
    """Refuses lists that are no rows.

    Raises:
      TraceError: a list is missing, of another length than the others or holds something else, or a row is there twice.
    """
    for key, end in _ROWS.items():
        if not isinstance(rows.get(key), list):
            raise TraceError(f"{where}: rows lack {key!r}, a list of integers: see docs/trace_format.md")
        check_numbers(where, key, rows[key], end)
    known = Rows(*(rows[key] for key in _ROWS))
    keys, counts = np.unique(np.stack([known.sequences, known.positions]), axis=1, return_counts=True)
    if (counts > 1).any():
        sequence, position = keys[:, np.argmax(counts > 1)]
        raise TraceError(f"{where}: sequence {sequence}, position {position} is there twice; a row is one token of one sequence")


def read_header(path: Path) -> dict[str, Any]:
    """The header of a trace's folder.

    Raises:
      TraceError: there is none, or it is not what docs/trace_format.md says; names the file and the field.
    """
    if not path.exists():
        raise TraceError(f"there is no trace {path}: give the folder that holds {HEADER}")
    file = path / HEADER
    if not file.is_file():
        hint = "its writing was interrupted" if path.name.endswith(".tmp") else "give the folder of a trace"
        raise TraceError(f"{path} holds no {HEADER}: {hint}")
    header = json_of(text_of(file, "the folder of a trace"), str(file))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{file} is no header of a trace: its \"format\" must be '{FORMAT}'")
    if header.get("version") != VERSION:
        raise TraceError(f"{file} has version {header.get('version')!r}; this reader knows {VERSION}")
    for key in ("model", "sampling", "row_sets"):
        header[key] = header.get(key) or {}
    for key in ("engine", "model", "sampling", "rows", "row_sets", "tensors", "files"):
        if not isinstance(header.get(key), dict):
            how = "lacks" if key not in header else f"has {_short(header[key])} for"
            raise TraceError(f"{file} {how} {key!r}, which must be an object: see docs/trace_format.md")
    for where, key in (("model", "config"), ("model", "weights"), ("engine", "versions")):
        part = header[where]
        part[key] = part.get(key) or {}
        if not isinstance(part[key], dict):
            raise TraceError(f"{file}: {key!r} of the {where} is {_short(part[key])}, not an object")
    check_rows(str(file), header["rows"])
    _check_sampling(file, header["sampling"])
    rows = len(header["rows"]["token_ids"])
    for name, numbers in header["row_sets"].items():
        check_numbers(str(file), f"row set {name!r}", numbers, rows)
        if len(set(numbers)) < len(numbers):
            raise TraceError(f"{file}: row set {name!r} has a row twice")
    for name, entry in header["tensors"].items():
        if not isinstance(entry, dict) or "dtype" not in entry or not isinstance(entry.get("shape"), list):
            raise TraceError(f"{file}: tensor {name} is described as {_short(entry)}, it needs dtype and shape")
        row_set = entry.get("rows")
        if row_set is not None and (not isinstance(row_set, str) or row_set not in header["row_sets"]):
            raise TraceError(f"{file}: tensor {name} has rows {_short(row_set)}, which row_sets lacks")
    for part, size in header["files"].items():
        if part != Path(part).name or type(size) is not int:
            raise TraceError(f"{file}: part {_short(part)} of size {_short(size)}; a part is a file of this folder and its bytes")
    return header


def _check_sampling(file: Path, sampling: Mapping[str, Any]) -> None:
    for key in ("temperature", "top_k", "top_p"):
        value = sampling.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < float("inf")):
            raise TraceError(f"{file}: {key} is {_short(value)}, not a number from 0 on")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
