"""The configuration beside a checkpoint: stored as JSON, compared field by field before a restore."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from minite_jax.checkpoint.errors import CheckpointError
from minite_jax.checkpoint.leaves import shorten

_ABSENT = object()


def to_plain(config: Any) -> dict[str, Any]:
    """Returns a configuration as plain JSON data: tuples become lists, keys strings.

    Args:
        config: a mapping, a dataclass, or an ml_collections ConfigDict, nested as you like.

    Raises:
        TypeError: a value cannot be written as JSON, or `config` is none of the above; names the field.
    """
    plain = _plain(config, "config")
    if not isinstance(plain, dict):
        raise TypeError(f"a configuration is a mapping or a dataclass, not a {type(config).__name__}")
    return plain


def _plain(value: Any, field: str) -> Any:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{field}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{field}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{field} is a {type(value).__name__}, which JSON cannot hold: use numbers, strings, lists, mappings")


def check_config(where: str, stored: Mapping[str, Any], config: Any, may_differ: Collection[str]) -> None:
    """Compares the configuration of a checkpoint with the one at hand.

    Args:
        where: the checkpoint, for the message.
        stored: plain configuration that the checkpoint was made with.
        config: the configuration at hand.
        may_differ: dotted fields that need not agree; a field stands for everything below it.

    Raises:
        CheckpointError: other fields differ; names them with both values.
    """
    changes = differing_fields(stored, to_plain(config))
    free = tuple(may_differ)
    problems = [
        f"{field} was {old} and is {new}"
        for field, (old, new) in changes.items()
        if not any(field == each or field.startswith(f"{each}.") for each in free)
    ]
    if problems:
        raise CheckpointError(f"{where} comes from another configuration: {shorten(problems)}; use that one or a new --workdir")


def differing_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the dotted fields of two plain configurations that differ, each with both values as text.

    Compared as JSON text, so that nan equals nan, and 1 is neither True nor 1.0.
    """
    old, new = flat_fields(before), flat_fields(now)
    texts = {field: (_text(old.get(field, _ABSENT)), _text(new.get(field, _ABSENT))) for field in sorted({*old, *new})}
    return {field: pair for field, pair in texts.items() if pair[0] != pair[1]}


def flat_fields(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one, with dotted names. Empty mappings are kept as values."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_fields(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _text(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
