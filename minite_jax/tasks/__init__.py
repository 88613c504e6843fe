"""Tasks: prompts, demonstrations and rewards, addressed by split and index, the same in every process."""

from minite_jax.tasks.base import Example, Task
from minite_jax.tasks.digit_sum import DigitSum
from minite_jax.text import ByteTokenizer

TASKS = {"digit_sum": DigitSum}

__all__ = ["TASKS", "ByteTokenizer", "DigitSum", "Example", "Task"]
