"""What a sampler is asked for, and its checks: all before anything runs, each with one line that says how to mend it.

Let P be prompts, L the padded prompt length.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.model.policy import Policy
from pallas_kernels.log_prob import Truncation
from pallas_kernels.scalars import integer

__all__ = ["SamplingParams", "checked", "pad_prompts", "padded_length"]

# Prompts are padded to a multiple of this, so that batches of similar length share one compiled program.
_PROMPT_BUCKET = 8


def _integers(name: str, values) -> np.ndarray:
    """One axis of integers as a numpy array."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be integers on one axis, not lists of unequal length") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{name} must be integers on one axis, not {array.dtype} of shape {array.shape}")
    return array


def _is_list(value) -> bool:
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample.

    Attributes:
      n: samples per prompt, all from one prefill.
      temperature: 0 means greedy; else at least 2^-100.
      top_p: keep the most probable tokens until they reach this probability; 1.0: all.
      top_k: keep this many tokens; 0 or -1, or more than there are: all.
      max_tokens: most new tokens per sample.
      stop_ids: a sample ends with the first of these tokens; the stop token belongs to the sample and is counted in the mask.

    Raises:
      ValueError: a value out of range, or one that is no number, or no integer where it must be one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("n", "max_tokens"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if np.ndim(self.stop_ids) != 1:
            raise ValueError(f"stop_ids={self.stop_ids!r} must be a sequence of integers")
        object.__setattr__(self, "stop_ids", tuple(integer("each of stop_ids", i) for i in self.stop_ids))
        for name, value in dataclasses.asdict(self.truncation).items():  # checked, and Python's own numbers
            object.__setattr__(self, name, value)

    @property
    def truncation(self) -> Truncation:
        """The log-prob convention that goes with these parameters; the learner takes the same object."""
        return Truncation(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def checked(
    policy: Policy, prompts, params: SamplingParams, key, request_ids, prefill_chunk
) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """The arguments of `minite_jax.sample` as arrays: tokens [P, L] int32, lengths [P] int32, request ids [P] uint32.

    Raises:
      ValueError: see `minite_jax.sample`.
    """
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0):
        kind = f"{key.dtype} of shape {key.shape}" if hasattr(key, "dtype") else type(key).__name__
        raise ValueError(f"key is {kind}: sampling needs one typed key, jax.random.key(seed)")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(f"a key of kind {jax.random.key_impl(key)}: sampling needs jax.random.key(seed, impl='threefry2x32')")
    vocab_size = policy.config.vocab_size
    for stop_id in params.stop_ids:
        if not 0 <= stop_id < vocab_size:
            raise ValueError(f"stop_ids holds {stop_id}, outside the vocabulary 0..{vocab_size - 1}: it would never stop")
    if prefill_chunk is not None:
        prefill_chunk = integer("prefill_chunk", prefill_chunk)
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1, or None for the whole prompt at once")
    tokens_PL, length_P = pad_prompts(prompts, vocab_size)
    ids_P = _integers("request_ids", range(len(prompts)) if request_ids is None else request_ids)
    if len(ids_P) != len(prompts):
        raise ValueError(f"{len(ids_P)} request_ids for {len(prompts)} prompts; give one for each")
    outside = ids_P[(ids_P < 0) | (ids_P > 2**32 - 1)]
    if outside.size:
        raise ValueError(f"request_ids holds {outside[0]}, outside 0..2**32-1")
    return tokens_PL, length_P, jnp.asarray(ids_P.astype(np.uint32))


def padded_length(length: int) -> int:
    """The length that prompts of at most `length` tokens are padded to: the next multiple of 8."""
    return -(-length // _PROMPT_BUCKET) * _PROMPT_BUCKET


def pad_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, room: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as an int32 array [P, L], L a multiple of 8, padded with 0 behind each prompt, and their lengths [P] int32.

    Args:
      prompts: token ids.
      vocab_size: V.
      room: the least L; programs compiled for one L serve all prompts that fit in it.

    Raises:
      ValueError: no list of prompts, no prompt, an empty prompt, a token outside the vocabulary, or one that is not an integer.
    """
    if not _is_list(prompts):
        raise ValueError(f"prompts is of type {type(prompts).__name__}; give a list of lists of token ids, such as [[1, 2, 3]]")
    for p, prompt in enumerate(prompts):
        if not _is_list(prompt):
            raise ValueError(f"prompt {p} is {prompt!r}; each prompt must be a list of token ids, such as [[1, 2, 3]] for one")
    if not len(prompts):
        raise ValueError("no prompts: give at least one")
    rows = [_integers(f"prompt {p}", prompt) for p, prompt in enumerate(prompts)]
    length_P = np.array([len(row) for row in rows], np.int32)
    if (length_P == 0).any():
        raise ValueError(
            f"prompt {int(np.argmin(length_P))} is empty; a prompt needs at least one token, for example a start token"
        )
    tokens_PL = np.zeros((len(rows), padded_length(max(room, int(length_P.max())))), np.int32)
    for p, row in enumerate(rows):
        outside = row[(row < 0) | (row >= vocab_size)]
        if outside.size:
            raise ValueError(f"prompt {p} holds token {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")
        tokens_PL[p, : len(row)] = row
    return tokens_PL, length_P
