"""Rotary angles of a model: plain, or stretched so that it reads texts longer than those that it learned from.

Let K be the head dimension, S positions. Angle i of position p is ``p * inverse_frequency[i]``.
"""

import dataclasses
import math

import numpy as np

from pallas_kernels.rotary import rotary_table

_FIELDS = {  # of each type: those it needs, those it may have
    "linear": (("factor",), ()),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow", "attention_factor")),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched. Names are those of Hugging Face's config.json; 0 stands for a field that is not given.

    Attributes:
      rope_type: "linear": all angles divided by the factor; "yarn" (Peng et al. 2023, arXiv:2309.00071): slow angles divided,
        fast ones kept, a ramp between, and queries times keys grow by attention_factor ** 2; "llama3" (Llama 3.1): slow angles
        divided, fast ones kept, a blend between.
      factor: how many times longer, at least 1.
      original_max_position_embeddings: tokens of the longest text that the model learned from.
      beta_fast: yarn: angles that turn more often than this in such a text are kept. 32 if not given.
      beta_slow: yarn: those that turn less often are divided by the factor. 1 if not given.
      attention_factor: yarn: multiplies queries and keys. ``0.1 ln(factor) + 1`` if not given.
      low_freq_factor: llama3: angles that turn less often than this are divided by the factor.
      high_freq_factor: llama3: those that turn more often are kept.

    Raises:
      ValueError: an unknown type, or a field that the type needs is missing, that it has not is given, or that is out of range.
    """

    rope_type: str
    factor: float = 0.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    attention_factor: float = 0.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0

    def __post_init__(self):
        if self.rope_type not in _FIELDS:
            raise ValueError(f"rope_type={self.rope_type!r} is not known; there are default, {', '.join(_FIELDS)}")
        needed, allowed = _FIELDS[self.rope_type]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{field.name}={value!r} of rope_type={self.rope_type} must be a finite number above 0")
            if not value and field.name in needed:
                raise ValueError(f"rope_type={self.rope_type} needs {field.name}")
            if value and field.name not in needed + allowed:
                raise ValueError(f"rope_type={self.rope_type} has no {field.name}")
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} of rope_type={self.rope_type} must be at least 1")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}")

    def to_dict(self) -> dict:
        """The fields that are given, as in config.json."""
        return {field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name))}


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """[K / 2] float64, radians per position, fastest first."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    slowed = plain / scaling.factor
    if scaling.rope_type == "linear":
        return slowed
    if scaling.rope_type == "yarn":
        kept = 1 - _yarn_ramp(head_dim, theta, scaling)
    else:
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return slowed * (1 - kept) + plain * kept


def _yarn_ramp(head_dim, theta, scaling):
    """[K / 2]: 0 where an angle is kept, 1 where it is divided."""

    def index_that_turns(turns):
        return head_dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_that_turns(scaling.beta_fast or 32.0)), 0)
    high = min(math.ceil(index_that_turns(scaling.beta_slow or 1.0)), head_dim - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def angle_tables(num_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of every position's angles times `attention_factor`, each float32 [S, K / 2], computed in float64."""
    if scaling is None:
        return rotary_table(num_positions, head_dim, theta)
    angle_SK = np.arange(num_positions, dtype=np.float64)[:, None] * inverse_frequencies(head_dim, theta, scaling)[None, :]
    factor = attention_factor(scaling)
    return (factor * np.cos(angle_SK)).astype(np.float32), (factor * np.sin(angle_SK)).astype(np.float32)
