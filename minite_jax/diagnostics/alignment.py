"""Two traces of different engines, tensor by tensor in one layout: names, fused projections, vocabularies, rows, experts."""

import dataclasses
import functools

import numpy as np

from minite_jax.diagnostics.trace_file import Trace, TraceError

_EXPERTS = "moe/router/experts"
# A tensor that an engine does not have, from those that it has: joined along the features, in this order.
_FUSED = {
    "attention/qkv": ("attention/q_proj", "attention/k_proj", "attention/v_proj"),
    "mlp/gate_up": ("mlp/gate", "mlp/up"),
}
_ONE_NUMBER = ("final/log_prob", "final/entropy")
MOST_EXPERTS = (1 << 12) - 1
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
QUANTIZED = ".quantized"


def split_name(name: str) -> tuple[int, str]:
    """``layer.3/moe/out`` -> (3, "moe/out"); -1 outside the layers."""
    if name.startswith("layer."):
        number, _, rest = name.removeprefix("layer.").partition("/")
        if number.isdigit():
            return int(number), rest
    return -1, name


@dataclasses.dataclass(frozen=True)
class Pair:
    """One tensor of both engines, row for row.

    Attributes:
      name: of the tensor.
      a, b: [n, ...] of equal shape, as they were stored.
      rows: [n, 2] sequence and position of each row.
      experts: [n] the expert of each row, where rows are assignments of tokens to experts; else None.
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    rows: np.ndarray
    experts: np.ndarray | None = None


class Alignment:
    """Reads tensors of two traces in one layout.

    Args:
      a, b: the traces; names and order are a's.

    Raises:
      TraceError: the traces have no row or no tensor in common.
    """

    def __init__(self, a: Trace, b: Trace):
        self.a, self.b = a, b
        self.notes: list[str] = []
        self.names = [name for name in _with_derived(a) if _has(b, name)]
        self.only_in_a = [name for name in a.names if not _has(b, name)]
        self.only_in_b = [name for name in b.names if not _has(a, name)]
        for trace in (a, b):
            if not trace.names:
                raise TraceError(f"{trace.where} holds no tensor: its writer recorded nothing")
        if not self.names:
            raise TraceError(
                f"{a.where} and {b.where} have no tensor of the same name, e.g. {a.names[0]} and {b.names[0]}: "
                "give the writer a map of names (docs/trace_format.md)"
            )
        keys = [set(_keys(trace, np.arange(len(trace.rows)))) for trace in (a, b)]
        if not keys[0] & keys[1]:
            raise TraceError(f"{a.where} and {b.where} have no (sequence, position) in common: trace the same sequences in both")
        for where, only in (("first", keys[0] - keys[1]), ("second", keys[1] - keys[0])):
            if only:
                place = "sequence {}, position {}".format(*min(only))
                self.notes.append(f"{len(only)} tokens only in the {where} trace, from {place} on: those of both are compared")

    def pair(self, name: str) -> Pair | None:
        """A tensor on the rows that both have, None if there are none.

        Raises:
          TraceError: shapes that no known layout brings together.
        """
        value_a, rows_a = _read(self.a, name)
        value_b, rows_b = _read(self.b, name)
        place_b = {key: i for i, key in enumerate(_keys(self.b, rows_b))}
        both = [(i, place_b[key]) for i, key in enumerate(_keys(self.a, rows_a)) if key in place_b]
        if not both:
            return None
        take_a, take_b = (np.array(each) for each in zip(*both, strict=True))
        keys = np.array([self.a.rows.sequences[rows_a[take_a]], self.a.rows.positions[rows_a[take_a]]]).T
        layer, local = split_name(name)
        value_a, value_b = value_a[take_a], value_b[take_b]
        for trace, value in ((self.a, value_a), (self.b, value_b)):
            if local == _EXPERTS:
                self._check_experts(trace, name, value, keys)
        if local.startswith("moe/experts/") or local == "moe/router/weights":
            return self._by_expert(name, layer, value_a, value_b, keys)
        value_a, value_b = (value.reshape(len(keys), value[0].size) for value in (value_a, value_b))
        for trace, value in ((self.a, value_a), (self.b, value_b)):
            if name in _ONE_NUMBER and value.shape[1] != 1:
                raise TraceError(f"{name} of {trace.where} has {value.shape[1]} numbers a row: it has one, of the next token")
        if value_a.shape != value_b.shape:
            if name != "final/logits":
                raise TraceError(self._unlike(name, value_a, value_b))
            width = min(value_a.shape[1], value_b.shape[1])
            value_a, value_b = value_a[:, :width], value_b[:, :width]
        return Pair(name, value_a, value_b, keys)

    def _by_expert(self, name, layer, value_a, value_b, keys):
        """Rows (token, expert) of the experts that both engines chose, whatever their rank."""
        choices = self.pair(f"layer.{layer}/{_EXPERTS}") if f"layer.{layer}/{_EXPERTS}" in self.names else None
        if choices is None or len(choices.a) != len(keys):
            raise TraceError(f"{name} needs {_EXPERTS} of the same rows: trace layer.{layer}/{_EXPERTS} too")
        chosen = choices.a.shape[1]
        for trace, value in ((self.a, value_a), (self.b, value_b)):
            if value[0].size % chosen or (value.ndim > 2 and value.shape[1] != chosen):
                shape = f"rows of shape {value.shape[1:]}"
                raise TraceError(f"{name} of {trace.where} has {shape}, not one for each of {chosen} experts")
        same = choices.a[:, :, None] == choices.b[:, None, :]
        row, rank_a, rank_b = np.nonzero(same)
        flat = lambda x, rank: x.reshape(len(x), chosen, x[0].size // chosen)[row, rank]  # noqa: E731
        one, two = flat(value_a, rank_a), flat(value_b, rank_b)
        if one.shape != two.shape:
            raise TraceError(self._unlike(name, one, two))
        return Pair(name, one, two, keys[row], choices.a[row, rank_a])

    def _check_experts(self, trace: Trace, name: str, experts: np.ndarray, keys: np.ndarray) -> None:
        """Refuses what are no numbers of experts."""
        if not np.issubdtype(experts.dtype, np.integer):
            raise TraceError(f"{name} of {trace.where} is {experts.dtype}: experts are integers")
        probs = name.removesuffix("experts") + "probs"
        sources = _sources(trace, probs)
        end = trace.header["tensors"][sources[0]]["shape"][-1] if sources else MOST_EXPERTS
        wrong = np.argwhere((experts < 0) | (experts >= end))
        if len(wrong):
            sequence, position = keys[wrong[0][0]]
            raise TraceError(
                f"{name} of {trace.where}: expert {experts[tuple(wrong[0])]} at sequence {sequence}, position {position}; "
                f"experts are 0 to {end - 1}"
            )

    def _unlike(self, name: str, one: np.ndarray, two: np.ndarray) -> str:
        return (
            f"{name}: {one.shape[-1]} numbers a row in {self.a.where}, {two.shape[-1]} in {self.b.where}: "
            "the models have different shapes, or the map of names is wrong"
        )


def _keys(trace: Trace, rows: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(trace.rows.sequences[rows].tolist(), trace.rows.positions[rows].tolist(), strict=True))


def _with_derived(trace: Trace) -> list[str]:
    """The names, with fused tensors where their last part is, router probabilities, and dequantised operands."""
    names = []
    for name in trace.names:
        names.append(name)
        layer, local = split_name(name)
        for fused, parts in _FUSED.items():
            if local == parts[-1] and _has(trace, f"layer.{layer}/{fused}"):
                names.append(f"layer.{layer}/{fused}")
        if local == "moe/router/logits" and f"layer.{layer}/moe/router/probs" not in trace:
            names.append(f"layer.{layer}/moe/router/probs")
        if name.endswith(".outer_scale") and _has(trace, name.removesuffix(".outer_scale") + QUANTIZED):
            names.append(name.removesuffix(".outer_scale") + QUANTIZED)
    return names


def _sources(trace: Trace, name: str) -> list[str] | None:
    """The stored tensors that a name is made from, or None."""
    if name in trace:
        return [name]
    layer, local = split_name(name)
    if local in _FUSED:
        parts = [f"layer.{layer}/{part}" for part in _FUSED[local]]
    elif local == "moe/router/probs":
        parts = [f"layer.{layer}/moe/router/logits"]
    elif name.endswith(QUANTIZED):
        parts = [name.removesuffix(QUANTIZED) + part for part in (".codes", ".block_scale", ".outer_scale")]
    else:
        return None
    return parts if all(part in trace for part in parts) else None


def _has(trace: Trace, name: str) -> bool:
    return _sources(trace, name) is not None


def _read(trace: Trace, name: str) -> tuple[np.ndarray, np.ndarray]:
    sources = _sources(trace, name)
    if sources is None:
        raise TraceError(f"{trace.where} has no tensor {name}")
    read = [trace.read(source) for source in sources]
    rows = read[0][1]
    if any(len(other) != len(rows) or (other != rows).any() for _, other in read[1:]):
        raise TraceError(f"{trace.where}: {', '.join(sources)} have different rows; trace them together")
    if sources == [name]:
        return np.asarray(read[0][0]), rows
    values = [np.asarray(value) for value, _ in read]
    if name.endswith(QUANTIZED):
        return dequantized(*values, f"{trace.where}: {name.removesuffix(QUANTIZED)}"), rows
    if name.endswith("/probs"):
        logits = values[0].astype(np.float64)
        exp = np.exp(logits - logits.max(-1, keepdims=True))
        return (exp / exp.sum(-1, keepdims=True)).astype(np.float32), rows
    return np.concatenate([value.reshape(len(rows), -1) for value in values], axis=1), rows


def dequantized(codes: np.ndarray, block_scale: np.ndarray, outer_scale: np.ndarray, where: str = "operand") -> np.ndarray:
    """The float32 numbers of codes [..., K], one a byte, scales [..., K/16] and outer scales [...].

    Raises:
      TraceError: shapes that do not belong together, or codes above 15.
    """
    shapes = f"codes {codes.shape}, block_scale {block_scale.shape}, outer_scale {outer_scale.shape}"
    scales, outer = (*codes.shape[:-1], codes.shape[-1] // 16), codes.shape[:-1]
    if codes.shape[-1] % 16 or block_scale.size != np.prod(scales) or outer_scale.size != np.prod(outer):
        raise TraceError(f"{where}: {shapes}; a scale belongs to 16 codes, an outer scale to a row")
    if not np.issubdtype(codes.dtype, np.integer) or ((codes < 0) | (codes > 15)).any():
        raise TraceError(f"{where}.codes holds something else than E2M1 codes, 0 to 15, one a byte")
    value = _E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    scale = np.repeat(block_scale.reshape(scales).astype(np.float32), 16, axis=-1)
    return value * scale * outer_scale.reshape(outer).astype(np.float32)[..., None]


@functools.cache
def unit_roundoff(dtype: np.dtype) -> float:
    """Half the distance from 1 to the next number; 0 for integers."""
    bits = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "float8_e4m3fn": 4}.get(dtype.name)
    return 0.0 if bits is None else 2.0**-bits


def ordered_integers(x: np.ndarray) -> np.ndarray:
    """int64 whose differences count the numbers of x's type between two values; both zeros are 0."""
    signed = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    magnitude = signed & ((1 << (8 * x.dtype.itemsize - 1)) - 1)
    return np.where(signed < 0, -magnitude, magnitude)
