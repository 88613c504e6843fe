"""Estimates of a tiny model against real arrays, the calibration with a stand-in for the device, and the page.

What is planned for a GPU is traced in a process of its own (this file as a program): `planned` throws JAX's caches away.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

_ROOT = Path(__file__).parents[2]


def _parts() -> dict:
    import jax

    import minite_jax as mt
    from experiments.memory_programs import Case, estimate, parts
    from minite_jax.diagnostics.memory import nbytes
    from minite_jax.learner import OptimizerConfig, init_state, make_optimizer
    from minite_jax.model.cache import init_cache
    from pallas_kernels import dispatch

    case = Case(program="update", model="tiny_moe", layers=1, recipe="nvfp4", rows=4, length=128)
    config, recipe = case.config, mt.recipe(case.recipe)
    params = mt.init_params(config, jax.random.key(0))
    policy = mt.prepare(params, config, recipe)
    state = init_state(params, make_optimizer(OptimizerConfig(learning_rate=1.0)))
    cache = init_cache(config, recipe, 2, 256)
    real = dict(
        parameters=mt.num_params(config),
        masters=nbytes(params),
        moments=nbytes(state.opt_state),
        gradients=nbytes(params),
        stored=nbytes(policy),
        cache=nbytes((cache.keys, cache.values)) / (2 * cache.capacity),
    )
    batch = 4 * 128 * 4 + 4 * 127 * (1 + 4) + 4 * 4  # tokens, mask and log-probs, advantages
    found = estimate(case)
    with dispatch.planned(90):
        try:
            jax.jit(lambda: mt.forward(policy, jax.numpy.ones((1, 8), int)))()
            ran = "ran"
        except NotImplementedError as error:
            ran = str(error)
    return dict(
        parts=dataclasses.asdict(parts(case)),
        real=real,
        split=dataclasses.asdict(parts(dataclasses.replace(case, expert_devices=2), state_devices=2)),
        arguments=found.arguments,
        given=nbytes((state, policy)) + batch,
        kernels=[each.made_by for each in found.alive],
        ran=ran,
        after=[dispatch.platform(), dispatch.planned_capability()],
    )


def _deep() -> list:
    from experiments.memory_programs import Case, Growth, estimate

    rows = []
    for changes in (
        dict(program="update", model="tiny_moe", length=128),
        dict(program="update", model="tiny_dense", length=128, remat=True),
        dict(program="sample", model="tiny_moe", length=256, new_tokens=8, samples=2),
    ):
        case = Case(layers=0, recipe="nvfp4", rows=4, **changes)
        growth, found = Growth(case, (4, 16)), estimate(dataclasses.replace(case, layers=8, rows=8))
        most = growth.most_rows(found.peak, 8)
        told = [growth.peak(8, 8), *growth.outside(8, 8), growth.peak(most, 8), growth.peak(most + 1, 8)]
        rows.append(dict(told=[float(x) for x in told], traced=[found.peak, found.arguments, found.results]))
    return rows


@functools.cache
def _run(mode):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, __file__, mode], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_parts_are_the_bytes_of_real_arrays():
    found = _run("parts")
    assert found["parts"] == found["real"]
    angles = 2 * 128 * 8 * 4  # cosines and sines of 128 positions: constants of the program
    assert found["arguments"] == found["given"] + angles


def test_parts_of_one_device_of_two():
    real, split = _run("parts")["real"], _run("parts")["split"]
    assert split["masters"] == pytest.approx(real["masters"] / 2, abs=8 * 64 * 4)  # the router has as many rows as experts
    assert real["stored"] / 2 < split["stored"] < real["stored"]  # of the rest each device has all


def test_a_plan_has_the_kernels_of_a_gpu_and_cannot_run():
    found = _run("parts")
    assert any(name.endswith("_kernel") for name in found["kernels"])
    assert "launch" in found["ran"]
    assert found["after"] == ["cpu", None]


@pytest.mark.slow
def test_deep_programs_are_told_from_shallow_ones():
    for row in _run("deep"):
        peak, arguments, results, below, above = row["told"]
        assert [peak, arguments, results] == pytest.approx(row["traced"], rel=0.01)
        assert below <= row["traced"][0] < above


# --- calibration and page ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`calibrate` with the figures of a device that is not there; the cases that it ran."""
    from experiments import cli, memory_calibration

    ran = []
    where = dict(cli.origin(), revision="abc", command="python -m experiments.memory calibrate")
    found = dict(compiled=2e9, measured=4_000_000_000, hidden=False, seconds=1.0, provenance={**where, "device": "NVIDIA H200"})

    def run(case, revision):
        ran.append(case.name)
        return answers.get(case.name, found)

    answers = {}
    monkeypatch.setattr(memory_calibration, "_run", run)
    monkeypatch.setattr(memory_calibration, "estimate", lambda case: type("Footprint", (), dict(peak=3e9)))
    settings = dict(minutes=None, where=where)
    calibrate = functools.partial(memory_calibration.calibrate, memory_calibration.TINY, None, tmp_path, **settings)
    return type("Bench", (), dict(calibrate=calibrate, ran=ran, answers=answers, found=found, folder=tmp_path, where=where))


