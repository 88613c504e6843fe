"""Metrics of a run: always one JSON line per step in `metrics.jsonl`, TensorBoard events beside it by choice.

JSON has no NaN or infinity, and a step that went wrong must not vanish from the record: the three numbers
are written as the strings "NaN", "Infinity" and "-Infinity", and `read_metrics` turns them back into floats.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minite_jax.errors import UserError
from minite_jax.metrics import names
from minite_jax.optional import require

FILE_NAME = "metrics.jsonl"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(UserError):
    """A metrics file that cannot be read, written or continued."""


@runtime_checkable
class MetricWriter(Protocol):
    """Takes the metrics of one step after another; steps increase."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records scalars (Python, NumPy or JAX numbers, booleans, strings, None) under `step`."""

    def close(self) -> None:
        """Ends the record. Further writes are errors."""


def encode_scalar(value: Any) -> bool | int | float | str | None:
    """Returns `value` as JSON can hold it: non-finite numbers become "NaN", "Infinity", "-Infinity".

    Args:
        value: None, a string, or any scalar number or boolean, 0-dimensional arrays included.

    Raises:
        TypeError: `value` is not a scalar.
    """
    if value is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.ndim != 0:
        raise TypeError(f"a metric is a scalar, but this one has shape {array.shape}: take its mean, say")
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"a metric is a number, a boolean, a string or None, not {array.dtype}")
    plain = array.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    return plain


def decode_scalar(value: Any) -> Any:
    """The inverse of `encode_scalar`."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a `metrics.jsonl`, or the one in a run's folder: one dict per step, in file order.

    A last line that was cut off (the process died while it wrote) is left out.

    Raises:
        MetricsError: there is no such file, or a line is not a JSON object with an integer `step`.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise MetricsError(f"there is no metrics file {path}: give the --workdir of a run") from None
    lines.pop()  # what follows the last newline: empty, or a line that was cut off
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get(names.STEP)) is not int:
            raise MetricsError(f"{path}, line {number}: not a JSON object with a step; mend or delete it")
        rows.append({key: decode_scalar(value) for key, value in row.items()})
    return rows


class JsonlWriter:
    """Writes `metrics.jsonl` in a run's folder; a line is on its way to the disk when `write` returns.

    Args:
        workdir: folder of the run, made if missing.
        resume_step: None for a new run. A resumed run gives the first step that it will write: older lines
            stay, lines from that step on belong to a future that will be run again and are cut away. With 0 none
            stays, and the old file need not be readable. The shorter file is written beside the old one and then
            renamed, so a crash leaves one of the two whole.

    Raises:
        MetricsError: a new run in a folder that has a metrics file already, or a file that cannot be read.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int | None = None):
        self.path = Path(workdir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        if self.path.exists():
            if resume_step is None:
                raise MetricsError(f"{self.path} exists already: resume that run or choose another --workdir")
            self._cut(resume_step)
        self._file = self.path.open("ab", buffering=0)

    def _cut(self, resume_step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row[names.STEP] < resume_step] if resume_step else []
        shorter = self.path.with_name(FILE_NAME + ".tmp")
        with shorter.open("wb") as file:
            file.write(b"".join(_line(row) for row in kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(shorter, self.path)
        self._last_step = resume_step - 1

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line.

        Raises:
            ValueError: `step` does not increase, or `values` names another step.
            TypeError: a value is not a scalar.
            MetricsError: the line could not be written, on a full disk for instance. The file then ends with
                the line before.
        """
        step = int(step)
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: the steps of metrics must increase")
        if values.get(names.STEP, step) != step:
            raise ValueError(f"metrics of step {step} name another step, {values[names.STEP]}")
        line = _line({names.STEP: step, **values})
        end = self.path.stat().st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted: is the disk full?")
        except OSError as error:
            os.truncate(self.path, end)  # half a line would spoil the file for every reader
            reason = error.strerror or error
            raise MetricsError(f"could not write step {step} to {self.path}: {reason}") from error
        self._last_step = step

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    encoded = {key: encode_scalar(value) for key, value in row.items()}
    return json.dumps(encoded, allow_nan=False).encode() + b"\n"


class TensorBoardWriter:
    """Writes the numbers among the metrics as TensorBoard events under `workdir/tensorboard`.

    Args:
        workdir: folder of the run.
        resume_step: first step that a resumed run will write; TensorBoard then hides older events from there
            on.

    Raises:
        ImportError: tensorboardX is not installed; says which extra has it.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int | None = None):
        tensorboardx = require("tensorboardX", "experiments")
        self._writer = tensorboardx.SummaryWriter(str(Path(workdir) / "tensorboard"), purge_step=resume_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key != names.STEP and value is not None and not isinstance(value, str):
                self._writer.add_scalar(key, float(value), int(step))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MultiWriter:
    """Hands every step to several writers, in order."""

    def __init__(self, *writers: MetricWriter):
        self._writers = writers

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def make_writer(workdir: str | os.PathLike, *, resume_step: int | None = None, tensorboard: bool = False) -> MetricWriter:
    """Returns the writer of a run: `metrics.jsonl`, and TensorBoard events as well if asked for.

    Args and errors: those of `JsonlWriter` and `TensorBoardWriter`.
    """
    jsonl = JsonlWriter(workdir, resume_step)
    return MultiWriter(jsonl, TensorBoardWriter(workdir, resume_step)) if tensorboard else jsonl
