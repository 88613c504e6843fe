"""The tokenizer of a Hugging Face folder, such as Qwen3's: byte-level BPE, end tokens, chat template.

tokenizer.json            the tokenizer, read by the `tokenizers` package
tokenizer_config.json     names of marks, chat template (may be missing)
chat_template.jinja       chat template, before the one above (may be missing)
generation_config.json    end tokens, one or several (may be missing; config.json's count where this has none)
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from minite_jax.errors import UserError
from minite_jax.files import read_json_object
from minite_jax.optional import require
from minite_jax.text import base
from minite_jax.text.template import ChatTemplate

_MARKS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A byte-level tokenizer with its end tokens and chat template. A `TextTokenizer`. Made by `from_folder` or `from_gguf`.

    Args:
      backend: a `tokenizers.Tokenizer` whose decoder is ByteLevel (Qwen, GPT-2, Llama 3, SmolLM2).
      stop_ids: ids that end a completion.
      chat_template: None for a model that has none.
      where: folder or file that it is from, for messages.

    Attributes:
      vocab_size: 1 + the largest id that has text; the model's padded vocabulary may be larger.
      special_ids: ids of marks that are no text.

    Raises:
      UserError: another kind of tokenizer, or a stop id that has no text.
    """

    def __init__(
        self,
        backend: Any,
        *,
        stop_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        where: str = "the tokenizer",
    ):
        tokenizers = require("tokenizers", "hf")
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            kind = type(backend.decoder).__name__ if backend.decoder is not None else "none"
            raise UserError(f"{where} has the decoder {kind}; only byte-level tokenizers (ByteLevel) can be read")
        # Files that come from training may say to cut or to fill up what they encode.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._where, self.chat_template = backend, where, chat_template
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        for stop_id in self.stop_ids:
            if not 0 <= stop_id < self.vocab_size:
                raise UserError(f"{where}: the end token {stop_id} lies outside the tokenizer's ids 0..{self.vocab_size - 1}")

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> "Tokenizer":
        """Reads a folder.

        Raises:
          UserError: a file is missing, cannot be read, or contradicts another; one line that names it.
          ImportError: the packages `tokenizers` and `jinja2` are not installed.
        """
        folder = Path(folder)
        tokenizers = require("tokenizers", "hf")
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: give the folder of a model, which has tokenizer.json")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder} has no tokenizer.json: copy the model's tokenizer files there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise UserError(f"{file} is no tokenizer: {' '.join(str(error).split())}; copy it anew") from error
        config = read_json(folder / "tokenizer_config.json")
        marks = _marks(config)
        _check_added(backend, config, folder)
        return cls(
            backend,
            stop_ids=_stop_ids(folder, backend, marks),
            chat_template=_chat_template(folder, config, marks),
            where=str(folder),
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads the tokenizer in a GGUF file's metadata.

        Raises:
          UserError: the file cannot be read, has no tokenizer, or one of a kind that is not known; names the file and the key.
          ImportError: the packages `gguf`, `tokenizers` and `jinja2` are not installed.
        """
        from minite_jax.text.gguf import tokenizer_parts  # which needs what a folder does not

        return cls(**tokenizer_parts(path))

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text. Marks that are written in it, such as `<|im_end|>`, become their ids.

        Args:
          text: any text.
          add_special: whether to add what the tokenizer puts around a plain text, such as a mark of its beginning. Qwen3's adds
            nothing. A chat template writes such marks itself.

        Raises:
          UserError: the text has a surrogate code point, which no UTF-8 has.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text is no valid Unicode at character {error.start}: give it as UTF-8") from error
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[SupportsIndex], *, hide_special: bool = False) -> str:
        """Text of token ids, a list or an array of one axis. U+FFFD for what is not UTF-8 and for ids that have no text.

        Args:
          ids: not negative; they may lie beyond `vocab_size`, in a model's padding.
          hide_special: whether marks such as `<|im_end|>` are left out.

        Raises:
          ValueError: a negative id.
        """
        return base.decode(self, ids, hide=self.special_ids if hide_special else ())

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, perhaps a part of a character; `NO_TEXT` for an id without text."""
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8")
        token = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
        if token is None:
            return base.NO_TEXT
        try:
            return bytes(map(_byte_alphabet().__getitem__, token))
        except KeyError:  # not in the alphabet: the text itself
            return token.encode("utf-8")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation; see `ChatTemplate.render` for messages, options (`add_generation_prompt`,
        `enable_thinking`, `tools`) and errors.
        """
        if self.chat_template is None:
            raise UserError(f"{self._where} has no chat template: give the model a plain text, or copy chat_template.jinja there")
        return self.chat_template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `apply_chat_template`'s text."""
        return self.encode(self.apply_chat_template(messages, **options))


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with.

    Bytes that are visible characters of Latin-1 are themselves; the others, in order, are the characters from U+0100 on.
    Source: GPT-2's encoder (Radford et al., 2019, "Language models are unsupervised multitask learners").
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one where there is no such file. Raises UserError where it holds something else."""
    return read_json_object(file) if file.is_file() else {}


def _content(token: Any) -> Any:
    """A mark is written as text, or as an object that has it."""
    return token.get("content") if isinstance(token, dict) else token


def _marks(config: dict[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in _MARKS}
    return {name: token for name, token in found.items() if isinstance(token, str)}


def _check_added(backend: Any, config: dict[str, Any], folder: Path) -> None:
    """Refuses files of two models in one folder."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise UserError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be an object; copy it anew")
    for key, token in added.items():
        there = backend.id_to_token(int(key)) if key.isdecimal() and len(key) < 10 else None
        if there != _content(token):
            raise UserError(
                f"{folder}: token {key} is {_content(token)!r} in tokenizer_config.json and {there!r} in tokenizer.json; "
                "copy both from one model"
            )


def _stop_ids(folder: Path, backend: Any, marks: dict[str, str]) -> list[int]:
    """The end tokens: those of generation_config.json (or config.json), then the tokenizer's."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        listed = read_json(folder / name).get("eos_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
            raise UserError(f"{folder / name}: eos_token_id must be an id or a list of ids, not {listed}")
        ids += listed
        if ids:
            break
    if "eos_token" in marks:
        own = backend.token_to_id(marks["eos_token"])
        if own is None:
            raise UserError(
                f"{folder}: tokenizer.json has no token {marks['eos_token']!r}, the eos_token of tokenizer_config.json; "
                "copy both from one model"
            )
        ids.append(own)
    return ids


def _chat_template(folder: Path, config: dict[str, Any], marks: dict[str, str]) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), marks, where=str(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}; copy it anew") from error
    source = config.get("chat_template")
    file = folder / "tokenizer_config.json"
    if isinstance(source, list):  # several, by name
        named = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
        if "default" not in named:
            raise UserError(f"{file} has chat templates but none named 'default'; put the one to use into chat_template.jinja")
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise UserError(f"{file}: chat_template must be a text, not {type(source).__name__}; copy it anew")
    return ChatTemplate(source, marks, where=f"the chat template of {file}")
