"""Tokenizers for tests: a small one that is made here, and Qwen3's own where it was fetched."""

import json
import runpy
from pathlib import Path

import pytest

from minite_jax.text import Tokenizer

# Of the small tokenizer: ids 0..255 are bytes, then these merged pairs, then marks behind a gap.
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("ð", "Ł")]
MARKS = {"<|endoftext|>": 270, "<|im_start|>": 271, "<|im_end|>": 272, "<think>": 273, "</think>": 274}

TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def _alphabet() -> list[str]:
    """The character that stands for each byte, written down from the rule in words: visible Latin-1 stands for itself."""
    visible = [chr(b) for b in range(256) if chr(b).isprintable() and chr(b) not in " \xa0\xad"]
    others = iter(range(0x100, 0x200))
    return [chr(b) if chr(b) in visible else chr(next(others)) for b in range(256)]


def tokenizer_json() -> dict:
    tokens = _alphabet() + ["".join(pair) for pair in MERGES]
    added = [
        {"id": i, "content": content, "special": "think" not in content}
        | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        for content, i in MARKS.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [" ".join(m) for m in MERGES]}
    model["vocab"] |= MARKS  # the package numbers added tokens on from the vocabulary's size, unless they are in it
    return {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, "pre_tokenizer": level,
        "decoder": level, "model": model, "truncation": None, "padding": None,
    }  # fmt: skip


class Folder:
    """A model's folder, whose files a test may change."""

    def __init__(self, path: Path):
        self.path = path
        self.tokenizer = tokenizer_json()
        self.config = {
            "eos_token": "<|im_end|>",
            "pad_token": {"content": "<|endoftext|>"},
            "chat_template": TEMPLATE,
            "added_tokens_decoder": {str(i): {"content": content} for content, i in MARKS.items()},
        }

    def write(self, **others) -> Path:
        """Writes the files, and others by the names of their stems."""
        for name, content in (others | {"tokenizer": self.tokenizer, "tokenizer_config": self.config}).items():
            if content is not None:
                (self.path / f"{name}.json").write_text(json.dumps(content))
        return self.path

    def load(self, **others) -> Tokenizer:
        return Tokenizer.from_folder(self.write(**others))


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    return Folder(tmp_path)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The small one, with two end tokens."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    return Folder(tmp_path_factory.mktemp("tokenizer")).load(generation_config={"eos_token_id": [272, 270]})


@pytest.fixture(scope="session")
def qwen3():
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    files = runpy.run_path(str(Path(__file__).with_name("qwen3_files.py")))
    if problem := files["missing"]():
        pytest.skip(f"needs Qwen3's tokenizer, and {problem}: `make test-files` fetches it, with npm")
    return Tokenizer.from_folder(files["folder"]())
