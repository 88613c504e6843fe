"""How much of the gap between two engines comes from which operation: one is swapped for the other engine's, the rest is run on.

    found = attribute(run, their_log_probs, mask, groups={"attention": ["attention@0", "attention@1"], "router": [...]})
    print(found.text())

`run` is our engine A with some parts swapped for those of engine B; it gives the log-probs of the same tokens that B gave. Let
D be their difference. The gap is the mean of ``|D|`` over the tokens of the mask, and beside it k3, the mean of ``e^D - D - 1``
with D ours minus theirs. The *share* that parts explain is

    1 - gap with the parts swapped / gap with none swapped:

1 where nothing is left of the gap, below 0 where it grows. Shares of single parts need not add up to that of all: two causes of
equal size and independent sign, a and b, give a gap like sqrt(a^2 + b^2), and removing one of them explains 0.29 of it. What
does not add up is said (`interactions`). Intervals are 95 % bootstrap intervals over sequences (Efron 1979), as tokens of a
sequence are not independent.

Parts come in groups, so that a model of many layers stays in reach: groups are chosen first ("attention, all layers"), and only
the chosen ones are taken apart, by halves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Array, Bool, Float

from minite_jax.errors import UserError

_Host = Array | np.ndarray
Run = Callable[[frozenset[str]], Float[_Host, "B T"]]
# A part of a group is looked into further while it explains at least this much of what its group does.
_WORTH_A_LOOK = 0.1
# A smaller interaction is not worth a line.
_SMALLEST_INTERACTION = 0.02


@dataclasses.dataclass(frozen=True)
class Effect:
    """What is left of a gap with some parts swapped.

    Attributes:
      names: of the groups or parts.
      gap: mean |D| that is left, nats.
      k3: mean of e^D - D - 1 that is left.
      exact: share of the tokens whose log-probs have equal bits.
      share: explained of the gap: 1 - gap / gap with nothing swapped.
      interval: of the share, 95 %.
      share_k3: the same of k3.
    """

    names: tuple[str, ...]
    gap: float
    k3: float
    exact: float
    share: float
    interval: tuple[float, float]
    share_k3: float


@dataclasses.dataclass(frozen=True)
class Interaction:
    """How much more (or less, below 0) two groups explain together than the sum of what each does alone, and its interval."""

    names: tuple[str, str]
    joint: float
    beyond_sum: float
    interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Where a gap comes from.

    Attributes:
      none: the gap as it is.
      everything: with all groups swapped. What is left has causes that no group holds.
      alone: each group on its own, the largest share first.
      without: everything but this group; a group that matters leaves a gap here.
      chosen: forward selection: the first entry has the best group, the next one more, and so on.
      stopped: why the selection ended.
      parts: by chosen group, what parts of it explain while the rest of the selection is swapped; in shares of the group's own
        effect.
      interactions: pairs whose joint effect is not the sum.
      tokens, sequences: how many were compared.
      runs: how many times `run` was called.
    """

    none: Effect
    everything: Effect
    alone: list[Effect]
    without: list[Effect]
    chosen: list[Effect]
    stopped: str
    parts: dict[str, list[Effect]]
    interactions: list[Interaction]
    tokens: int
    sequences: int
    runs: int

    def steps(self) -> list[tuple[str, Effect]]:
        """What each step of the selection adds, in words, beside `chosen`."""
        before = [0, *(len(each.names) for each in self.chosen)]
        steps = zip(before, self.chosen, strict=False)
        return [("+ " * (start > 0) + " and ".join(each.names[start:]), each) for start, each in steps]

    def text(self) -> str:
        """The findings for a terminal."""
        percent = lambda each: f"{each.share:7.1%} ({each.interval[0]:.1%} .. {each.interval[1]:.1%})"  # noqa: E731
        lines = [f"gap {self.none.gap:.4g} nats, k3 {self.none.k3:.3g}, {self.tokens} tokens of {self.sequences} sequences"]
        lines += [f"everything swapped explains {percent(self.everything)}, leaves {self.everything.gap:.3g}"]
        lines += ["alone:"] + [f"  {each.names[0]:<24} {percent(each)}" for each in self.alone]
        lines += ["chosen one after the other:"]
        lines += [f"  {names:<24} {percent(each)}" for names, each in self.steps()]
        lines += [f"  {self.stopped}"]
        for group, parts in self.parts.items():
            lines += [f"{group}, of its effect:"] + [f"  {_span(each.names):<24} {each.share:7.1%}" for each in parts]
        if self.interactions:
            lines += ["together, beyond the sum of both alone:"]
            lines += [f"  {' and '.join(i.names):<40} {i.beyond_sum:+.1%} ({i.interval[0]:+.1%} .. {i.interval[1]:+.1%})"
                      for i in self.interactions]  # fmt: skip
        return "\n".join(lines)


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


