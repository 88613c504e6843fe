"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Inside, write to the path that this gives: it has a temporary name, and is renamed to `path` at the end.

    If the writing fails, what was at `path` before stays as it is.
    """
    unfinished = path.with_name(path.name + ".tmp")
    yield unfinished
    os.replace(unfinished, path)
