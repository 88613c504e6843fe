"""The byte-level tokenizer of the small models."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np

_NO_BYTE = 0xFF  # occurs nowhere in UTF-8


class ByteTokenizer:
    """One token per byte of UTF-8; ids 0..255."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of token ids, a list or an array of one axis. Bytes that are not UTF-8 become U+FFFD, and so do ids beyond 255,
        which a padded vocabulary has.

        Raises:
          ValueError: a negative id.
        """
        # To the host at once; and never `bytes(array)`, which is the array's memory.
        ids = [operator.index(i) for i in (np.asarray(ids) if hasattr(ids, "__array__") else ids)]
        if min(ids, default=0) < 0:
            raise ValueError(f"token id {min(ids)} is negative")
        return bytes(i if i < 256 else _NO_BYTE for i in ids).decode("utf-8", errors="replace")
