"""Two traces: what differs, where first, and what the inputs do not explain."""

import copy

import ml_dtypes
import numpy as np
import pytest

from minite_jax.diagnostics.alignment import Alignment
from minite_jax.diagnostics.compare import compare, first_difference
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, Trace, TraceError, new_header

pytestmark = pytest.mark.xdist_group("traced_world")  # one process compiles the trace for both files


def changed(trace, changes, names=None):
    """The trace with tensors changed by functions, {name: function}."""
    header = copy.deepcopy({**trace.header, "tensors": {}})
    result = MemoryTrace(header)
    for name in names or trace.names:
        array = np.array(trace.read(name)[0])
        result.add(name, changes.get(name, lambda x: x)(array), trace.header["tensors"][name].get("rows"))
    return result.close()


def noisy(trace, level=1.0, seed=0):
    """Every tensor of floating numbers with noise of about one rounding; codes and scales as they are."""
    rng = np.random.default_rng(seed)
    noise = lambda x: (x.astype(np.float32) * (1 + level * 2.0**-9 * rng.standard_normal(x.shape))).astype(x.dtype)  # noqa: E731
    floats = [name for name in trace.names if np.asarray(trace.read(name)[0]).dtype in (np.float32, ml_dtypes.bfloat16)]
    return changed(trace, {name: noise for name in floats if not name.endswith("scale")})


def test_equal_traces(world):
    result = compare(world.trace, changed(world.trace, {}))
    assert result.first is result.abrupt is result.location is None and not result.notes
    assert len(result.differences) == len(world.trace.names) and all(each.equal for each in result.differences)


def test_the_first_difference_is_exact(world):
    def flip(x):
        x[3, 5] = -x[3, 5] if x[3, 5] else 1
        return x

    name = "layer.1/attention/heads"
    result = compare(world.trace, changed(world.trace, {name: flip, "layer.1/attention/o": lambda x: x * np.float32(3)}))
    assert result.first.name == result.location.name == name
    assert result.first.first == (0, 3) and result.first.max_ulp > 0
    codes = compare(world.trace, changed(world.trace, {"layer.0/attention/norm.codes": lambda x: x ^ (np.arange(64) == 7)}))
    assert codes.first.name == "layer.0/attention/norm.codes" and codes.first.differing == pytest.approx(1 / 64)


def test_noise_alone_is_no_alarm_and_a_fault_above_it_is_found(world):
    expert = int(world.trace.read("layer.1/moe/router/experts")[0][2, 0])
    chosen = world.trace.read("layer.1/moe/router/experts")[0] == expert
    bad = lambda x: np.where(chosen[..., None], x * np.asarray(1.25, x.dtype), x)  # noqa: E731
    for seed in range(3):
        other = noisy(world.trace, seed=seed)
        clean = compare(world.trace, other)
        assert clean.location is None and clean.first.name == "embed"
        result = compare(world.trace, changed(other, {"layer.1/moe/experts/down": bad}))
        assert result.location.name == result.abrupt.name == "layer.1/moe/experts/down"
        assert result.location.experts == (expert,) and result.first.name == "embed"


def test_experts(world):
    name = "layer.0/moe/router/experts"
    swap = changed(world.trace, {f"layer.0/moe/{n}": lambda x: x[:, ::-1] for n in ("router/experts", "router/weights")})
    whole = [name for name in world.trace.names if name.startswith("layer.0/moe/experts/")]
    swap = changed(swap, {n: lambda x: x[:, ::-1] for n in whole})
    assert compare(world.trace, swap).first is None  # the same experts in another order
    wrong = compare(world.trace, changed(world.trace, {name: lambda x: (x + (np.arange(len(x)) == 4)[:, None]) % 8}))
    assert wrong.first.name == wrong.abrupt.name == name and wrong.first.differing == pytest.approx(1 / 15)
    assert wrong.notes == [f"{name}: 1 of 15 tokens went to other experts, first at sequence 0, position 4"]


def test_not_a_number_is_said_and_located(world):
    def spoil(x):
        x[9, 2] = np.nan
        return x

    result = compare(world.trace, changed(world.trace, {"layer.1/moe/out": spoil}))
    assert result.first.name == "layer.1/moe/out"
    assert result.first.not_finite == "1 not finite in the second trace, first NaN at sequence 1, position 0"
    both = compare(*(changed(world.trace, {"layer.1/moe/out": spoil}) for _ in range(2)))
    assert both.first.name == "layer.1/moe/out" and "first trace" in both.first.not_finite


