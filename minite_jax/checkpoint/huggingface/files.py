"""Safetensors files: a JSON header that says where each tensor lies, and then the tensors, one after another.

Written out here because the library holds a whole file in memory to write one, reads one in no smaller piece than a tensor, and
does not say which file is broken. The format: https://huggingface.co/docs/safetensors, section Format.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from minite_jax.checkpoint.errors import CheckpointError

# Of the types that weights come in here. Others are known by their width, so that a header can be checked.
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
# And with what NVFP4 checkpoints hold beside them.
NUMPY = DTYPES | {"U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MAX_HEADER = 100_000_000
# Tensors are read and written in pieces of about so many bytes: what a conversion holds above the parameters.
PIECE = 16 << 20


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      name: of the tensor.
      dtype: as the header says it, e.g. "BF16".
      shape: of the tensor.
      path: of the file.
      offset: of its first byte in the file.
      nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name} ({self.dtype} {list(self.shape)})"


def read_header(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a file in the order in which they lie there, and everything before the first of them, byte for byte.

    Raises:
      CheckpointError: the file is missing, cut off, or not what a safetensors file is; names it, and the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} is cut off or no safetensors file: {size} bytes; fetch it again")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): fetch the file") from None
    try:
        entries = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a wrong header ({error}): fetch it again") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a wrong header (no JSON object): fetch it again")
    tensors = [_tensor(path, 8 + length, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda each: (each.offset, each.nbytes))
    end = 8 + length
    for each in tensors:
        if each.offset != end:
            raise CheckpointError(f"{each}: starts at byte {each.offset} where {end} is expected; the header is wrong")
        end += each.nbytes
        if end > size:
            raise CheckpointError(f"{each}: ends at byte {end} of a file of {size}, which is cut off; fetch it again")
    if end != size:
        raise CheckpointError(f"{path} has {size - end} bytes behind its last tensor: the header is wrong")
    return {each.name: each for each in tensors}, length.to_bytes(8, "little") + text


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: refuses (ValueError) an object that has a key twice, of which the last would count."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key} is there twice")
        content[key] = value
    return content


def _tensor(path: Path, start: int, name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, first, last)
        if not all(type(each) is int and each >= 0 for each in numbers) or dtype not in _BITS:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path} has a wrong header: tensor {name} is described as {entry!r}") from None
    bits = _BITS[dtype]
    for each in shape:
        bits *= each
    if bits != 8 * (last - first):
        raise CheckpointError(f"{path} has a wrong header: {dtype} {list(shape)} of tensor {name} are not {last - first} bytes")
    return Tensor(name, dtype, shape, path, start + first, last - first)


def read_pieces(tensor: Tensor, rows: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """The tensor in runs of its first axis, each with the number of its first row. A single number comes as a row of one.

    Args:
      tensor: of a type in `NUMPY`.
      rows: length of the runs; None: about `PIECE` bytes.

    Raises:
      CheckpointError: the file ends early.
    """
    dtype, shape = NUMPY[tensor.dtype], tensor.shape or (1,)
    row_bytes = tensor.nbytes // shape[0]
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for first, last in row_runs(shape[0], row_bytes, rows):
            piece = np.fromfile(file, dtype, (last - first) * row_bytes // dtype.itemsize)
            if piece.nbytes != (last - first) * row_bytes:
                raise CheckpointError(f"{tensor}: the file ended early; fetch it again")
            yield first, piece.reshape(last - first, *shape[1:])


def row_runs(num_rows: int, row_bytes: int, step: int | None = None) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs (first, last + 1) of about `PIECE` bytes, or of `step` rows."""
    step = step or max(1, PIECE // max(1, row_bytes))
    return ((first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def type_name(dtype: np.dtype) -> str:
    """What a header calls a type."""
    return next(name for name, each in NUMPY.items() if each == dtype)


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[list[str], bytes, int]:
    """The header that the safetensors library writes for these tensors (dtype and shape by name) as PyTorch's.

    Returns:
      The names in the order in which the tensors follow it, the header with its length, and the size of the whole file.
    """
    order = sorted(tensors, key=lambda name: (-_BITS[tensors[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return int(np.prod(shape, dtype=np.int64)) * _BITS[dtype] // 8


def is_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or infinite. Bytes that are no floats are finite."""
    if values.dtype == NUMPY["U8"]:
        return True
    if values.dtype == NUMPY["F8_E4M3"]:
        return not values.size or int((values.view(np.uint8) & 0x7F).max()) < 0x7F
    if values.dtype == DTYPES["BF16"]:
        return not values.size or int((values.view(np.uint16) & 0x7FFF).max()) < 0x7F80  # ten times as fast as isfinite
    return bool(np.isfinite(values).all())