def test_a_calibration_is_written_and_kept(bench):
    from minite_jax.metrics.results import read_results

    rows = bench.calibrate()
    results = read_results(bench.folder / "memory_h200.json")
    assert results["rows"] == rows and results["provenance"]["device"] == "NVIDIA H200"
    assert [row["ratio"] for row in rows] == [0.75, 0.75]
    again = functools.partial(bench.calibrate.func, bench.calibrate.args[0], bench.folder / "memory_h200.json", bench.folder)
    assert again(minutes=None, where=bench.where) == rows and len(bench.ran) == 2  # measured before
    again(minutes=None, where={**bench.where, "revision": "def"})
    assert len(bench.ran) == 4  # another revision is measured anew


def test_cases_that_fail_or_say_nothing(bench):
    from minite_jax.errors import UserError

    first, second = (case.name for case in bench.calibrate.args[0])
    bench.answers[first] = {**bench.found, "hidden": True}
    bench.answers[second] = "ended with status 1: RESOURCE_EXHAUSTED"
    rows = bench.calibrate()
    assert rows[0]["measured"] is None and "before the program ran" in rows[0]["remarks"]
    assert rows[1]["measured"] == "failed" and "RESOURCE_EXHAUSTED" in rows[1]["remarks"]
    bench.answers[first] = bench.answers[second]
    with pytest.raises(UserError, match="no case could be measured.*RESOURCE"):
        bench.calibrate()
    bench.answers.clear()
    bench.answers[first] = {**bench.found, "measured": None}
    assert "does not say" in bench.calibrate()[0]["remarks"]


def test_minutes_end_a_calibration(bench):
    from minite_jax.errors import UserError

    with pytest.raises(UserError, match="no time was left"):
        bench.calibrate(minutes=-1.0)
    assert bench.ran == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model="qwen4"), "no model 'qwen4': choose from qwen3_0_6b"),
        (dict(recipe="nvfp5"), "no recipe 'nvfp5'"),
        (dict(program="train"), "no program 'train': choose from update, sample"),
        (dict(samples=3), "4 rows are no multiple of 3"),
        (dict(expert_devices=3), "8 experts are not the same number"),
    ],
)
def test_wrong_cases(changes, message):
    from experiments.memory_programs import Case
    from minite_jax.errors import UserError

    given = dict(program="update", model="tiny_moe", layers=1, recipe="nvfp4", rows=4, length=8)
    with pytest.raises(UserError, match=message):
        Case(**(given | changes)).config  # noqa: B018


def test_wrong_flags(monkeypatch):
    from experiments import memory
    from minite_jax.errors import UserError

    monkeypatch.setattr(memory.jax.config, "update", lambda *_: None)
    message = "names no case; there are update-qwen3_30b_a3b-2"
    with flagsaver.flagsaver(cases=["no-such-*"]), pytest.raises(UserError, match=message):
        memory.main(["memory", "calibrate"])
    with flagsaver.flagsaver(cases=["no-such"]), pytest.raises(UserError, match="no case 'no-such'"):
        memory.main(["memory", "case"])
    assert flags.FLAGS["cases"].value == ["*"]


def test_the_page(tmp_path):
    from experiments.memory_tables import write_page
    from minite_jax.errors import UserError

    text = (_ROOT / "docs/models.md").read_text()
    page = tmp_path / "models.md"
    with pytest.raises(UserError, match="no page"):
        write_page(page, tmp_path)
    page.write_text(text)
    write_page(page, _ROOT / "docs/benchmarks")
    assert page.read_text() == text  # the page holds what the files say
    write_page(page, tmp_path)
    assert page.read_text().count("\nnot run\n") == 2
    page.write_text(text.replace("<!-- end of calibration -->", ""))
    with pytest.raises(UserError, match="lacks the lines"):
        write_page(page, tmp_path)


@pytest.mark.slow  # two compilations in processes of their own
def test_a_calibration_on_this_machine(tmp_path):
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", "experiments.memory", "calibrate", "--tiny", f"--out={out}"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert all(row["compiled"] > 0 and row["seconds"] > 0 for row in rows)


if __name__ == "__main__":
    print(json.dumps({"parts": _parts, "deep": _deep}[sys.argv[1]]()))