def test_what_nobody_recorded_rounds_too(world):
    """An engine that keeps its experts to itself: errors of the norm reach the sum through operations that nobody saw."""
    kept = [name for name in world.trace.names if "/experts/" not in name and ".codes" not in name and "scale" not in name]
    other = noisy(world.trace)
    clean = changed(other, {"layer.0/moe/out": lambda x: x * np.asarray(1.015625, x.dtype)}, kept)
    assert compare(changed(world.trace, {}, kept), clean).location is None
    wrong = changed(other, {"layer.0/moe/out": lambda x: x * np.asarray(1.5, x.dtype)}, kept)
    assert compare(world.trace, wrong).abrupt.name == "layer.0/moe/out"


def make(tensors, rows=None):
    trace = MemoryTrace(new_header(rows or Rows(range(4), range(4), [0] * 4), engine={"name": "test"}))
    for name, array in tensors.items():
        trace.add(name, array)
    return trace.close()


def test_layouts_are_brought_together():
    rng = np.random.default_rng(0)
    q, k, v, logits = (rng.standard_normal((4, n)).astype(np.float32) for n in (8, 4, 4, 12))
    fused = make({"layer.0/attention/qkv": np.concatenate([q, k, v], 1), "layer.0/attention/q": q, "final/logits": logits})
    parts = make(
        {
            "layer.0/attention/q_proj": q, "layer.0/attention/k_proj": k.reshape(4, 2, 2), "layer.0/attention/v_proj": v,
            "layer.0/attention/q": q.reshape(4, 2, 4), "final/logits": logits[:, :10],
        }
    )  # fmt: skip
    for a, b in ((fused, parts), (parts, fused)):
        result = compare(a, b)
        assert [each.name for each in result.differences if "proj" not in each.name] == [
            "layer.0/attention/qkv", "layer.0/attention/q", "final/logits",
        ]  # fmt: skip
        assert result.first is None and len(result.notes) == 1
    logits_trace = make({"layer.0/moe/router/logits": logits})
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert compare(logits_trace, make({"layer.0/moe/router/probs": probs})).differences[0].max_abs < 1e-6


def test_rows_are_matched_by_sequence_and_position():
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    a = make({"embed": x}, Rows([1, 2, 3, 4], [0, 1, 0, 1], [0, 0, 1, 1]))
    b = make({"embed": x[[2, 0, 3]]}, Rows([3, 1, 4], [0, 0, 1], [1, 0, 1]))
    result = compare(a, b)
    assert result.first is None and result.differences[0].rows == 3


def test_traces_that_do_not_fit():
    x = np.ones((4, 2), np.float32)
    a = make({"layer.0/input": x})
    with pytest.raises(TraceError, match="no tensor of the same name, e.g. layer.0/input and other"):
        compare(a, make({"other": x}))
    with pytest.raises(TraceError, match=r"no \(sequence, position\) in common"):
        compare(a, make({"layer.0/input": x}, Rows(range(4), range(4), [1] * 4)))
    with pytest.raises(TraceError, match="2 numbers a row in .* 3 in .* models have different shapes"):
        compare(a, make({"layer.0/input": np.ones((4, 3), np.float32)}))
    with pytest.raises(TraceError, match="needs moe/router/experts of the same rows"):
        compare(*[make({"layer.0/moe/experts/down": np.ones((4, 2, 3), np.float32)})] * 2)
    assert isinstance(Alignment(a, a).a, Trace)


def test_the_first_difference_alone(world):
    """Codes and scales do not count by themselves: the same numbers, scaled otherwise, are the same."""
    norm, flip = "layer.0/attention/norm", lambda x: -x
    rescaled = {f"{norm}.block_scale": lambda x: x * 2, f"{norm}.outer_scale": lambda x: x / 2}
    assert first_difference(world.trace, changed(world.trace, rescaled)) is None
    found = first_difference(world.trace, changed(world.trace, {**rescaled, "layer.0/attention/o": flip, "layer.1/input": flip}))
    assert found.name == "layer.0/attention/o" and found.first == (0, 0)
    codes = changed(world.trace, {f"{norm}.codes": lambda x: x ^ (np.arange(64) == 7)})
    assert first_difference(world.trace, codes).name == f"{norm}.quantized"