class _Gaps:
    """Runs, each made once, and their gaps by sequence."""

    def __init__(self, run: Run, reference, mask, samples: int, seed: int):
        self._run, self._cache = run, {}
        self.reference, self.mask = np.asarray(reference, np.float32), np.asarray(mask, bool)
        if self.reference.shape != self.mask.shape or self.mask.ndim != 2:
            raise UserError(f"log-probs {self.reference.shape} and mask {self.mask.shape}: both must be [sequences, tokens]")
        self._counted_B = self.mask.any(axis=1)
        if not self._counted_B.any():
            raise UserError("the mask leaves no token to compare")
        self._check("the other engine", self.reference)
        sequences = int(self._counted_B.sum())
        self._draws = np.random.default_rng(seed).integers(0, sequences, (samples, sequences))

    def _check(self, whose, log_probs) -> None:
        bad = int((~np.isfinite(log_probs) & self.mask).sum())
        if bad:
            raise UserError(f"{whose} gave {bad} log-probs that are NaN or infinite: find their cause first")

    @property
    def sequences(self) -> int:
        return int(self._counted_B.sum())

    @property
    def runs(self) -> int:
        return len(self._cache)

    def sums(self, parts: frozenset[str]) -> np.ndarray:
        """[3, sequences] float64: sums over each sequence's tokens of |D|, of k3 and of equal bits."""
        if parts not in self._cache:
            ours = np.asarray(self._run(parts), np.float32)
            if ours.shape != self.mask.shape:
                raise UserError(f"our engine gave log-probs {ours.shape} for tokens {self.mask.shape}: give both the same tokens")
            self._check("our engine", ours)
            difference = np.where(self.mask, ours.astype(np.float64) - self.reference, 0.0)
            equal = self.mask & (ours.view(np.uint32) == self.reference.view(np.uint32))
            sums = np.stack([np.abs(difference), np.expm1(difference) - difference, equal], axis=0).sum(axis=2)
            self._cache[parts] = sums[:, self._counted_B]
        return self._cache[parts]

    def check_differs(self) -> None:
        if self.gap(frozenset()) == 0:
            raise UserError("the two engines' log-probs are equal: there is no gap to attribute")

    def gap(self, parts: frozenset[str]) -> float:
        return float(self.sums(parts)[0].sum() / self.mask.sum())

    def resampled(self, parts: frozenset[str], metric: int = 0) -> np.ndarray:
        """[samples] sums of a metric over sequences drawn with replacement, the same for all parts."""
        return self.sums(parts)[metric][self._draws].sum(axis=1)

    def effect(self, names: Sequence[str], parts: frozenset[str], base=frozenset(), whole=None) -> Effect:
        """Of `parts` against `base`; in shares of what `whole` does to `base` (None: of all that base leaves)."""
        total, k3, equal = self.sums(parts).sum(axis=1)
        tokens = int(self.mask.sum())
        return Effect(
            names=tuple(names), gap=total / tokens, k3=k3 / tokens, exact=equal / tokens,
            share=float(_share(*(self.sums(each)[0].sum() if each is not None else 0.0 for each in (base, parts, whole)))),
            interval=_interval(_share(*(self.resampled(each) if each is not None else 0.0 for each in (base, parts, whole)))),
            share_k3=float(_share(*(self.sums(each)[1].sum() if each is not None else 0.0 for each in (base, parts, whole)))),
        )  # fmt: skip


def _share(base, after, whole):
    with np.errstate(divide="ignore", invalid="ignore"):
        return (base - after) / (base - whole)


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(values, (2.5, 97.5))
    return float(low), float(high)


