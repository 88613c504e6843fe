"""Tensors of another engine in place of ours: the gap goes where the engines part, and nowhere else."""

import functools

import jax
import numpy as np
import pytest

import minite_jax as mt
from experiments.baselines import choices
from minite_jax.diagnostics.attribute import attribute
from minite_jax.diagnostics.recorded import STREAM, RecordedSwaps, along
from minite_jax.diagnostics.trace import trace_learner
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, TraceError, add_row_set, new_header
from minite_jax.model import tiny_dense

pytestmark = pytest.mark.timeout(1200)  # programs compile for minutes on a machine with other load

_CONFIG = tiny_dense(num_hidden_layers=2, vocab_size=64)
_TOKENS = np.random.default_rng(0).integers(0, 64, (4, 9)).astype(np.int32)
_MASK = np.arange(9) < np.array([9, 7, 9, 5])[:, None]


@functools.cache
def _policy():
    return mt.prepare(mt.init_params(_CONFIG, jax.random.key(0)), _CONFIG, mt.recipe("nvfp4"))


@pytest.mark.slow
def test_the_gap_goes_where_the_engines_part():
    """The other engine has XLA's attention in layer 1 and logits in bfloat16."""
    names = ("attention", "bf16_head")
    on = ((False, False), (True, False), (False, True))
    other = _policy().with_substitutes(choices._substitutes(names, on))
    theirs = trace_learner(other, _TOKENS, mask=_MASK, patterns=[*STREAM, "final/log_prob"], hash_weights=False)
    swaps = RecordedSwaps(_policy(), theirs)
    np.testing.assert_array_equal(swaps.mask, _MASK[:, 1:])
    strict = np.asarray(mt.token_log_probs(_policy(), _TOKENS))
    np.testing.assert_array_equal(swaps(frozenset())[swaps.mask], strict[swaps.mask])

    steps = {step.name: step for step in along(swaps)}
    assert list(steps) == [
        "layer.0/input", "layer.0/attention/stream", "layer.1/input", "layer.1/attention/stream", "final/stream",
    ]  # fmt: skip
    for name in ("layer.0/input", "layer.0/attention/stream", "layer.1/input"):
        assert steps[name].after.share == 0 == steps[name].between
    assert steps["layer.1/attention/stream"].between > 0.5
    assert steps["final/stream"].between == 0 and 0 < steps["final/stream"].after.gap < 0.02  # the head's rounding stays
    found = attribute(swaps, swaps.reference, swaps.mask, swaps.groups, target=0.999)
    assert found.chosen[0].names[0] in ("layer.1/attention/stream", "final/stream")
    assert found.stopped == "nothing else makes the gap smaller by more than chance"


def _trace(tensors, positions=(0, 1, 2)):
    header = new_header(Rows([5, 6, 7], positions, [0, 0, 0]), engine={"name": "theirs"})
    add_row_set(header, "scored", [0, 1])
    trace = MemoryTrace(header)
    for name, array in tensors.items():
        trace.add(name, array, "scored" if name == "final/log_prob" else None)
    return trace.close()


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (dict(embed=(3, 64)), {}, "has no final/log_prob: without its log-probs"),
        ({"final/log_prob": (2,)}, {}, r"has none of the tensors layer\.\*/input"),
        ({"final/log_prob": (2,), "layer.1/input": (3, 32)}, {}, r"layer.1/input of .* has rows of shape \(32,\), ours \(64,\)"),
        ({"final/log_prob": (2,), "layer.1/input": (3, 64)}, dict(max_bytes=9), "choose fewer, or allow more bytes"),
        ({"final/log_prob": (2,), "layer.1/input": (3, 64)}, dict(patterns=["layer.7/*"]), "no tensor is called 'layer.7"),
    ],
)
def test_bad_input(tensors, options, message):
    trace = _trace({name: np.zeros(shape, np.float32) for name, shape in tensors.items()})
    with pytest.raises(TraceError, match=message):
        RecordedSwaps(_policy(), trace, **options)


def test_sequences_with_holes_are_refused():
    tensors = {"final/log_prob": np.zeros(2, np.float32), "layer.1/input": np.zeros((3, 64), np.float32)}
    with pytest.raises(TraceError, match="every position from 0 on once"):
        RecordedSwaps(_policy(), _trace(tensors, positions=(0, 1, 3)))
