"""Folders of tensors: whole or refused, with the file and the tensor that are wrong."""

import json

import ml_dtypes
import numpy as np
import pytest

from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, TraceError, TraceWriter, add_row_set, new_header, open_trace

ROWS = Rows([5, 6, 7], [0, 1, 0], [0, 0, 1])


def write(path, part_bytes=1 << 30):
    header = new_header(ROWS, engine={"name": "test"})
    add_row_set(header, "some", [0, 2])
    writer = TraceWriter(path, header, part_bytes=part_bytes)
    writer.add("b", np.arange(6, dtype=np.float32).reshape(3, 2))
    writer.add("a", np.ones((2, 4), ml_dtypes.bfloat16), "some")
    writer.add("c", np.zeros((3, 1), ml_dtypes.float8_e4m3fn))
    assert not path.exists()  # nothing has the name before it is complete
    return writer.close()


@pytest.mark.parametrize("part_bytes", [1, 1 << 30])
def test_round_trip(tmp_path, part_bytes):
    trace = write(tmp_path / "t", part_bytes)
    assert len(trace.header["files"]) == (3 if part_bytes == 1 else 1)
    assert trace.names == ["b", "a", "c"] and "a" in trace
    array, rows = trace.read("a")
    assert array.dtype == ml_dtypes.bfloat16 and array.shape == (2, 4) and rows.tolist() == [0, 2]
    assert trace.read("b")[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert trace.rows.sequences.tolist() == [0, 0, 1]
    with pytest.raises(TraceError, match="exists: give the name of a new folder"):
        TraceWriter(tmp_path / "t", new_header(ROWS, engine={}))
    with pytest.raises(TraceError, match="has no tensor x; it has b, a, c"):
        trace.read("x")


def spoil_cut(path):
    part = path / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-3])
    return r"part-00000.safetensors has \d+ of \d+ bytes: it is cut off"


def spoil_part(path):
    (path / "part-00000.safetensors").unlink()
    return "part-00000.safetensors is missing"


def spoil_json(path):
    (path / "trace.json").write_text((path / "trace.json").read_text()[:-9])
    return "trace.json is not JSON"


def spoil_header(path):
    (path / "trace.json").unlink()
    return "holds no trace.json"


def _edit(path, change):
    header = json.loads((path / "trace.json").read_text())
    change(header)
    (path / "trace.json").write_text(json.dumps(header))


def spoil_tensor(path):
    _edit(path, lambda header: header["tensors"].update(d=header["tensors"]["b"]))
    return "tensor d is in trace.json but in none of its files"


def spoil_shape(path):
    _edit(path, lambda header: header["tensors"]["b"].update(shape=[3, 3]))
    return r"tensor b is F32 \[3, 2\], trace.json says F32 \[3, 3\]"


def spoil_rows(path):
    _edit(path, lambda header: header["row_sets"].update(some=[0, 1]))
    _edit(path, lambda header: header["rows"].update(token_ids=[1, 2], positions=[0, 1], sequences=[0, 0]))
    return r"tensor b has shape \[3, 2\]; its first axis must be its 2 rows"


def spoil_row_numbers(path):
    _edit(path, lambda header: header["rows"].pop("positions"))
    return "rows lack 'positions'"


def spoil_version(path):
    _edit(path, lambda header: header.update(version=9))
    return "has version 9; this reader knows 1"


def spoil_format(path):
    _edit(path, lambda header: header.update(format="x"))
    return "is no header of a trace"


@pytest.mark.parametrize("spoil", [f for name, f in list(globals().items()) if name.startswith("spoil_")])
def test_spoiled_folders(tmp_path, spoil):
    write(tmp_path / "t")
    message = spoil(tmp_path / "t")
    with pytest.raises(TraceError, match=message) as error:
        open_trace(tmp_path / "t")
    assert "\n" not in str(error.value)


def _spoil_twice(path):
    text = (path / "trace.json").read_text()
    (path / "trace.json").write_text(text.replace('"tensors": {', '"tensors": {"a": {}, ', 1))
    return r"trace.json is not JSON \(a is there twice\)"


