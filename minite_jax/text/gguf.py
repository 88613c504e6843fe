"""The tokenizer of a GGUF file: byte-level BPE, end tokens and chat template from its metadata.

Tokens, merges and marks are lists in the file. How a text is cut before it is merged is only a name there (`tokenizer.ggml.pre`),
so each name that is known here has its rule below.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from minite_jax.checkpoint.gguf.file import read_header
from minite_jax.errors import UserError
from minite_jax.optional import require
from minite_jax.text.template import ChatTemplate

_KIND = "tokenizer.ggml."
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # kinds of tokens; 1 is plain text
_MARKS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id", "unk_token": "unknown_token_id",
}  # fmt: skip
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Words with their contractions, single digits, punctuation, line ends, blanks.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut_as_smollm(tokenizers, backend) -> None:
    pre = tokenizers.pre_tokenizers
    backend.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])


def _cut_as_qwen2(tokenizers, backend) -> None:
    pre = tokenizers.pre_tokenizers
    backend.normalizer = tokenizers.normalizers.NFC()
    split = pre.Split(tokenizers.Regex(_QWEN2), behavior="isolated")
    backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


_CUTS: dict[str, Callable[[Any, Any], None]] = {"smollm": _cut_as_smollm, "qwen2": _cut_as_qwen2}


class _Metadata:
    """The tokenizer's part of a file's metadata, whose mistakes are reported with the file's name."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self._metadata, self.where = metadata, where

    def error(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")

    def get(self, key: str, kind: type, *default):
        value = self._metadata.get(_KIND + key, *default)
        if value is None and not default:
            raise self.error(f"{_KIND}{key} is missing: the file has no tokenizer; take another file")
        if value is not None and (isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind)):
            raise self.error(f"{_KIND}{key} should be of type {kind.__name__}; fetch the file again")
        return value

    @functools.cached_property
    def tokens(self) -> list[str]:
        tokens = self.get("tokens", list)
        if not tokens or not all(isinstance(each, str) for each in tokens):
            raise self.error(f"{_KIND}tokens should be a list of texts; fetch the file again")
        if len(set(tokens)) != len(tokens):
            raise self.error(f"{_KIND}tokens has a token twice; fetch the file again")
        return tokens

    def token_of(self, key: str) -> str | None:
        """The token that a key names by its id."""
        token_id, tokens = self.get(key, int, None), self.tokens
        if token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise self.error(f"{_KIND}{key}={token_id} is none of its {len(tokens)} tokens; fetch the file again")
        return tokens[token_id]

    @property
    def template(self) -> str | None:
        source = self._metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise self.error("tokenizer.chat_template should be a text; fetch the file again")
        return source


def _backend(metadata: _Metadata):
    """A `tokenizers.Tokenizer`."""
    tokenizers = require("tokenizers", "gguf")
    kind, cut = metadata.get("model", str), metadata.get("pre", str, None)
    if kind != "gpt2":
        raise metadata.error(f"{_KIND}model={kind!r}: only byte-level tokenizers (gpt2) can be read")
    if cut not in _CUTS:
        raise metadata.error(f"{_KIND}pre={cut!r}: how it cuts texts is not known here; there are {', '.join(_CUTS)}")
    tokens = metadata.tokens
    kinds = metadata.get("token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise metadata.error(f"{_KIND}token_type has {len(kinds)} entries for {len(tokens)} tokens; fetch the file again")
    # Unused ids fill up a model's vocabulary: they have no text.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    merges = []
    for merge in metadata.get("merges", list):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not {left, right, left + right} <= vocabulary.keys():
            raise metadata.error(f"{_KIND}merges has {merge!r}, which is no pair of its tokens; fetch the file again")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    _CUTS[cut](tokenizers, backend)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    first = metadata.token_of("bos_token_id")
    if metadata.get("add_bos_token", bool, False) and first is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, vocabulary[first])]
        )
    return backend


def _marks(metadata: _Metadata) -> dict[str, str]:
    found = {name: metadata.token_of(key) for name, key in _MARKS.items()}
    return {name: token for name, token in found.items() if token is not None}


def _stop_ids(metadata: _Metadata) -> list[int]:
    return [metadata.get(key, int) for key in _STOPS if metadata.token_of(key) is not None]


def tokenizer_parts(path: str | os.PathLike) -> dict[str, Any]:
    """The arguments of `Tokenizer` for a GGUF file.

    Raises:
      UserError: the file cannot be read, has no tokenizer, or one of a kind that is not known; names the file and the key.
      ImportError: the packages `gguf`, `tokenizers` or `jinja2` are not installed.
    """
    metadata = _Metadata(read_header(path).metadata, str(path))
    backend, source = _backend(metadata), metadata.template
    where = f"the chat template of {path}"
    return dict(
        backend=backend,
        stop_ids=_stop_ids(metadata),
        chat_template=None if source is None else ChatTemplate(source, _marks(metadata), where=where),
        where=str(path),
    )


def tokenizer_files(path: str | os.PathLike) -> dict[str, str]:
    """The tokenizer of a GGUF file as the files of a model's folder, by name: tokenizer.json, tokenizer_config.json and
    generation_config.json, as `Tokenizer.from_folder` and transformers read them.

    Raises:
      UserError: see `tokenizer_parts`.
    """
    metadata = _Metadata(read_header(path).metadata, str(path))
    backend, stop_ids = _backend(metadata), _stop_ids(metadata)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("add_bos_token", bool, False)),
        "clean_up_tokenization_spaces": False,
        **_marks(metadata),
        **({} if metadata.template is None else {"chat_template": metadata.template}),
    }
    return {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": stop_ids}, indent=2) + "\n",
    }
