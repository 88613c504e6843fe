"""Qwen3's own tokenizer and chat template. The texts that are wanted were written by reading the template."""

import pytest

from minite_jax.errors import UserError
from minite_jax.text import Conversation, TextStream

END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = 151_643, 151_644, 151_645, 151_667, 151_668
USER = [{"role": "user", "content": "2+2?"}]
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n"
THOUGHT = {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b, é"}}


def test_vocabulary(qwen3):
    """151,643 pairs and bytes, 26 marks; the model has 151,936 rows (S06)."""
    assert qwen3.vocab_size == 151_669
    assert qwen3.stop_ids == (IM_END,)  # the package has no generation_config.json
    assert {END_OF_TEXT, IM_START, IM_END} < qwen3.special_ids
    assert not {THINK, END_THINK} & qwen3.special_ids
    assert qwen3.decode([19, 151_668, 151_669, 151_935]) == "4</think>\ufffd\ufffd"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9707, 11, 1879, 0]),
        ("What is 2+2?", [3838, 374, 220, 17, 10, 17, 30]),
        ("12345", [16, 17, 18, 19, 20]),  # digits one by one
        ("  a\n\n\tb", [220, 264, 271, 2233]),
        ("héllo 你好 🙂", [71, 18503, 385, 220, 108386, 27484]),
        ("<|im_start|>user\n", [IM_START, 872, 198]),
        ("<think>\n\n</think>\n\n", [THINK, 271, END_THINK, 271]),
    ],
)
def test_known_encodings(qwen3, text, ids):
    assert qwen3.encode(text) == qwen3.encode(text, add_special=True) == ids  # no mark of the beginning
    assert qwen3.decode(ids) == text


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
def test_decoding_is_the_packages_for_every_token(qwen3, step):
    """Each id alone, and all in a row, where pieces of characters meet."""
    ids = range(0, qwen3.vocab_size, step)
    assert [qwen3.decode([i]) for i in ids] == qwen3._backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    assert qwen3.decode(ids) == qwen3._backend.decode(list(ids), skip_special_tokens=False)


def test_streaming(qwen3):
    """A family of five characters in one glyph, and characters whose bytes lie in several tokens."""
    text = "naïve 👨‍👩‍👧 𓀀 ꙮ 你好\n"
    ids = qwen3.encode(text)
    stream = TextStream(qwen3, hide=qwen3.special_ids)
    pieces = [stream.push(i) for i in [*ids, IM_END]] + [stream.finish()]
    assert "".join(pieces) == text and "" in pieces[:-2]
    assert not any("\ufffd" in piece for piece in pieces)


def test_generation_prompts(qwen3):
    """S08: no mark of the beginning, no system text of the template's own; and an empty thought where thinking is off."""
    render = qwen3.apply_chat_template
    assert render(USER) == ASKED
    thinking = ASKED + "<|im_start|>assistant\n"
    assert render(USER, add_generation_prompt=True) == thinking
    assert render(USER, add_generation_prompt=True, enable_thinking=True) == thinking
    assert render(USER, add_generation_prompt=True, enable_thinking=False) == thinking + "<think>\n\n</think>\n\n"
    ids = [IM_START, 872, 198, 17, 10, 17, 30, IM_END, 198, IM_START, 77_091, 198]
    assert qwen3.encode_chat(USER, add_generation_prompt=True) == ids
    assert qwen3.encode_chat(USER, add_generation_prompt=True, enable_thinking=False) == [*ids, THINK, 271, END_THINK, 271]


def test_only_the_last_answer_keeps_its_thought(qwen3):
    """S08: so the text of a conversation does not begin with the text of its beginning."""
    render = qwen3.apply_chat_template
    short = render([*USER, THOUGHT])
    assert short == ASKED + "<|im_start|>assistant\n<think>\nadd\n</think>\n\n4<|im_end|>\n"
    assert render([*USER, {"role": "assistant", "content": "4", "reasoning_content": "add"}]) == short
    system = [{"role": "system", "content": "Be brief."}]
    longer = render([*system, *USER, THOUGHT, *USER], add_generation_prompt=True)
    assert longer == (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + ASKED + "<|im_start|>assistant\n4<|im_end|>\n" + ASKED
        + "<|im_start|>assistant\n"
    )  # fmt: skip
    assert not render([*USER, THOUGHT, *USER]).startswith(short)


def test_tools(qwen3):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "é<"}}}]}
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    wanted = (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided "
        "with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "a < b, é"}}\n'
        "</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>"
        '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        "<|im_end|>\n"
        + ASKED
        + '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": "é<"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert qwen3.apply_chat_template([*USER, call, *results], tools=[TOOL], add_generation_prompt=True) == wanted


def test_messages_that_the_template_cannot_show(qwen3):
    with pytest.raises(
        UserError, match="the chat template of .* fails for these messages: 'list object' has no attribute 'startswith'"
    ):
        qwen3.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}])


def test_a_conversation_keeps_what_was_sampled(qwen3):
    """S10: "Hello" as two tokens, and a thought."""
    hello = [32_713, 385]  # Hel, lo
    assert qwen3.decode(hello) == "Hello" and qwen3.encode("Hello") == [9707]
    sampled = [THINK, 271, END_THINK, 271, *hello, IM_END]
    chat = Conversation(qwen3, USER)
    chat.add_sampled(sampled)
    chat.add([{"role": "user", "content": "3+3?"}])
    text = (
        ASKED + "<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert qwen3.decode(chat.ids) == text
    first = chat.mask.index(True)
    assert chat.ids[first : first + len(sampled)] == sampled and sum(chat.mask) == len(sampled)
    chat.add_sampled([19, IM_END])
    chat.add([{"role": "tool", "content": "4"}])
    assert qwen3.decode(chat.ids[-22:]).endswith(
        "4<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