def _spoil_parts(path):
    part = (path / "part-00000.safetensors").read_bytes()
    (path / "part-00001.safetensors").write_bytes(part)
    _edit(path, lambda header: header["files"].update({"part-00001.safetensors": len(part)}))
    return "tensor b is in part-00000.safetensors and in part-00001.safetensors"


def _spoil_text(path, content=b"\xff\xfe"):
    (path / "trace.json").write_bytes(content)
    return r"trace.json is no text in UTF-8 \(byte 0\)"


def _spoil_depth(path):
    (path / "trace.json").write_text("[" * 200_000)
    return "trace.json is not JSON"


_HEADERS = [
    (dict(rows=dict(token_ids=["5", 6, 7])), "entry 0 of token_ids is '5', not an integer from 0"),
    (dict(rows=dict(token_ids=[5, 6.5, 7])), "entry 1 of token_ids is 6.5"),
    (dict(rows=dict(token_ids=[5, 6, 2**31])), "entry 2 of token_ids is 2147483648"),
    (dict(rows=dict(positions=[0, -1, 0])), "entry 1 of positions is -1"),
    (dict(rows=dict(sequences=[0, 0, 1 << 30])), "entry 2 of sequences is 1073741824, not an integer from 0 to 4194303"),
    (dict(rows=dict(positions=[0, 0, 0])), "sequence 0, position 0 is there twice"),
    (dict(row_sets=dict(some=[0, 3])), "entry 1 of row set 'some' is 3, not an integer from 0 to 2"),
    (dict(row_sets=dict(some=[1, 1])), "row set 'some' has a row twice"),
    (dict(row_sets=dict(some="ab")), "row set 'some' are 'ab', not a list of integers"),
    (dict(sampling=dict(temperature="hot")), "temperature is 'hot', not a number from 0 on"),
    (dict(model=dict(config=7)), "'config' of the model is 7, not an object"),
    (dict(engine=dict(versions=["a"])), r"'versions' of the engine is \['a'\], not an object"),
    (dict(files={"../t/part-00000.safetensors": 9}), "a part is a file of this folder"),
    (dict(tensors=dict(a=dict(rows=["some"]))), r"tensor a has rows \['some'\], which row_sets lacks"),
]


@pytest.mark.parametrize(("change", "message"), _HEADERS, ids=[f"{message[:40]}" for _, message in _HEADERS])
def test_headers_that_say_what_cannot_be(tmp_path, change, message):
    def apply(header):
        for section, values in change.items():
            for key, value in values.items():
                old = header[section].get(key)
                header[section][key] = {**old, **value} if section == "tensors" else value

    write(tmp_path / "t")
    _edit(tmp_path / "t", apply)
    with pytest.raises(TraceError, match=message) as error:
        open_trace(tmp_path / "t")
    assert "\n" not in str(error.value) and "trace.json" in str(error.value)


@pytest.mark.parametrize("spoil", [_spoil_twice, _spoil_parts, _spoil_text, _spoil_depth])
def test_folders_that_are_no_trace(tmp_path, spoil):
    test_spoiled_folders(tmp_path, spoil)


def test_sections_that_are_null_or_behind_a_mark_are_read(tmp_path):
    write(tmp_path / "t")
    _edit(tmp_path / "t", lambda header: header.update(model=None, sampling=None))
    file = tmp_path / "t" / "trace.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert open_trace(tmp_path / "t").header["sampling"] == {}


def test_wrong_additions(tmp_path):
    with pytest.raises(TraceError, match="there is no trace"):
        open_trace(tmp_path / "none")
    trace = MemoryTrace(new_header(ROWS, engine={}))
    trace.add("a", np.zeros((3, 1), np.float32))
    with pytest.raises(TraceError, match="a is there twice"):
        trace.add("a", np.zeros((3, 1), np.float32))
    with pytest.raises(TraceError, match="first axis must be the 3 rows"):
        trace.add("b", np.zeros((2, 1), np.float32))
    with pytest.raises(TraceError, match="b is complex64"):
        trace.add("b", np.zeros((3, 1), np.complex64))
    with pytest.raises(TraceError, match="2 token ids, 1 positions"):
        Rows([1, 2], [0], [0, 0])
