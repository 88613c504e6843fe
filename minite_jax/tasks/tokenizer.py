"""The byte-level tokenizer of the small models."""


class ByteTokenizer:
    """One token per byte of UTF-8; ids 0..255."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside 0..255.
        """
        return bytes(ids).decode("utf-8", errors="replace")
