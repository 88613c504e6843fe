"""Sampled ids are never decoded and encoded again (S10)."""

import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.errors import UserError
from minite_jax.text import Conversation

IM_END, END_OF_TEXT, IM_START, THINK, END_THINK = 272, 270, 271, 273, 274
FIRST = [{"role": "user", "content": "2+2?"}]
SECOND = [{"role": "user", "content": "3+3?"}]
ANSWER = [*b"assistant\n"]
NEXT = [10, IM_START, *b"user\n3+3?", IM_END, 10, IM_START, *ANSWER]


def test_sampled_ids_stay(tokenizer):
    """Ids that a tokenizer would not write: [h, e, l, l, o] for "hello", an id without text, half a character."""
    sampled = [*b"hello", 151_935, 0xC3, IM_END]
    assert tokenizer.encode(tokenizer.decode(sampled)) != sampled
    for array in (list, np.array, jnp.array):
        chat = Conversation(tokenizer, FIRST)
        prompt = list(chat.ids)
        assert prompt == tokenizer.encode_chat(FIRST, add_generation_prompt=True)
        chat.add_sampled(array(sampled))
        chat.add(SECOND)
        assert chat.ids == [*prompt, *sampled, *NEXT] and all(type(i) is int for i in chat.ids)
        assert chat.mask == [False] * len(prompt) + [True] * len(sampled) + [False] * len(NEXT)


@pytest.mark.parametrize("sampled", [[52], [52, END_OF_TEXT], [52, 10]])
def test_an_answer_without_the_end_mark_gets_it(tokenizer, sampled):
    """Cut at max_tokens, or ended by the other end token: nothing sampled is dropped, and the mark is not counted as sampled."""
    chat = Conversation(tokenizer, FIRST)
    chat.add_sampled(sampled)
    chat.add(SECOND)
    closed = [*sampled, IM_END, *NEXT]
    assert chat.ids[-len(closed) :] == closed
    assert sum(chat.mask) == len(sampled)


def test_thinking_stays_and_options_hold_for_every_turn(tokenizer):
    chat = Conversation(tokenizer, FIRST, enable_thinking=False)
    empty = [THINK, 10, 10, END_THINK, 10, 10]
    assert chat.ids[-6:] == empty
    chat.add_sampled([THINK, 97, END_THINK, 52, IM_END])
    chat.add(SECOND)
    wanted = [THINK, 97, END_THINK, 52, IM_END, *NEXT, *empty]
    assert chat.ids[-len(wanted) :] == wanted


def test_errors(tokenizer, folder):
    chat = Conversation(tokenizer, FIRST)
    with pytest.raises(ValueError, match="add_sampled comes before the next add"):
        chat.add(SECOND)
    for wrong in ([], [-1], np.zeros((1, 2), int), [True]):
        with pytest.raises(ValueError, match="a completion is a non-empty row of ids"):
            chat.add_sampled(wrong)
    chat.add_sampled([52, IM_END])
    ids = list(chat.ids)
    with pytest.raises(UserError, match="has the role 'robot'"):
        chat.add([{"role": "robot", "content": ""}])
    assert chat.ids == ids

    folder.config["chat_template"] = "{{ messages[-1].content }}"  # shows the last message alone
    chat = Conversation(folder.load(), FIRST)
    chat.add_sampled([52])
    with pytest.raises(UserError, match="does not show an earlier answer as it is: it cannot continue a conversation"):
        chat.add(SECOND)
