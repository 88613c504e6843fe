"""Tensors that another engine recorded, in place of ours at their points of the forward, which runs on from there.

    swaps = RecordedSwaps(policy, theirs, ["layer.*/input", "layer.*/attention/stream", "final/stream"])
    found = attribute(swaps, swaps.reference, swaps.mask, swaps.groups)
    steps = along(swaps)                   # what is left of the gap from each point on, and what went between two

A tensor carries everything that happened before it: with theirs at `final/stream`, only the head is ours. So a share belongs to
all operations up to the point, and the difference of two neighbouring points of the residual stream to what lies between.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from minite_jax.diagnostics.attribute import Effect, effects
from minite_jax.diagnostics.trace import select
from minite_jax.diagnostics.trace_file import Trace, TraceError
from minite_jax.model.forward import scored_tokens
from minite_jax.model.policy import Policy
from minite_jax.model.taps import Taps
from pallas_kernels.log_prob import Truncation

LOG_PROB = "final/log_prob"
STREAM = ("layer.*/input", "layer.*/attention/stream", "final/stream")


class RecordedSwaps:
    """`attribute`'s `run`: the learner's forward over a trace's tokens, with some of its tensors in place of ours.

    One program is compiled, which holds all of these tensors; its argument says which are used. Rows that the trace lacks stay
    ours.

    Args:
      policy: see `minite_jax.prepare`; the model of the trace.
      trace: with tensors of our names and layouts (`experiments.diagnose` says how others are told apart), and with log-probs.
      patterns: which tensors may be swapped; those that the trace lacks are left out.
      truncation: of the trace's log-probs.
      max_bytes: the most bytes of recorded tensors that go to the device; more is refused.

    Attributes:
      reference, mask: [B, T-1], the trace's log-probs and where it has some.
      groups: each tensor is a group of its own.

    Raises:
      TraceError: no log-probs, no tensor that matches, sequences with holes, or a tensor of another shape than ours.
    """

    def __init__(
        self,
        policy: Policy,
        trace: Trace,
        patterns: Iterable[str] = STREAM,
        *,
        truncation: Truncation = Truncation(),  # noqa: B008
        max_bytes: int = 8 << 30,
    ):
        if LOG_PROB not in trace:
            raise TraceError(f"{trace.where} has no {LOG_PROB}: without its log-probs there is no gap to attribute")
        names = [name for name in select(policy, patterns) if name in trace]
        if not names:
            has = ", ".join(trace.names[:4])
            raise TraceError(f"{trace.where} has none of the tensors {', '.join(patterns)}; it has {has}, ...")
        size = sum(4 * int(np.prod(trace.header["tensors"][name]["shape"])) for name in names)
        if size > max_bytes:
            raise TraceError(f"{len(names)} tensors of {size / 2**30:.1f} GiB: choose fewer, or allow more bytes")
        self._policy, self._truncation, self._names = policy, truncation, tuple(names)
        place_R, shape = _places(trace)
        self.tokens = np.zeros(shape, np.int32)
        self.tokens.reshape(-1)[place_R] = trace.rows.token_ids
        log_prob, rows = trace.read(LOG_PROB)
        column = place_R[rows]
        reference, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
        reference.reshape(-1)[column], mask.reshape(-1)[column] = np.asarray(log_prob, np.float32), True
        self.reference, self.mask = reference[:, :-1], mask[:, :-1]

        self._ours = jax.eval_shape(functools.partial(_shapes, names=self._names, truncation=truncation), policy, self.tokens)
        self._recorded = {name: self._placed(trace, name, place_R) for name in names}
        self.groups = {name: [name] for name in names}

    def _placed(self, trace: Trace, name: str, place_R: np.ndarray):
        """A recorded tensor in our rows, and which of them it has."""
        array, rows = trace.read(name)
        ours = self._ours[name]
        if array.shape[1:] != ours.shape[1:]:
            theirs = f"tensor {name} of {trace.where} has rows of shape {array.shape[1:]}"
            raise TraceError(f"{theirs}, ours {tuple(ours.shape[1:])}: see docs/trace_format.md")
        full, has = np.zeros(ours.shape, ours.dtype), np.zeros(ours.shape[0], bool)
        full[place_R[rows]], has[place_R[rows]] = array.astype(ours.dtype), True
        return jnp.asarray(full), jnp.asarray(has)

    def __call__(self, parts: frozenset[str]) -> np.ndarray:
        """Log-probs [B, T-1] with these tensors of the trace in place of ours."""
        used = {name: jnp.asarray(name in parts) for name in self._names}
        return np.asarray(_run(self._policy, jnp.asarray(self.tokens), self._recorded, used, self._truncation))


def _places(trace: Trace) -> tuple[np.ndarray, tuple[int, int]]:
    """Where each row of the trace lies in the flattened batch, and the batch's shape."""
    numbers, sequence_R = np.unique(trace.rows.sequences, return_inverse=True)
    position_R = trace.rows.positions
    length_B = np.bincount(sequence_R)
    width = max(2, int(position_R.max(initial=0)) + 1)
    place_R = sequence_R * width + position_R
    whole = np.bincount(sequence_R, position_R + 1) == length_B * (length_B + 1) / 2
    if np.unique(place_R).size != len(place_R) or not whole.all():
        raise TraceError(f"{trace.where}: each sequence must have every position from 0 on once; it lacks some or has them twice")
    return place_R, (len(numbers), width)


def _shapes(policy, tokens, *, names, truncation):
    taps = Taps(names)
    scored_tokens(policy, tokens, truncation, taps=taps)
    return taps.tensors


@functools.partial(jax.jit, static_argnames=("truncation",))
def _run(policy, tokens, recorded, used, truncation):
    def edit(name):
        theirs, has = recorded[name]

        def replaced(ours):
            here = (used[name] & has).reshape(-1, *[1] * (ours.ndim - 1))
            return jnp.where(here, theirs, ours)

        return replaced

    taps = Taps(edits={name: edit(name) for name in recorded})
    return scored_tokens(policy, tokens, truncation, taps=taps)[0]


@dataclasses.dataclass(frozen=True)
class Step:
    """A point of the forward.

    Attributes:
      name: of the tensor.
      after: what is left with theirs from this point on.
      between: share of the whole gap that goes between the point before (at first: the tokens) and this one. Below 0 where two
        differences cancel.
    """

    name: str
    after: Effect
    between: float


def along(swaps: RecordedSwaps, names: Sequence[str] | None = None, *, samples: int = 1000, seed: int = 0) -> list[Step]:
    """The gap's way through the forward: their tensor in place of ours at one point after the other, in execution order.

    Args:
      swaps: with points of the residual stream (`STREAM`).
      names: which of its tensors; None: all.
      samples, seed: see `attribute`.
    """
    names = list(swaps.groups) if names is None else list(names)
    found = effects(swaps, swaps.reference, swaps.mask, names, samples=samples, seed=seed)
    shares = [0.0, *(each.share for each in found)]
    return [Step(name, each, share - before) for name, each, share, before in zip(names, found, shares[1:], shares, strict=False)]
