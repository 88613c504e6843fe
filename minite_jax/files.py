"""Files that are whole or not there, and JSON files that are an object."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minite_jax.errors import UserError


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Inside, write to the path that this gives: it has a temporary name, and is renamed to `path` at the end.

    If the writing fails, what was at `path` before stays as it is.
    """
    unfinished = path.with_name(path.name + ".tmp")
    yield unfinished
    os.replace(unfinished, path)


def nearest(path: Path) -> Path:
    """The path, or the first of its parents that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def hindrance(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which need not be there yet; None where it can, as far as one can tell before."""
    there = nearest(folder)
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK) else f"{there} is not writable"


def read_json_object(path: Path, error: type[UserError] = UserError) -> dict[str, Any]:
    """The JSON object that a file of a model's folder holds.

    Args:
      path: of the file, which is in UTF-8.
      error: what to raise.

    Raises:
      UserError: of the given type: the file is missing, cannot be read, or holds something else; names it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} is missing: give the folder of a Hugging Face model") from None
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror}): fetch the file again") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} cannot be read as JSON ({reason}): fetch the file again") from None
    if not isinstance(content, dict):
        raise error(f"{path} holds no JSON object: fetch the file again")
    return content
