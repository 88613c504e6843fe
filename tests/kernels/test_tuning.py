"""The tuning table: exact shape, nearest shape, default, and what a kernel must refuse."""

import jax
import pytest

from pallas_kernels import tuning

KIND = "some GPU"
TABLE = {
    "op": {
        KIND: {
            "64x2048x768": {"BLOCK": 16},
            "8192x2048x768": {"BLOCK": 128},
            "16384x2048x768": {"BLOCK": 256},
            "8192x4096x4096": {"BLOCK": 64},
        }
    }
}


def lookup(rows, features, depth, op="op", kind=KIND):
    return tuning.lookup(op, kind, rows=rows, features=features, depth=depth, table=TABLE)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8192, 2048, 768), {"BLOCK": 128}),  # measured
        ((9000, 2048, 768), {"BLOCK": 128}),  # nearest in rows
        ((12000, 2048, 768), {"BLOCK": 256}),  # nearest by ratio, though 8192 is nearer by difference
        ((16, 2048, 768), {"BLOCK": 16}),
        ((8192, 4096, 2048), {"BLOCK": 64}),  # another depth
        ((8, 2048, 768), {"BLOCK": 16}),  # three factors of two: as far as it goes
        ((7, 2048, 768), {}),  # and no further
        ((8192, 151936, 2048), {}),
    ],
)
def test_nearest_measured_shape(shape, expected):
    assert lookup(*shape) == expected


def test_a_tie_goes_to_the_smaller_shape():
    table = {"op": {KIND: {"256x16x16": {"BLOCK": 2}, "64x16x16": {"BLOCK": 1}}}}
    assert tuning.lookup("op", KIND, rows=128, features=16, depth=16, table=table) == {"BLOCK": 1}


@pytest.mark.parametrize(("op", "kind"), [("other", KIND), ("op", "another GPU")])
def test_unknown_operation_or_device_has_no_entry(op, kind):
    assert lookup(8192, 2048, 768, op, kind) == {}


def test_zero_rows_is_a_shape():
    assert lookup(0, 2048, 768) == {}


def test_config_is_the_default_where_nothing_was_measured():
    default = dict(BLOCK=32, num_warps=4)
    assert tuning.config("no such op", rows=1, features=16, depth=16, default=default) == default


def test_config_updates_the_default(monkeypatch):
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(tuning, "_read", lambda: {"op": {kind: {"64x16x16": {"BLOCK": 64}}}})
    found = tuning.config("op", rows=64, features=16, depth=16, default=dict(BLOCK=32, num_warps=4))
    assert found == dict(BLOCK=64, num_warps=4)


def test_override_and_record():
    default = dict(BLOCK=32, num_warps=4)
    with tuning.record() as seen, tuning.override("op", {"num_warps": 8}):
        assert tuning.config("op", rows=1, features=2, depth=3, default=default) == dict(BLOCK=32, num_warps=8)
    assert seen == {"op": [((1, 2, 3), default)]}
    assert tuning.config("op", rows=1, features=2, depth=3, default=default) == default
    assert len(seen["op"]) == 1


def test_a_parameter_that_the_kernel_lacks_is_refused():
    with tuning.override("op", {"BLOCKS": 8}), pytest.raises(ValueError, match="op: the override has BLOCKS, .* only BLOCK"):
        tuning.config("op", rows=1, features=2, depth=3, default=dict(BLOCK=32))


@pytest.mark.parametrize("key", ["64x16", "64x16xall", "64x16x16x16"])
def test_a_spoilt_key_is_said(key):
    with pytest.raises(ValueError, match="is not ROWSxFEATURESxDEPTH"):
        tuning.parse_key(key)


def test_key_and_back():
    assert tuning.parse_key(tuning.shape_key(8192, 1536, 2048)) == (8192, 1536, 2048)


def test_the_checked_in_table_can_be_read():
    for by_device in tuning._read().values():
        for entries in by_device.values():
            assert all(tuning.parse_key(key) and isinstance(entry, dict) for key, entry in entries.items())
