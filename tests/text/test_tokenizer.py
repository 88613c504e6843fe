"""Text to ids and back, with a small byte-level tokenizer made by the tests and the byte tokenizer."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minite_jax.errors import UserError
from minite_jax.text import ByteTokenizer, TextStream, TextTokenizer, Tokenizer

IM_END, END_OF_TEXT, IM_START, THINK = 272, 270, 271, 273


def _line(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def _streamed(tokenizer, ids, hide=()):
    stream = TextStream(tokenizer, hide)
    return [*map(stream.push, ids), stream.finish()]


def test_both_are_text_tokenizers(tokenizer):
    for each in (tokenizer, ByteTokenizer()):
        assert isinstance(each, TextTokenizer)
    assert not isinstance("text", TextTokenizer)


def test_known_encodings(tokenizer):
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.encode("hell he") == [258, 32, 256]
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.encode("🙂") == [260, 0x99, 0x82]  # F0 9F is one token
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [IM_START, 256, IM_END]
    assert tokenizer.encode("") == []
    assert tokenizer.vocab_size == 275
    assert tokenizer.special_ids == {END_OF_TEXT, IM_START, IM_END}


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_text_comes_back_and_is_streamed_in_whole_characters(tokenizer, text):
    for each in (tokenizer, ByteTokenizer()):
        ids = each.encode(text)
        assert each.decode(ids) == text
        pieces = _streamed(each, ids)
        assert "".join(pieces) == text
        assert pieces[-1] == ""
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0x7E, 0xFF), st.integers(0, 260), st.integers(270, 274)), max_size=12))
def test_any_ids_decode_as_the_package_decodes_them(tokenizer, ids):
    """Broken UTF-8 too, and the stream gives the same in parts."""
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert "".join(_streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_appears_with_its_last_token():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in "a🙂é".encode()] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.push(0xE2) == stream.push(0x82) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(0x61) == "a" and stream.finish() == ""
    # Something else in the midst of a character: a mark for the broken one, and nothing is lost.
    assert [stream.push(i) for i in (0xE2, 0x61)] == ["", "\ufffda"]


@pytest.mark.parametrize("padding", [261, 269, 275, 151_935, 2**40])
def test_ids_without_text_are_seen_as_a_mark(tokenizer, padding):
    """S06: the model's vocabulary is larger than the tokenizer's, and the gap before the marks."""
    assert tokenizer.decode([259, padding, 97]) == "hello\ufffda"
    assert tokenizer.decode([0xC3, padding, 0xA9]) == "\ufffd\ufffd\ufffd"
    assert _streamed(tokenizer, [padding, 259]) == ["\ufffd", "hello", ""]


@pytest.mark.parametrize("array", [list, np.array, np.uint32, jnp.array])
def test_arrays_of_ids(tokenizer, array):
    assert tokenizer.decode(array([259, 32, IM_END])) == "hello <|im_end|>"
    assert tokenizer.decode(array([259, IM_END, 0xC3, 0xA9, THINK]), hide_special=True) == "helloé<think>"
    assert tokenizer.decode(array([])[:0].astype(int) if array is not list else []) == ""


def test_negative_ids_are_errors(tokenizer):
    for each in (tokenizer, ByteTokenizer()):
        for ids in ([97, -1], np.array([97, -1])):
            with pytest.raises(ValueError, match="token id -1 is negative"):
                each.decode(ids)


@pytest.mark.parametrize(
    ("others", "eos", "wanted"),
    [
        (dict(generation_config={"eos_token_id": [IM_END, END_OF_TEXT]}), "<|im_end|>", (IM_END, END_OF_TEXT)),
        (dict(generation_config={"eos_token_id": END_OF_TEXT}), "<|im_end|>", (END_OF_TEXT, IM_END)),
        (dict(generation_config={}, config={"eos_token_id": 270}), "<|im_end|>", (END_OF_TEXT, IM_END)),
        (dict(generation_config={"eos_token_id": 272}, config={"eos_token_id": 270}), "<|im_end|>", (IM_END,)),
        (dict(), {"content": "<|im_end|>", "lstrip": False}, (IM_END,)),
        (dict(config={"eos_token_id": None}), None, ()),
    ],
)
def test_stop_ids(folder, others, eos, wanted):
    folder.config["eos_token"] = eos
    assert folder.load(**others).stop_ids == wanted


def test_a_folder_with_the_tokenizer_alone(folder):
    folder.config = None
    tokenizer = folder.load()
    assert tokenizer.stop_ids == () and tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert _line(tokenizer.apply_chat_template, []) == (
        f"{folder.path} has no chat template: give the model a plain text, or copy chat_template.jinja there"
    )


def test_nothing_is_cut_or_filled_up(folder):
    folder.tokenizer["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    folder.tokenizer["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 270, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    assert folder.load().encode("abcde") == list(b"abcde")


def test_marks_around_a_text_are_added_where_asked(folder):
    folder.tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "bos", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"bos": {"id": "bos", "ids": [270], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    tokenizer = folder.load()
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", add_special=True) == [270, 97]


def test_errors_of_files(folder):
    load, path = Tokenizer.from_folder, folder.path
    assert _line(load, path / "no") == f"there is no folder {path / 'no'}: give the folder of a model, which has tokenizer.json"
    assert _line(load, path) == f"{path} has no tokenizer.json: copy the model's tokenizer files there"
    (path / "tokenizer.json").write_text('{"version": "1.0",')
    assert _line(load, path).startswith(f"{path / 'tokenizer.json'} is no tokenizer: ")
    folder.write()
    (path / "tokenizer_config.json").write_text("{")
    assert _line(load, path).startswith(f"{path / 'tokenizer_config.json'} cannot be read as JSON (")
    (path / "tokenizer_config.json").write_text("[]")
    assert _line(load, path) == f"{path / 'tokenizer_config.json'} holds no JSON object: fetch the file again"
    (path / "tokenizer_config.json").write_bytes(b"\xff\xfe{}")
    assert "cannot be read" in _line(load, path)


def test_errors_of_contents(folder):
    assert _line(folder.load, generation_config={"eos_token_id": ["272"]}) == (
        f"{folder.path / 'generation_config.json'}: eos_token_id must be an id or a list of ids, not ['272']"
    )
    assert _line(folder.load, generation_config={"eos_token_id": 275}) == (
        f"{folder.path}: the end token 275 lies outside the tokenizer's ids 0..274"
    )
    (folder.path / "generation_config.json").unlink()
    folder.config["eos_token"] = "<|eot|>"
    assert "tokenizer.json has no token '<|eot|>', the eos_token of tokenizer_config.json" in _line(folder.load)
    folder.config["eos_token"] = None
    folder.config["added_tokens_decoder"]["271"] = {"content": "<|start|>"}
    assert "token 271 is '<|start|>' in tokenizer_config.json and '<|im_start|>' in tokenizer.json" in _line(folder.load)
    folder.config["added_tokens_decoder"] = {"9" * 30: {"content": "a"}}
    assert "9 is 'a' in tokenizer_config.json and None in tokenizer.json" in _line(folder.load)
    folder.config["added_tokens_decoder"] = [1]
    assert "tokenizer_config.json: added_tokens_decoder must be an object; copy it anew" in _line(folder.load)
    folder.config["added_tokens_decoder"] = None
    folder.tokenizer["decoder"] = {"type": "ByteFallback"}
    assert _line(folder.load) == (
        f"{folder.path} has the decoder ByteFallback; only byte-level tokenizers (ByteLevel) can be read"
    )
    folder.tokenizer["decoder"] = None
    assert "has the decoder none" in _line(folder.load)


def test_text_that_is_no_unicode(tokenizer):
    """As a command line hands over bytes that are not UTF-8."""
    assert _line(tokenizer.encode, "ab\udcff") == "the text is no valid Unicode at character 2: give it as UTF-8"


def test_missing_packages_are_named(folder, monkeypatch):
    path = folder.write()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizers is needed here and is not installed: pip install 'minite_jax\[hf\]'"):
        Tokenizer.from_folder(path)
