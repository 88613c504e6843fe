"""Tile configurations by measurement: the checked-in table `tuning.json`, and how a kernel asks it.

    tiles = tuning.config("grouped_matmul", rows=65536, features=1536, depth=2048, default=dict(BLOCK_M=128, num_warps=8))

The table is {operation: {device kind: {"ROWSxFEATURESxDEPTH": {parameter: value}}}}; `python -m experiments.benchmark tune` makes
it. An empty entry: measured, and the kernel's default is as fast as anything. Let rows be the tokens (M), features the outputs
of a row (N; the width, where rows stand alone), depth the summed axis (K; 1 where nothing is summed).

A configuration may change the speed of a kernel and never its bits: kernels sum in one order whatever the tile, tests compare
tiles bit for bit, and the tuning script refuses a configuration whose result differs from the default's.
"""

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

TABLE = Path(__file__).with_name("tuning.json")
# How far, in factors of two over rows, features and depth together, a measured shape may lie from the one asked for.
FURTHEST = 3.0

_overrides: dict[str, dict[str, Any]] = {}
# What kernels asked for while `record` was active: {operation: [(shape, default)]}.
_recorded: dict[str, list[tuple[tuple[int, int, int], dict[str, Any]]]] | None = None


def config(op: str, *, rows: int, features: int, depth: int, default: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a kernel for a shape on the device at hand.

    Args:
      op: name of the kernel, as in the table.
      rows: M.
      features: N.
      depth: K.
      default: every parameter of the kernel, with the value that holds where nothing near was measured.

    Returns:
      `default`, updated with the table's entry for the nearest measured shape (see `lookup`).

    Raises:
      ValueError: the table has a parameter that the kernel does not.
    """
    if _recorded is not None:
        _recorded.setdefault(op, []).append(((rows, features, depth), dict(default)))
    if op in _overrides:
        found, where = _overrides[op], "the override"
    else:
        found, where = lookup(op, jax.devices()[0].device_kind, rows=rows, features=features, depth=depth), TABLE.name
    unknown = set(found) - set(default)
    if unknown:
        raise ValueError(f"{op}: {where} has {', '.join(sorted(unknown))}, but the kernel has only {', '.join(sorted(default))}")
    return {**default, **found}


def lookup(
    op: str, device_kind: str, *, rows: int, features: int, depth: int, table: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The entry of the nearest measured shape, or {} where there is none.

    Nearest means the smallest sum of |log2(asked / measured)| over rows, features and depth; a tie goes to the smaller shape,
    and a shape further away than `FURTHEST` does not count.

    Args:
      op: name of the kernel.
      device_kind: as JAX calls it ("NVIDIA H200").
      rows: M.
      features: N.
      depth: K.
      table: the table to look in; None means the checked-in one.
    """
    entries = (_read() if table is None else table).get(op, {}).get(device_kind, {})
    asked = (rows, features, depth)
    distances = sorted((_distance(asked, parse_key(key)), parse_key(key), key) for key in entries)
    if not distances or distances[0][0] > FURTHEST:
        return {}
    return dict(entries[distances[0][2]])


def shape_key(rows: int, features: int, depth: int) -> str:
    """The name of a shape in the table: "8192x1536x2048"."""
    return f"{rows}x{features}x{depth}"


def parse_key(key: str) -> tuple[int, int, int]:
    """The inverse of `shape_key`.

    Raises:
      ValueError: the key is not three whole numbers.
    """
    parts = key.split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{key!r} is not ROWSxFEATURESxDEPTH: mend {TABLE.name} or make it again")
    rows, features, depth = map(int, parts)
    return rows, features, depth


@contextlib.contextmanager
def override(op: str, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Gives `op` these parameters in place of the table's, for kernels that are traced inside the `with`."""
    before = _overrides.get(op)
    _overrides[op] = dict(parameters)
    try:
        yield
    finally:
        if before is None:
            del _overrides[op]
        else:
            _overrides[op] = before


@contextlib.contextmanager
def record() -> Iterator[dict[str, list[tuple[tuple[int, int, int], dict[str, Any]]]]]:
    """Collects what kernels that are traced inside the `with` ask for: {operation: [((rows, features, depth), default)]}."""
    global _recorded
    before, _recorded = _recorded, {}
    try:
        yield _recorded
    finally:
        _recorded = before


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(a, b, strict=True))


@functools.cache
def _read() -> dict[str, Any]:
    return json.loads(TABLE.read_text())
