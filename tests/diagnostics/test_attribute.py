"""Attribution on gaps whose causes are known."""

import numpy as np
import pytest

from minite_jax.diagnostics.attribute import attribute, effects
from minite_jax.errors import UserError

_SHAPE = (40, 16)
_RNG = np.random.default_rng(0)
_BASE = -_RNG.exponential(1.0, _SHAPE)
_NOISE = {name: _RNG.standard_normal(_SHAPE) for name in "abcd"}
_SIZES = {"a@0": 0.0, "a@1": 0.0, "a@2": 0.1, "a@3": 0.0, "b@0": 0.02, "c@0": 0.0}
_GROUPS = {"a": ["a@0", "a@1", "a@2", "a@3"], "b": ["b@0"], "c": ["c@0"]}
_MASK = _RNG.random(_SHAPE) < 0.8


def _engine(parts):
    """The other engine's log-probs differ by independent noise for each part that is not swapped in."""
    return _BASE + sum(size * _NOISE[part[0]] for part, size in _SIZES.items() if part not in parts)


_THEIRS = _engine(frozenset(_SIZES))


def test_causes_are_chosen_by_size_and_taken_apart():
    found = attribute(_engine, _THEIRS, _MASK, _GROUPS)
    assert [each.names for each in found.chosen] == [("a",), ("a", "b")]
    assert found.chosen[-1].share == 1 and found.chosen[-1].gap == 0 == found.chosen[-1].k3 and found.chosen[-1].exact == 1
    assert found.everything.share == 1 and found.none.share == 0
    assert found.tokens == _MASK.sum() and found.sequences == 40
    by_name = {each.names[0]: each for each in found.alone}
    expected = 1 - np.abs(0.02 * _NOISE["b"])[_MASK].mean() / np.abs(0.1 * _NOISE["a"] + 0.02 * _NOISE["b"])[_MASK].mean()
    np.testing.assert_allclose(by_name["a"].share, expected, rtol=1e-4)
    assert by_name["a"].interval[0] < expected < by_name["a"].interval[1] and by_name["c"].share == 0
    assert [(part.names, round(part.share, 6)) for part in found.parts["a"]] == [
        (("a@0", "a@1"), 0.0), (("a@2",), 1.0), (("a@3",), 0.0),
    ]  # fmt: skip
    without = {each.names[0]: each.gap for each in found.without}
    assert without["a"] > without["b"] > without["c"] == 0
    assert "a" in found.text() and "95% are explained" in found.text()


def test_a_gap_that_only_two_together_mend_is_said():
    """Two noises that differ only while neither is swapped; a third cause lets the selection begin."""

    def run(parts):
        left = 0.1 * _NOISE["a"] if not {"a", "b"} <= parts else 0.0
        return _BASE + left + (0.0 if "c" in parts else 0.1 * _NOISE["c"])

    found = attribute(run, _BASE, _MASK, {name: [name] for name in "abc"})
    pair = next(each for each in found.interactions if set(each.names) == {"a", "b"})
    assert pair.beyond_sum > 0.2 and pair.interval[0] > 0 and pair.joint == pytest.approx(pair.beyond_sum)
    assert [each.names for each in found.chosen] == [("c",), ("c", "a", "b")]


def test_noise_is_not_chosen():
    def run(parts):
        return _BASE + 0.1 * _NOISE["a"] + 1e-3 * _NOISE["b"] * ("x" in parts)

    found = attribute(run, _BASE, _MASK, {"x": ["x"]})
    assert not found.chosen and found.stopped == "nothing else makes the gap smaller by more than chance"
    assert found.everything.interval[0] < 0 < found.everything.interval[1]


@pytest.mark.parametrize(
    ("theirs", "mask", "groups", "message"),
    [
        (_engine(frozenset()), _MASK, _GROUPS, "are equal: there is no gap to attribute"),
        (np.where(_MASK, np.nan, 0.0), _MASK, _GROUPS, rf"the other engine gave {_MASK.sum()} log-probs that are NaN"),
        (_THEIRS, np.zeros(_SHAPE, bool), _GROUPS, "leaves no token"),
        (_THEIRS, _MASK, {}, "nothing to swap"),
    ],
)
def test_bad_input(theirs, mask, groups, message):
    with pytest.raises(UserError, match=message):
        attribute(_engine, theirs, mask, groups)


def test_effects_of_single_parts():
    found = effects(_engine, _THEIRS, _MASK, ["a@2", "b@0"])
    assert found[0].share > 0.7 > found[1].share
    with pytest.raises(UserError, match=r"our engine gave log-probs \(1, 16\)"):
        effects(lambda parts: _BASE[:1], _THEIRS, _MASK, ["a@2"])
