"""Traces that do not go together, or whose tensors cannot be what their names say: refused by name, or said in a note."""

import numpy as np
import pytest

from minite_jax.diagnostics.alignment import Alignment
from minite_jax.diagnostics.compare import compare
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, TraceError, add_row_set, new_header

ROWS = Rows([5, 6, 7], [0, 1, 2], [0, 0, 0])
X = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
PROBS = np.float32([[0.4, 0.3, 0.2, 0.1]] * 3)
EXPERTS = np.int32([[0, 1]] * 3)
ROUTER = {"moe/router/probs": PROBS, "moe/router/experts": EXPERTS}
SCALES = {"norm.block_scale": np.ones((3, 2), np.float32), "norm.outer_scale": np.ones(3, np.float32)}
CODES = {"norm.codes": np.full((3, 32), 2, np.uint8), **SCALES}


def _trace(tensors, rows=ROWS, where="theirs"):
    trace = MemoryTrace(new_header(rows, engine={"name": "test"}), where)
    for name, array in tensors.items():
        trace.add(name if name.startswith("final/") else f"layer.0/{name}", array)
    return trace.close()


def _compare(ours, theirs, **options):
    return compare(_trace(ours, where="ours"), _trace(theirs, **options))


def _down(numbers):
    return ROUTER | {"moe/experts/down": X[:, :numbers]}


_REFUSED = [
    (ROUTER, ROUTER | {"moe/router/experts": EXPERTS + 3}, "theirs: expert 4 at sequence 0, position 0; experts are 0 to 3"),
    (ROUTER, ROUTER | {"moe/router/experts": -EXPERTS}, "expert -1 at sequence 0, position 0"),
    (ROUTER, ROUTER | {"moe/router/experts": EXPERTS + 0.5}, "experts of theirs is float64: experts are integers"),
    (_down(8), _down(7), r"has rows of shape \(7,\), not one for each of 2 experts"),
    (_down(8), _down(6), "4 numbers a row in ours, 3 in theirs"),
    (CODES, CODES | {"norm.codes": np.full((3, 32), 16, np.uint8)}, r"theirs: layer.0/norm.codes holds something else than E2M1"),
    (CODES | {"norm.block_scale": X[:, :3]}, CODES | {"norm.block_scale": X[:, :3]}, "a scale belongs to 16 codes"),
    ({"final/log_prob": X[:, 0]}, {"final/log_prob": X[:, :3]}, "final/log_prob of theirs has 3 numbers a row: it has one"),
    ({"norm": X}, {}, "theirs holds no tensor: its writer recorded nothing"),
    ({"norm": X}, {"norm": X[:, :0]}, "32 numbers a row in ours, 0 in theirs"),
]


@pytest.mark.parametrize(("ours", "theirs", "message"), _REFUSED, ids=[message[:40] for *_, message in _REFUSED])
def test_refused(ours, theirs, message):
    with pytest.raises(TraceError, match=message) as error:
        _compare(ours, theirs)
    assert "\n" not in str(error.value)


def test_rows_of_no_tensor_in_common_are_no_equality():
    traces = []
    for rows in ([0, 1], [2]):
        header = new_header(ROWS, engine={"name": "test"})
        add_row_set(header, "some", rows)
        trace = MemoryTrace(header)
        trace.add("final/log_prob", X[rows, 0], "some")
        traces.append(trace.close())
    with pytest.raises(TraceError, match="no row of any tensor in common, of final/log_prob"):
        compare(*traces)


def test_what_is_not_compared_is_said():
    shorter = Rows(ROWS.token_ids[:2], ROWS.positions[:2], ROWS.sequences[:2])
    result = _compare({"norm": X}, {"norm": (X[:2] * 9).astype(np.int32)}, rows=shorter)
    tokens, types = result.notes
    assert tokens == "1 tokens only in the first trace, from sequence 0, position 2 on: those of both are compared"
    assert types == "layer.0/norm is float32 in the first trace, int32 in the second"
    assert result.first.name == "layer.0/norm" and result.first.excess is None


def test_axes_behind_the_rows_may_be_flattened():
    """Experts' rows as [3, 2 * 4] and outer scales as [3, 1]: the same numbers as [3, 2, 4] and [3]."""
    ours = ROUTER | CODES | {"moe/experts/down": X[:, :8].reshape(3, 2, 4)}
    theirs = ROUTER | CODES | {"moe/experts/down": X[:, :8], "norm.outer_scale": np.ones((3, 1), np.float32)}
    other_order = theirs | {"moe/router/experts": EXPERTS[:, ::-1], "moe/experts/down": np.roll(X[:, :8], 4, axis=1)}
    for each in (theirs, other_order):
        assert _compare(ours, each).first is None


def test_no_expert_in_common():
    theirs = {"moe/router/experts": EXPERTS + 2, "moe/router/probs": PROBS[:, ::-1]}
    pair = Alignment(
        _trace(ROUTER | {"moe/experts/down": X[:, :8]}), _trace(theirs | {"moe/experts/down": X[:, :8]})
    ).pair("layer.0/moe/experts/down")  # fmt: skip
    assert pair.a.shape == pair.b.shape == (0, 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_located_without_a_warning(value):
    wrong = X.copy()
    wrong[1, 3] = value
    for pair, which in (((X, wrong), "second"), ((wrong, X), "first")):
        result = _compare({"attention/norm": pair[0]}, {"attention/norm": pair[1]})
        assert result.first.not_finite.startswith(f"1 not finite in the {which} trace, first ")
        assert result.first.not_finite.endswith("at sequence 0, position 1") and result.first.first == (0, 1)
