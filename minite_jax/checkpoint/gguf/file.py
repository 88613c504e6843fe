"""What a GGUF file is: metadata by key, a list of tensors, and then the tensors, rows of blocks one after another.

The header is read here and not by the package `gguf`, whose reader believes what a file says of itself: a file that is cut off or
spoilt should end in a message that names the file and the place. The package dequantises. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.huggingface.files import Tensor, row_runs
from minite_jax.optional import require

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 had shorter numbers; 3 is 2 with a rule for big-endian machines
_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class Header(NamedTuple):
    """What stands before the tensors.

    Attributes:
      metadata: by key: numbers, texts, booleans, and lists of one of them.
      tensors: by name. Shapes are ours: the axis whose numbers lie side by side is the last one.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: str | Path) -> bool:
    """Whether this is a file that begins as a GGUF file does."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_header(path: str | Path) -> Header:
    """Reads metadata and list of tensors, and checks that the file has them all.

    Raises:
      CheckpointError: the file is missing, cut off, of another kind, or contradicts itself; or a tensor has a type that is not
        known. Names the file, and the key or tensor.
      ImportError: the package `gguf` is not installed.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give a GGUF file") from None


class _Reader:
    """Reads one file from its beginning. Every length in it is compared with the bytes that are left before it is believed."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self._path, self._file, self._left = path, file, size
        self._size = size

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {problem}; fetch the file again")

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise self._error(f"is cut off or spoilt in {what}: it wants {count:,} bytes where {self._left:,} are left")
        self._left -= count
        return self._file.read(count)

    def _number(self, form: str, what: str):
        return struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form), what))[0]

    def _string(self, what: str) -> str:
        raw = self._bytes(self._number("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"has text in {what} that is no UTF-8") from None

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], what)
        if kind != _ARRAY:
            raise self._error(f"has a value of the unknown kind {kind} in {what}")
        kind, count = self._number("I", what), self._number("Q", what)
        if kind in _NUMBERS:
            form = np.dtype(_NUMBERS[kind]).newbyteorder("<")
            return np.frombuffer(self._bytes(count * form.itemsize, what), form).tolist()
        if kind != _STRING:
            raise self._error(f"has a list of the unknown kind {kind} in {what}")
        if 8 * count > self._left:  # the length of each
            raise self._error(f"is cut off or spoilt in {what}: {count:,} texts do not fit the {self._left:,} bytes left")
        return [self._string(what) for _ in range(count)]

    def header(self) -> Header:
        if self._bytes(4, "its first bytes") != _MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it begins with other bytes")
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{self._path} is {kind} of GGUF; versions 2 and 3, little-endian, are read: convert it")
        num_tensors, num_keys = self._number("Q", "the number of tensors"), self._number("Q", "the number of keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("the name of a key")
            if key in metadata:
                raise self._error(f"has the key {key} twice")
            metadata[key] = self._value(self._number("I", key), key)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"has general.alignment={alignment!r}")
        start = -(-(self._size - self._left) // alignment) * alignment
        return Header(metadata, self._placed(entries, start))

    def _entry(self) -> tuple[str, str, tuple[int, ...], int]:
        """Name, type, shape and offset of the next tensor."""
        name = self._string("the name of a tensor")
        what = f"tensor {name}"
        axes = self._number("I", what)
        if not 1 <= axes <= 4:
            raise self._error(f"has {what} with {axes} axes")
        shape = tuple(reversed([self._number("Q", what) for _ in range(axes)]))
        kind = self._number("I", what)
        if kind not in _sizes():
            raise CheckpointError(f"{self._path}: {what} {list(shape)} has type {kind}, which this version of gguf does not know")
        return name, _sizes()[kind][0], shape, self._number("Q", what)

    def _placed(self, entries, start: int) -> dict[str, Tensor]:
        sizes = {name: size for name, *size in _sizes().values()}
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape, offset in entries:
            numbers, nbytes = sizes[dtype]
            tensor = Tensor(name, dtype, shape, self._path, start + offset, math.prod(shape) // numbers * nbytes)
            if name in tensors:
                raise self._error(f"has tensor {name} twice")
            if 0 in shape or shape[-1] % numbers:
                raise CheckpointError(f"{tensor}: rows of {shape[-1]} are no positive multiple of its blocks of {numbers}")
            tensors[name] = tensor
        end, before = start, "the header"
        for tensor in sorted(tensors.values(), key=lambda each: each.offset):
            if tensor.offset < end:
                raise CheckpointError(f"{tensor}: begins inside {before}; fetch the file again")
            end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name}"
            if end > self._size:
                raise CheckpointError(f"{tensor}: ends at byte {end} of a file of {self._size}, which is cut off; fetch it again")
        return tensors


@functools.cache
def _sizes() -> dict[int, tuple[str, int, int]]:
    """Of each type by its number: name, numbers in a block, bytes of a block."""
    constants = require("gguf.constants", "gguf")
    return {int(kind): (kind.name, *size) for kind, size in constants.GGML_QUANT_SIZES.items()}


@functools.cache
def readable_types() -> tuple[str, ...]:
    """The types of tensors that can be turned into floats."""
    # The package has no list of what it dequantises; an empty row tells.
    return tuple(name for name, _, nbytes in _sizes().values() if name in _PLAIN or _is_dequantized(name, nbytes))


def _is_dequantized(dtype: str, block: int) -> bool:
    try:
        _dequantized(np.zeros((1, block), np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def _dequantized(raw: np.ndarray, dtype: str) -> np.ndarray:
    kind = require("gguf.constants", "gguf").GGMLQuantizationType[dtype]
    return require("gguf.quants", "gguf").dequantize(raw, kind)


def read_pieces(tensor: Tensor, multiple: int = 1) -> Iterator[tuple[int, int, np.ndarray]]:
    """A tensor in runs of its first axis: number of the first row, bytes in the file, and the numbers in float32 or as they are.

    Args:
      tensor: of a readable type.
      multiple: runs are multiples of so many rows, as the first axis is.

    Raises:
      CheckpointError: the file ends early.
    """
    row_bytes = tensor.nbytes // tensor.shape[0]
    width = row_bytes // math.prod(tensor.shape[1:-1])
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        # Four bytes a number when it is dequantised.
        for first, last in row_runs(tensor.shape[0] // multiple, 4 * multiple * math.prod(tensor.shape[1:])):
            first, last = first * multiple, last * multiple
            raw = np.fromfile(file, np.uint8, (last - first) * row_bytes)
            if raw.nbytes != (last - first) * row_bytes:
                raise CheckpointError(f"{tensor}: the file ended early; fetch it again")
            if tensor.dtype in _PLAIN:
                values = raw.view(_PLAIN[tensor.dtype])
            else:
                with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite are reported by whoever asks
                    values = _dequantized(raw.reshape(-1, width), tensor.dtype)
            yield first, raw.nbytes, values.reshape(last - first, *tensor.shape[1:])


