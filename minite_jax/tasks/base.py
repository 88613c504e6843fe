"""What a task offers."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol, SupportsIndex, runtime_checkable

from minite_jax.text import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
      prompt: what the policy is given.
      demonstration: a completion that supervised training imitates, the end mark included.
      answer: what the reward compares with.
    """

    prompt: str
    demonstration: str
    answer: str


@runtime_checkable  # jaxtyping's hook checks arguments by isinstance
class Task(Protocol):
    """Problems by split ("sft", "rl", "heldout") and index, and their rewards.

    Attributes:
      tokenizer: of prompts and completions.
      stop_ids: token ids that end a completion.
      max_prompt_tokens, max_completion_tokens: room that every problem fits in.
    """

    tokenizer: TextTokenizer
    stop_ids: tuple[int, ...]
    max_prompt_tokens: int
    max_completion_tokens: int

    def size(self, split: str) -> int:
        """Number of problems in a split."""

    def example(self, split: str, index: int) -> Example:
        """One problem. The same split and index always give the same problem."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def reward(self, example: Example, completion_ids: Iterable[SupportsIndex]) -> float:
        """Reward of a completion, a list or an array of ids, stop token included."""

    def traits(self, completion_ids: Iterable[SupportsIndex]) -> dict[str, float]:
        """Numbers that describe a completion apart from its reward, averaged in evaluation."""
