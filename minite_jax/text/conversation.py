"""A conversation as the model has seen it: ids that only ever grow, the sampled ones as they were sampled."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from minite_jax.errors import UserError
from minite_jax.text.tokenizer import Tokenizer

# Stands for an answer in a rendered text, to find where it ends.
_ANSWER = "0answer0of0the0assistant0"


class Conversation:
    """The ids of a conversation, turn by turn.

        chat = Conversation(tokenizer, [{"role": "user", "content": "What is 2+2?"}])
        rollouts = mt.sample(policy, [chat.ids], ...)
        chat.add_sampled(rollouts.completions()[0])
        chat.add([{"role": "user", "content": "And times three?"}])     # chat.ids is the next prompt

    Sampled ids are appended as they are. They are never decoded and encoded again, which may give other ids than those that the
    log-probs belong to. So an earlier turn keeps its thinking, which Qwen3's template would leave out of a conversation that it
    renders afresh.

    Args:
      tokenizer: with a chat template.
      messages: how it begins; see `ChatTemplate.render`.
      options: more for the template, such as ``enable_thinking=False``.

    Attributes:
      ids: all so far. They end where an answer begins, unless `add_sampled` was called last.
      mask: for each id whether it was sampled: what a loss may count.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any):
        self._tokenizer, self._options = tokenizer, options
        self.ids: list[int] = tokenizer.encode_chat(messages, add_generation_prompt=True, **options)
        self.mask: list[bool] = [False] * len(self.ids)

    def add_sampled(self, ids: Iterable[SupportsIndex]) -> None:
        """Appends a completion, its stop token included, as `Rollouts.completions` has it."""
        sampled = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
        if sampled.ndim != 1 or sampled.dtype.kind not in "iu" or (sampled < 0).any():
            raise ValueError("a completion is a non-empty row of ids that are not negative")
        self.ids += sampled.tolist()
        self.mask += [True] * len(sampled)

    def add(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Appends what others say after an answer: user and tool messages, and the beginning of the next answer.

        An answer that was cut, or that ended with another mark than the template's, is closed with the template's mark first.

        Raises:
          UserError: the template refuses the messages, or changes what the assistant has said so that its end is not found.
          ValueError: no answer was added since the last messages.
        """
        if not self.mask[-1]:
            raise ValueError("the ids end where an answer begins: add_sampled comes before the next add")
        before = [{"role": "user", "content": "0"}, {"role": "assistant", "content": _ANSWER}]
        text = self._tokenizer.apply_chat_template([*before, *messages], add_generation_prompt=True, **self._options)
        if text.count(_ANSWER) != 1:
            raise UserError("the chat template does not show an earlier answer as it is: it cannot continue a conversation")
        ids = self._tokenizer.encode(text.partition(_ANSWER)[2])
        # The answer's own end mark stands already.
        ids = ids[1:] if ids and ids[0] in self._tokenizer.stop_ids and ids[0] == self.ids[-1] else ids
        self.ids += ids
        self.mask += [False] * len(ids)