def attribute(
    run: Run,
    reference: Float[_Host, "B T"],
    mask: Bool[_Host, "B T"],
    groups: Mapping[str, Sequence[str]],
    *,
    target: float = 0.95,
    pairs_of: int = 5,
    samples: int = 1000,
    seed: int = 0,
) -> Attribution:
    """Which groups of parts explain a gap.

    Forward selection takes the group with which the least is left, again and again, until `target` is explained or nothing
    makes the gap smaller by more than chance: no group and no two groups (the interval of what they take away, over resampled
    sequences, must lie above 0).

    Args:
      run: our engine's log-probs [B, T], float32 nats, with a set of parts swapped for the other engine's. It is called about
        n^2 / 2 + 3 n times for n groups: compile one program whose argument says what is swapped.
      reference: [B, T] the other engine's log-probs of the same tokens.
      mask: [B, T] tokens that count.
      groups: parts by name of their group, in the order in which parts shall be halved (layers from first to last).
      target: share at which the selection ends.
      pairs_of: so many of the largest groups are looked at in pairs.
      samples: bootstrap samples.
      seed: of the bootstrap.

    Raises:
      UserError: log-probs that are not finite, of other shapes, or that do not differ at all; no groups.
    """
    if not groups:
        raise UserError("there is nothing to swap: give at least one group of parts")
    gaps = _Gaps(run, reference, mask, samples, seed)
    parts_of = {name: frozenset(parts) for name, parts in groups.items()}
    union = lambda names: frozenset().union(*(parts_of[name] for name in names))  # noqa: E731
    gaps.check_differs()

    everything = union(parts_of)
    alone = {name: gaps.effect([name], parts) for name, parts in parts_of.items()}
    chosen, names, stopped = [], [], ""
    while not stopped:
        left = [name for name in parts_of if name not in names]
        now = union(names)
        if chosen and chosen[-1].share >= target:
            stopped = f"{target:.0%} are explained"
        elif not left:
            stopped = "no group is left"
        else:
            # Two at once where none helps alone: some differences show only where another is gone.
            for size in (1, 2):
                best = min(itertools.combinations(left, size), key=lambda more: gaps.gap(now | union(more)), default=())
                gain = gaps.resampled(now) - gaps.resampled(now | union(best))
                if np.percentile(gain, 2.5) > 0:
                    names += best
                    chosen.append(gaps.effect(names, union(names)))
                    break
            else:
                stopped = "nothing else makes the gap smaller by more than chance"

    by_size = sorted(parts_of, key=lambda name: (name not in names, -abs(alone[name].share)))[:pairs_of]
    interactions = [_interaction(gaps, parts_of, pair) for pair in itertools.combinations(by_size, 2)]
    return Attribution(
        none=gaps.effect([], frozenset()),
        everything=gaps.effect(list(parts_of), everything),
        alone=sorted(alone.values(), key=lambda each: -each.share),
        without=[gaps.effect([name], everything - parts) for name, parts in parts_of.items()],
        chosen=chosen,
        stopped=stopped,
        parts={name: _located(gaps, union(names) - parts_of[name], groups[name]) for name in names if len(groups[name]) > 1},
        interactions=[each for each in interactions if each.interval[0] * each.interval[1] > 0
                      and abs(each.beyond_sum) >= _SMALLEST_INTERACTION],
        tokens=int(gaps.mask.sum()),
        sequences=gaps.sequences,
        runs=gaps.runs,
    )  # fmt: skip


def effects(
    run: Run,
    reference: Float[_Host, "B T"],
    mask: Bool[_Host, "B T"],
    parts: Sequence[str],
    *,
    samples: int = 1000,
    seed: int = 0,
) -> list[Effect]:
    """What each part explains alone, in the order given. Arguments and errors: see `attribute`."""
    gaps = _Gaps(run, reference, mask, samples, seed)
    gaps.check_differs()
    return [gaps.effect([part], frozenset([part])) for part in parts]


def _interaction(gaps: _Gaps, parts_of, pair) -> Interaction:
    first, second = (parts_of[name] for name in pair)

    def beyond(total):
        share = lambda parts: _share(total(frozenset()), total(parts), 0.0)  # noqa: E731
        return share(first | second) - share(first) - share(second), share(first | second)

    value, joint = beyond(lambda parts: gaps.sums(parts)[0].sum())
    return Interaction(pair, float(joint), float(value), _interval(beyond(gaps.resampled)[0]))


def _located(gaps: _Gaps, others: frozenset[str], parts: Sequence[str]) -> list[Effect]:
    """The parts of a group that have its effect: halves, and halves of those halves that are worth a look."""
    whole, found, waiting = others | frozenset(parts), [], [tuple(parts)]
    while waiting:
        span = waiting.pop(0)
        effect = gaps.effect(span, others | frozenset(span), base=others, whole=whole)
        if len(span) > 1 and effect.share >= _WORTH_A_LOOK:
            middle = len(span) // 2
            waiting += [span[:middle], span[middle:]]
        else:
            found.append(effect)
    return sorted(found, key=lambda each: list(parts).index(each.names[0]))
