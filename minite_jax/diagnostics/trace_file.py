"""Traces: named tensors of one run of one engine, in memory or in a folder. The layout is specified in docs/trace_format.md.

    trace = open_trace("runs/vllm-trace")
    trace.header["engine"]["name"], trace.names[:3]
    array, rows = trace.read("layer.3/attention/qkv")       # only this tensor is read
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minite_jax.checkpoint.huggingface import files
from minite_jax.diagnostics.trace_header import FORMAT, HEADER, VERSION, Rows, TraceError, read_header
from minite_jax.files import replaced

_DTYPES = {
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# A writer holds about so many bytes before it writes a file.
PART_BYTES = 1 << 30


class Trace:
    """A trace that is read tensor by tensor.

    Args:
      header: as `new_header` makes it, with "tensors" in execution order.
      load: gives the array of a name.
      where: for messages.
    """

    def __init__(self, header: Mapping[str, Any], load: Callable[[str], np.ndarray], where: str):
        self.header, self._load, self.where = header, load, where
        self.rows = Rows(*(header["rows"][key] for key in ("token_ids", "positions", "sequences")))

    @property
    def names(self) -> list[str]:
        """Names of the tensors in execution order."""
        return list(self.header["tensors"])

    def __contains__(self, name: str) -> bool:
        return name in self.header["tensors"]

    def row_numbers(self, name: str) -> np.ndarray:
        """[n] int64, the trace's rows that this tensor has.

        Raises:
          TraceError: there is no such tensor.
        """
        row_set = self._entry(name).get("rows")
        return np.arange(len(self.rows)) if row_set is None else np.asarray(self.header["row_sets"][row_set], np.int64)

    def read(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A tensor [n, ...] and the rows [n] that it has.

        Raises:
          TraceError: there is no such tensor, or its file cannot be read.
        """
        numbers = self.row_numbers(name)
        return self._load(name), numbers

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self.header["tensors"]:
            raise TraceError(f"{self.where} has no tensor {name}; it has {', '.join(self.names[:4])}, ... ({len(self.names)})")
        return self.header["tensors"][name]


def new_header(
    rows: Rows,
    *,
    engine: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A header without tensors. See docs/trace_format.md for the fields."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "engine": dict(engine),
        "model": dict(model or {}),
        "sampling": dict(sampling or {}),
        "rows": {field.name: getattr(rows, field.name).tolist() for field in dataclasses.fields(rows)},
        "row_sets": {},
        "tensors": {},
        "files": {},
    }


class MemoryTrace:
    """Collects a trace in memory.

    Args:
      header: see `new_header`.
      where: for messages.
    """

    def __init__(self, header: dict[str, Any], where: str = "the trace in memory"):
        self._header, self._arrays, self._where = header, {}, where

    def add(self, name: str, array: np.ndarray, rows: str | None = None) -> None:
        """Adds a tensor, see `TraceWriter.add`."""
        self._header["tensors"][name] = _entry(self._header, name, array, rows)
        self._arrays[name] = np.asarray(array)

    def close(self) -> Trace:
        """The trace."""
        return Trace(self._header, self._arrays.__getitem__, self._where)


