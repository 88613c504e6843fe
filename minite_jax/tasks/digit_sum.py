"""The sum of a few digits modulo 10, answered at once or with the running sums written out first.

    26455?=2.           direct
    26455?28272=2.      with the working: 2, 2+6, 8+4 mod 10, ...

A small model learns the working well and the direct answer hardly at all. Supervised training imitates a mixture of both;
reinforcement learning finds out which of the two is rewarded. With `max_shots` a prompt begins with some solved problems, so that
prompts have many lengths:

    94210?=6.00313?00347=7.26455?
"""

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np

from minite_jax.tasks.base import Example
from minite_jax.text import ByteTokenizer

_SPLITS = {"sft": (0.0, 0.4), "rl": (0.4, 0.8), "heldout": (0.8, 1.0)}
_ORDER_SEED = 20251118  # which prompts are in which split: part of the task, not of a run


class DigitSum:
    """The task for numbers of `num_digits` digits, leading zeros included.

    The 10 ** num_digits prompts are shuffled once and cut into disjoint splits: 40 % "sft", 40 % "rl", 20 % "heldout".

    Args:
      num_digits: 2 to 6.
      working_share: share of the prompts whose demonstration writes the working; fixed per prompt.
      max_shots: solved problems of split "sft" that a prompt may begin with. A problem has 0 to so many, always the same.
    """

    def __init__(self, num_digits: int = 5, working_share: float = 0.25, max_shots: int = 0):
        if not 2 <= num_digits <= 6:
            raise ValueError(f"num_digits={num_digits} must lie between 2 and 6")
        if not 0.0 <= working_share <= 1.0:
            raise ValueError(f"working_share={working_share} must lie between 0 and 1")
        if max_shots < 0:
            raise ValueError(f"max_shots={max_shots} must be 0 or more")
        self._num_digits, self._max_shots = num_digits, max_shots
        rng = np.random.default_rng(_ORDER_SEED)
        self._order = rng.permutation(10**num_digits)
        self._has_working = rng.random(10**num_digits) < working_share
        self.tokenizer = ByteTokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.stop_ids = tuple(self.encode("."))
        self.max_completion_tokens = num_digits + 3
        self.max_prompt_tokens = num_digits + 1 + max_shots * (num_digits + 1 + self.max_completion_tokens)

    def _range(self, split: str) -> tuple[int, int]:
        if split not in _SPLITS:
            raise ValueError(f"no split {split!r}; there are {', '.join(_SPLITS)}")
        total = len(self._order)
        return tuple(round(share * total) for share in _SPLITS[split])

    def size(self, split: str) -> int:
        first, last = self._range(split)
        return last - first

    def example(self, split: str, index: int) -> Example:
        first, last = self._range(split)
        if not 0 <= index < last - first:
            raise IndexError(f"index {index} outside split {split!r} of {last - first} problems")
        number = int(self._order[first + index])
        question, demonstration, answer = self._solved(number)
        return Example(self._shots(number) + question, demonstration, answer)

    def _shots(self, number: int) -> str:
        if not self._max_shots:
            return ""
        rng = np.random.default_rng([_ORDER_SEED, number])
        first, last = self._range("sft")
        others = self._order[first + rng.integers(last - first, size=rng.integers(self._max_shots + 1))]
        solved = (self._solved(int(other)) for other in others if other != number)
        return "".join(question + demonstration for question, demonstration, _ in solved)

    def _solved(self, number: int) -> tuple[str, str, str]:
        """Question, demonstration and answer."""
        digits = [int(c) for c in f"{number:0{self._num_digits}d}"]
        sums = np.cumsum(digits) % 10
        working = "".join(str(s) for s in sums) if self._has_working[number] else ""
        answer = str(sums[-1])
        return "".join(map(str, digits)) + "?", f"{working}={answer}.", answer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def reward(self, example: Example, completion_ids: Iterable[SupportsIndex]) -> float:
        """1 if the completion has one "=" and ends in "=", the right digit and the end mark; else 0. The working is not
        judged.
        """
        text = self.tokenizer.decode(completion_ids)
        return float(text.count("=") == 1 and text.endswith(f"={example.answer}."))

    def traits(self, completion_ids: Iterable[SupportsIndex]) -> dict[str, float]:
        """`working`: whether something stands before the "="."""
        return {"working": float(self.tokenizer.decode(completion_ids).find("=") > 0)}
