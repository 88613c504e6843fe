"""The tokenizer in a GGUF file's metadata."""

import json
import runpy
from pathlib import Path

import pytest

from minite_jax.errors import UserError
from minite_jax.text import Tokenizer
from minite_jax.text.gguf import tokenizer_files

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture
def path_with(files):
    """Function of changes of the tokenizer's metadata: path of a file that has nothing else."""
    return lambda **changes: files.write(files.tokenizer_metadata(**changes), {})


def test_text_and_marks(path_with, files):
    tokenizer = Tokenizer.from_gguf(path_with())
    byte = {token: 4 + i for i, token in enumerate(files.alphabet)}
    # Digits are never merged: "12" is a token that no text of this cut reaches.
    assert tokenizer.encode(" the 12") == [262, byte["e"], byte["Ġ"], byte["1"], byte["2"]]
    assert tokenizer.encode("<|im_start|>t<think>") == [1, byte["t"], 3]
    for text in ("é 🙂\r\n\t don't", "", "Ġ", "\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop_ids == (2, 0) and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 263 and tokenizer.decode([263]) == "\ufffd"
    assert tokenizer.encode_chat(MESSAGES, add_generation_prompt=True) == [1, byte["a"], 2, byte[">"]]


def test_a_mark_of_the_beginning(path_with, files):
    byte = 4 + files.alphabet.index("a")
    assert Tokenizer.from_gguf(path_with(add_bos_token=True)).encode("a", add_special=True) == [1, byte]
    assert Tokenizer.from_gguf(path_with()).encode("a", add_special=True) == [byte]


def test_the_files_of_a_folder(path_with, tmp_path):
    path = path_with(pre="qwen2")
    for name, text in tokenizer_files(path).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    one, other = Tokenizer.from_gguf(path), Tokenizer.from_folder(tmp_path)
    text = "Here's 1234 <think> naïve\n\n  x"
    assert one.encode(text) == other.encode(text)
    assert one.stop_ids == other.stop_ids and one.special_ids == other.special_ids and one.vocab_size == other.vocab_size
    assert one.encode_chat(MESSAGES) == other.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model=None), "tokenizer.ggml.model is missing: the file has no tokenizer"),
        (dict(model="llama"), "tokenizer.ggml.model='llama': only byte-level"),
        (dict(pre="deepseek-v3"), "pre='deepseek-v3': how it cuts texts is not known here; there are smollm, qwen2"),
        (dict(pre=None), "tokenizer.ggml.pre=None"),
        (dict(tokens=None), "tokenizer.ggml.tokens is missing"),
        (dict(tokens="abc"), "tokenizer.ggml.tokens should be of type list"),
        (dict(tokens=["a", "a"]), "has a token twice"),
        (dict(tokens=[1, 2]), "should be a list of texts"),
        (dict(token_type=[1]), "token_type has 1 entries for 265 tokens"),
        (dict(merges=None), "tokenizer.ggml.merges is missing"),
        (dict(merges=["Ġ t", "x q"]), "merges has 'x q', which is no pair of its tokens"),
        (dict(eos_token_id=265), "eos_token_id=265 is none of its 265 tokens"),
        (dict(eos_token_id="2"), "eos_token_id should be of type int"),
    ],
)
def test_wrong_metadata(path_with, changes, message):
    path = path_with(**changes)
    with pytest.raises(UserError) as error:
        Tokenizer.from_gguf(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_qwen3s_own(files):
    """The same ids as Qwen3's tokenizer.json, from its tokens and merges and the name `qwen2` alone."""
    fetched = runpy.run_path(str(Path(__file__).parents[1] / "text" / "qwen3_files.py"))
    if problem := fetched["missing"]():
        pytest.skip(f"{problem}; `make test-files` fetches it")
    folder = fetched["folder"]()
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    special = {each["content"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    assert list(map(vocabulary.get, tokens)) == list(range(len(tokens)))
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    own = dict(pre="qwen2", tokens=tokens, token_type=[special.get(each, 1) for each in tokens], merges=merges)
    ours = Tokenizer.from_gguf(files.write(files.tokenizer_metadata(**own), {}))
    theirs = Tokenizer.from_folder(folder)
    text = Path(__file__).read_text() + "Grüße, 日本語! 𝔘 e\u0301 <|im_start|>x<think>1234.5 I'LL\r\n\r\n \t end  "
    assert ours.encode(text) == theirs.encode(text)
    assert ours.special_ids == theirs.special_ids and ours.vocab_size == theirs.vocab_size
