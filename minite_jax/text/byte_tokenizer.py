"""The byte-level tokenizer of the small models."""

from collections.abc import Iterable
from typing import SupportsIndex

from minite_jax.text import base


class ByteTokenizer:
    """One token per byte of UTF-8; ids 0..255. A `TextTokenizer` without end marks: a task says which byte ends a completion."""

    vocab_size = 256
    stop_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of token ids, a list or an array of one axis. Bytes that are not UTF-8 become U+FFFD, and so do ids beyond 255,
        which a padded vocabulary has.

        Raises:
          ValueError: a negative id.
        """
        return base.decode(self, ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte; `NO_TEXT` beyond 255."""
        return bytes([token_id]) if token_id < 256 else base.NO_TEXT