class TraceWriter:
    """Writes a trace into a folder, a part at a time; the folder has its name only when it is complete.

    Args:
      path: folder to make; must not exist.
      header: see `new_header`.
      part_bytes: about so many bytes are held before they are written.

    Raises:
      TraceError: the folder exists.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, part_bytes: int = PART_BYTES):
        if path.exists():
            raise TraceError(f"{path} exists: give the name of a new folder, or remove it")
        self._path, self._header, self._part_bytes = path, header, part_bytes
        self._unfinished = path.with_name(path.name + ".tmp")
        if self._unfinished.exists():
            shutil.rmtree(self._unfinished)  # of a writer that was interrupted
        self._unfinished.mkdir(parents=True)
        self._held: dict[str, np.ndarray] = {}

    def add(self, name: str, array: np.ndarray, rows: str | None = None) -> None:
        """Adds a tensor; tensors come in execution order.

        Args:
          name: of the tensor, new.
          array: [n, ...], n the rows of the trace or of `rows`.
          rows: name of the row set that the tensor has, None: all.

        Raises:
          TraceError: a name that is there already, a type that traces do not have, or the wrong number of rows.
        """
        entry = _entry(self._header, name, array, rows)
        self._held[name] = np.ascontiguousarray(array)
        part = f"part-{len(self._header['files']):05d}.safetensors"
        self._header["tensors"][name] = {**entry, "file": part}
        if sum(each.nbytes for each in self._held.values()) >= self._part_bytes:
            self._write_part()

    def _write_part(self) -> None:
        part = f"part-{len(self._header['files']):05d}.safetensors"
        order, head, size = files.make_header({name: (_NAMES[x.dtype], x.shape) for name, x in self._held.items()})
        with (self._unfinished / part).open("wb") as file:
            file.write(head)
            for name in order:
                file.write(memoryview(self._held[name].reshape(-1).view(np.uint8)))
        self._header["files"][part] = size
        self._held = {}

    def close(self) -> Trace:
        """Writes what is held, gives the folder its name and returns the trace."""
        if self._held:
            self._write_part()
        with replaced(self._unfinished / HEADER) as path:
            path.write_text(json.dumps(self._header, allow_nan=False))
        self._unfinished.rename(self._path)
        return open_trace(self._path)


def add_row_set(header: dict[str, Any], name: str, numbers: Sequence[int] | np.ndarray) -> None:
    """Names a part of the rows, for tensors that do not have all."""
    header["row_sets"][name] = np.asarray(numbers).tolist()


def _entry(header: Mapping[str, Any], name: str, array: np.ndarray, rows: str | None) -> dict[str, Any]:
    if name in header["tensors"]:
        raise TraceError(f"tensor {name} is there twice: give each call of an operation its own name")
    if np.dtype(array.dtype) not in _NAMES:
        raise TraceError(f"tensor {name} is {array.dtype}; a trace holds {', '.join(_DTYPES)}")
    wanted = len(header["rows"]["token_ids"]) if rows is None else len(header["row_sets"][rows])
    if array.ndim < 1 or array.shape[0] != wanted:
        raise TraceError(f"tensor {name} has shape {tuple(array.shape)}; its first axis must be the {wanted} rows of the trace")
    entry = {"dtype": _NAMES[np.dtype(array.dtype)], "shape": list(array.shape)}
    return entry if rows is None else {**entry, "rows": rows}


def open_trace(path: str | Path) -> Trace:
    """Opens a folder and checks its files against its header; reads no tensor.

    Raises:
      TraceError: no trace, another version, a part that is missing or cut off, a tensor that is missing or of another shape.
    """
    path = Path(path)
    header = read_header(path)
    found: dict[str, files.Tensor] = {}
    for part, size in header["files"].items():
        file = path / part
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} of {size} bytes: it is cut off"
            raise TraceError(f"{file} {state}; copy the whole folder again")
        tensors = files.read_header(file)[0]
        twice = next((name for name in tensors if name in found), None)
        if twice is not None:
            raise TraceError(f"{path}: tensor {twice} is in {found[twice].path.name} and in {part}; write the trace again")
        found |= tensors
    for name, entry in header["tensors"].items():
        if name not in found:
            raise TraceError(f"{path}: tensor {name} is in {HEADER} but in none of its files; write the trace again")
        there = found[name]
        if (there.dtype, list(there.shape)) != (entry["dtype"], entry["shape"]):
            raise TraceError(
                f"{path}: tensor {name} is {there.dtype} {list(there.shape)}, {HEADER} says {entry['dtype']} {entry['shape']}"
            )
        if there.dtype not in _DTYPES:
            raise TraceError(f"{path}: tensor {name} is {there.dtype}; traces hold {', '.join(_DTYPES)}")

    def load(name: str) -> np.ndarray:
        there = found[name]
        if not there.nbytes:
            return np.zeros(there.shape, _DTYPES[there.dtype])
        raw = np.memmap(there.path, np.uint8, "r", there.offset, (there.nbytes,))
        return raw.view(_DTYPES[there.dtype]).reshape(there.shape)

    trace = Trace(header, load, str(path))
    for name, entry in header["tensors"].items():
        rows = len(trace.row_numbers(name))
        if not entry["shape"] or entry["shape"][0] != rows:
            raise TraceError(f"{path}: tensor {name} has shape {entry['shape']}; its first axis must be its {rows} rows")
    return trace


def copy_trace(trace: Trace, path: Path, names: Iterable[str] | None = None) -> Trace:
    """Writes a trace, or the tensors of it that are named, to a new folder."""
    header = {**trace.header, "tensors": {}, "files": {}}
    writer = TraceWriter(path, header)
    for name in trace.names if names is None else names:
        array, _ = trace.read(name)
        writer.add(name, array, trace.header["tensors"][name].get("rows"))
    return writer.close()
