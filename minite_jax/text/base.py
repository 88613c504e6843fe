"""What every tokenizer here is, and decoding, which is the same for all: ids to bytes, bytes to text as UTF-8."""

import codecs
import operator
from collections.abc import Collection, Iterable
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np

# The bytes of an id that has no text. It occurs nowhere in UTF-8, so it is seen as U+FFFD and never runs into its neighbours.
NO_TEXT = b"\xff"


@runtime_checkable  # jaxtyping's hook checks arguments by isinstance
class TextTokenizer(Protocol):
    """Text to ids and back.

    A model's vocabulary may be larger than the tokenizer's (Qwen3: 151,936 rows for 151,669 tokens), so a sampler may draw ids
    that have no text. They decode to U+FFFD.

    Attributes:
      vocab_size: all ids that have text are below.
      stop_ids: ids that end a completion.
      special_ids: ids of marks such as `<|im_end|>`, which a reader of the text does not want to see.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of token ids, a list or an array of one axis."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: bytes of UTF-8, perhaps a part of a character; `NO_TEXT` for an id without text."""


class TextStream:
    """Text of ids that come one by one. What it has given, put together, is what `decode` gives for all ids at once.

        stream = TextStream(tokenizer, hide=tokenizer.special_ids)
        for token, _ in mt.stream(...):
            print(stream.push(token), end="", flush=True)
        print(stream.finish())

    A character whose bytes come with several tokens appears with the last of them, never in parts.

    Args:
      tokenizer: gives the bytes.
      hide: ids that are passed over.
    """

    def __init__(self, tokenizer: TextTokenizer, hide: Collection[int] = ()):
        self._bytes_of = tokenizer.token_bytes
        self._hidden = frozenset(hide)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: SupportsIndex) -> str:
        """The text that is whole with this id: perhaps none, and perhaps more than the id's own.

        Raises:
          ValueError: a negative id.
        """
        token_id = operator.index(token_id)
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return "" if token_id in self._hidden else self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD if the ids ended within a character. The stream then begins anew."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: TextTokenizer, ids: Iterable[SupportsIndex], hide: Collection[int] = ()) -> str:
    """Text of token ids, a list or an array of one axis; what is not UTF-8 becomes U+FFFD.

    Raises:
      ValueError: a negative id.
    """
    stream = TextStream(tokenizer, hide)
    # An array to the host at once; and never `bytes(array)`, which is the array's memory.
    pieces = [stream.push(i) for i in (np.asarray(ids) if hasattr(ids, "__array__") else ids)]
    return "".join(pieces) + stream.finish()
