"""metrics.jsonl: nothing is dropped, nothing is lost on resume, wrong input is one clear line."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.metrics import names
from minite_jax.metrics.writer import (
    JsonlWriter,
    MetricsError,
    TensorBoardWriter,
    encode_scalar,
    make_writer,
    read_metrics,
)


def test_one_line_per_step_readable_at_once(tmp_path):
    writer = make_writer(tmp_path / "run")
    writer.write(0, {names.LOSS: 1.5, names.PHASE: "sft", "n": np.int64(3), "ok": np.bool_(True), "none": None})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # before close: the line is already there
    assert json.loads(text) == {"step": 0, "loss": 1.5, "phase": "sft", "n": 3, "ok": True, "none": None}
    writer.write(7, {})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 7]


def test_float32_survives_bit_for_bit(tmp_path):
    value = jnp.float32(0.1) * jnp.float32(1e-9)
    writer = JsonlWriter(tmp_path)
    writer.write(0, {names.GAP_MAX: value, "half": jnp.bfloat16(0.3)})
    (row,) = read_metrics(tmp_path)
    assert np.float32(row[names.GAP_MAX]).tobytes() == np.asarray(value).tobytes()
    assert row["half"] == float(jnp.bfloat16(0.3))


def test_non_finite_values_are_kept_as_strings(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(0, {"a": jnp.nan, "b": np.float32("inf"), "c": -math.inf, "d": jnp.float32(jnp.nan)})
    raw = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert raw == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "NaN"}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf and math.isnan(row["d"])


@pytest.mark.parametrize("value", [np.zeros(2), [1.0, 2.0], 1j, object()])
def test_what_is_no_scalar_is_refused_and_leaves_no_line(tmp_path, value):
    writer = JsonlWriter(tmp_path)
    with pytest.raises(TypeError, match="a metric is a"):
        writer.write(0, {"x": value})
    assert read_metrics(tmp_path) == []
    with pytest.raises(TypeError):
        encode_scalar(value)


def test_steps_must_increase_and_agree(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(3, {})
    with pytest.raises(ValueError, match="step 3 after step 3"):
        writer.write(3, {})
    with pytest.raises(ValueError, match="name another step, 5"):
        writer.write(4, {names.STEP: 5})
    writer.write(4, {names.STEP: 4})


def run_of(folder, steps):
    writer = JsonlWriter(folder)
    for step in steps:
        writer.write(step, {"loss": step / 3, "gap": math.nan})
    writer.close()
    return (folder / "metrics.jsonl").read_bytes()


def test_resume_cuts_the_future_and_keeps_the_past_bit_for_bit(tmp_path):
    whole = run_of(tmp_path / "whole", range(6))
    run_of(tmp_path / "cut", range(5))
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')  # the process died here
    writer = JsonlWriter(tmp_path / "cut", resume_step=3)
    with pytest.raises(ValueError, match="must increase"):
        writer.write(2, {})
    for step in (3, 4, 5):
        writer.write(step, {"loss": step / 3, "gap": math.nan})
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == whole
    assert os.listdir(tmp_path / "cut") == ["metrics.jsonl"]


def test_a_crash_while_cutting_loses_nothing(tmp_path, monkeypatch):
    before = run_of(tmp_path, range(5))

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minite_jax.metrics.writer.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        JsonlWriter(tmp_path, resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_new_run_never_writes_over_an_old_one(tmp_path):
    before = run_of(tmp_path, range(2))
    with pytest.raises(MetricsError, match="exists already: resume that run or choose another --workdir"):
        JsonlWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_full_disk_leaves_whole_lines(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(0, {"loss": 1.0})
    real = writer._file

    class HalfFull:
        def write(self, line):
            return real.write(line[: len(line) // 2])

    writer._file = HalfFull()
    with pytest.raises(MetricsError, match="could not write step 1 to .*: only 10 of 20 bytes"):
        writer.write(1, {"a": 1})
    writer._file = real
    writer.write(1, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"loss": 1}', b'{"step": "1"}', b'{"step": true}'])
def test_a_spoilt_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(MetricsError, match="line 2: not a JSON object with a step"):
        read_metrics(path)


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(MetricsError, match="there is no metrics file .*metrics.jsonl: give the --workdir"):
        read_metrics(tmp_path)


def test_tensorboard_gets_the_numbers(tmp_path):
    writer = make_writer(tmp_path, tensorboard=True)
    writer.write(0, {names.LOSS: 1.0, names.PHASE: "rl", "none": None})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes() and b"phase" not in events.read_bytes()
    assert len(read_metrics(tmp_path)) == 1


def test_without_tensorboardx_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"minite_jax\[experiments\]"):
        TensorBoardWriter(tmp_path)


def test_every_key_has_a_meaning_of_one_line():
    keys = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert keys == set(names.MEANINGS)
    assert all(text and "\n" not in text for text in names.MEANINGS.values())
