"""The kernel benchmark on a CPU: tiny shapes through the reference implementation, with a clock that is a stand-in."""

import contextlib
import dataclasses
import time
import types

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver
from bench_parts import Programs, bench_of, case, ceilings_of, clock, timed

from experiments import benchmark, tables
from experiments.kernels import cases, ceilings, decode_suite, limits, measure, peers, suites
from experiments.kernels.cases import BF16, COPY, FP8, READ, SHARE, VS_BF16, VS_FP8, Other
from experiments.kernels.peers import Measured, Peer, Peers
from experiments.timing import Calls, TimingError
from minite_jax.errors import UserError
from minite_jax.metrics.results import read_results
from pallas_kernels import shapes


@contextlib.contextmanager
def stand_ins(path, programs=Programs, **given):
    """No PyTorch, no compiling: times and inputs come from shapes alone."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])  # a module's fixture comes before the one that does this
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver(quick=True, out=str(path), **given):
        patch.setattr(benchmark, "time_jax", clock)
        patch.setattr(benchmark, "Calls", programs)
        patch.setattr(peers, "_import_torch", lambda: None)
        patch.setattr(measure, "make_sets", lambda make, key, count: [jax.eval_shape(make, key)] * count)
        yield patch


_ALL = pytest.param(tuple(suites.SUITES), marks=pytest.mark.slow, id="all")


@pytest.fixture(scope="module", params=[_ALL, ("dense", "decode")], ids=str)
def file_and_suites(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "kernels_quick.json"
    with stand_ins(path, only=list(request.param)):
        benchmark.main(["benchmark", "kernels"])
    return path, list(request.param)


@pytest.fixture(scope="module")
def file(file_and_suites):
    return file_and_suites[0]


def test_every_suite_has_rows_of_every_column(file_and_suites):
    file, chosen = file_and_suites
    results = read_results(file)
    assert [column["key"] for column in results["columns"]] == [column["key"] for column in measure.COLUMNS]
    assert [*dict.fromkeys(row["suite"] for row in results["rows"])] == ["ceilings", *chosen, "compared with"]
    ours = [row for row in results["rows"] if row["suite"] in suites.SUITES]
    # By the stand-in's clock the larger of the tiny products are faster than the ceiling, a tiny product too.
    possible = [row for row in ours if row["time"] != limits.FASTER_THAN_MATMULS]
    assert all(row["time"] == pytest.approx(1000.0) for row in possible) and len(possible) > len(ours) / 2
    assert all(limits.FASTER_THAN_MATMULS in row["remarks"] for row in ours if row["remarks"] or row not in possible)
    assert {row["b300"] for row in ours} == {None, "compiled, not run"}


def test_without_pytorch_its_columns_say_not_run(file):
    results = read_results(file)
    assert results["provenance"]["versions"]["torch"] == "not installed"
    dense = [row for row in results["rows"] if row["suite"] == "dense"]
    assert all(row[VS_BF16] is None for row in dense) and all(row["met"] is None for row in dense if row["goal"])
    assert any(row["ceiling"] == "fp8 matmul not run" and row[SHARE] is None for row in dense)
    # What JAX alone can say is there.
    assert any(isinstance(row["vs_unfused"], float) for row in dense)


def test_the_page_shows_the_ceiling_and_honest_words(file_and_suites, tmp_path):
    file, chosen = file_and_suites
    with flagsaver.flagsaver(results=str(file.parent), out=str(tmp_path)):
        tables.main(["tables"])
    page = (tmp_path / "kernels_quick.md").read_text()
    for suite in chosen:
        assert f"#### {suite}\n" in page
    assert "fp8 arithmetic on 4-bit values" in page and "compiled, not run" in page and "not run" in page
    section = page.split("#### dense")[1].split("####")[0]
    assert "ceiling" in section and "ragged_dot" not in section  # a column that says nothing here is left out


def test_what_is_wrong_is_one_line():
    with flagsaver.flagsaver(only=["dnese"], quick=True), pytest.raises(UserError, match="no suite 'dnese'; choose from dense"):
        benchmark.main(["benchmark", "kernels"])
    with flagsaver.flagsaver(), pytest.raises(UserError, match="there is no GPU here: tiles"):
        benchmark.main(["benchmark", "tune"])
    with flagsaver.flagsaver(quick=False), pytest.raises(UserError, match="there is no GPU here: --quick"):
        benchmark.main(["benchmark", "kernels"])


def test_a_case_of_ours_that_fails_is_said_at_the_end(tmp_path):
    def broken(scale, only):
        yield case(function=lambda x: x.no_such_method())
        yield case()

    path = tmp_path / "x.json"
    with stand_ins(path) as patch, pytest.raises(UserError, match="1 cases could not be measured, .* 'copy'"):
        patch.setattr(suites, "cases", broken)
        benchmark.main(["benchmark", "kernels"])
    failed, fine = (row for row in read_results(path)["rows"] if row["suite"] == "dense")
    assert failed["time"] is None and failed["remarks"].startswith("failed: AttributeError")
    assert fine["time"] == pytest.approx(1000.0)


def test_a_ceiling_is_the_fastest_of_what_was_tried():
    tried = {"large": (1e15, timed(1.4)), "small": (2.5e14, timed(0.3)), "failed": (1e15, Measured(failure="no"))}
    ceiling = ceilings.Ceiling(BF16, "FLOP", tried)
    assert ceiling.rate == pytest.approx(2.5e14 / 0.3) and ceiling.words() == "bf16 matmul 833 TFLOP/s"
    rows = measure.ceiling_rows({BF16: ceiling})
    assert [row["tflops"] for row in rows] == [pytest.approx(1e3 / 1.4), pytest.approx(250 / 0.3), None]


def test_a_row_is_computed_from_times():
    compute = case(ratios={VS_BF16: Peer("b", ()), VS_FP8: Peer("f", ())}, goals={VS_BF16: 1.5, SHARE: 0.7})
    row = measure.case_row(compute, timed(5e-3), {VS_BF16: timed(10e-3), VS_FP8: timed(4e-3)}, ceilings_of())
    assert row["time"] == pytest.approx(5000) and row["spread"] == pytest.approx(2)
    assert row["tflops"] == pytest.approx(4e9 / 5e-3 / 1e12) and row["gbs"] == pytest.approx(3e6 / 5e-3 / 1e9)
    assert row[VS_BF16] == pytest.approx(2.0) and row[VS_FP8] == pytest.approx(0.8) and row["vs_ragged_dot"] == ""
    assert row[SHARE] == pytest.approx(80.0) and row["ceiling"] == "fp8 matmul 1 TFLOP/s"
    assert row["goal"] == ">= 1.5 x cuBLAS bf16, >= 70 % of fp8 matmul" and row["met"] is True and row["remarks"] == ""


@pytest.mark.parametrize(
    ("ceiling", "share", "words"),
    [
        (FP8, 50.0, "fp8 matmul 2 TFLOP/s"),
        (BF16, 100 * 30e9 / 1e12 / 40e-3, "copy 1,000 GB/s (bf16 matmul 2 TFLOP/s)"),  # its bytes take longer
        (COPY, 75.0, "copy 1,000 GB/s"),
        (READ, 25.0, "read 3,000 GB/s"),
    ],
)
def test_the_share_is_of_what_binds(ceiling, share, words):
    flops = 40e9 if ceiling == FP8 else 4e9
    nbytes = 3e9 if ceiling == FP8 else 30e9
    found = ceilings_of(copy=1e12, fp8=2e12, bf16=2e12)
    row = measure.case_row(case(ceiling=ceiling, flops=flops, nbytes=nbytes), timed(40e-3), {}, found)
    assert row[SHARE] == pytest.approx(share) and row["ceiling"] == words


def test_failed_and_late_are_said():
    against = case(ratios={VS_BF16: Peer("b", ()), VS_FP8: Peer("f", ())}, goals={VS_BF16: 1.5})
    compared = {VS_BF16: Measured(), VS_FP8: Measured(failure="RuntimeError: no such kernel")}
    row = measure.case_row(against, timed(5e-3, host_share=0.93), compared, ceilings_of(fp8=None))
    assert row[VS_BF16] is None and row[VS_FP8] == "failed" and row["met"] is None
    assert row["remarks"] == "the host took 93 % of the time; cuBLAS fp8: RuntimeError: no such kernel"
    assert row[SHARE] is None and row["ceiling"] == "fp8 matmul not run"


def test_a_missed_goal_is_missed_even_if_another_is_open():
    against = case(ratios={VS_BF16: Peer("b", ()), VS_FP8: Peer("f", ())}, goals={VS_BF16: 1.5, VS_FP8: 1.0})
    row = measure.case_row(against, timed(5e-3), {VS_BF16: timed(5e-3), VS_FP8: Measured()}, ceilings_of(bf16=1e12))
    assert row["met"] is False
    assert measure.summary([row, {"goal": "", "met": ""}]) == {"met": 0, "missed": 1, "undecided": 0}


def test_equal_peers_are_timed_once(monkeypatch):
    calls = []

    def build(torch, n):
        calls.append(n)
        raise RuntimeError("not on this build\nand a long story")

    monkeypatch.setitem(peers._PEERS, "broken", build)
    torch = types.SimpleNamespace(__version__="2.11", cuda=types.SimpleNamespace(empty_cache=lambda: None))
    others = Peers(3, torch)
    found = [others.time(Peer("broken", (8,))), others.time(Peer("broken", (8,))), others.time(Peer("broken", (9,)))]
    assert calls == [8, 9] and found[0].failure == "RuntimeError: not on this build" and others.version == "2.11"


def test_jax_comparisons_are_timed_once(monkeypatch, no_arrays):
    monkeypatch.setattr(Programs, "made", [])
    bench = bench_of(calls=None)
    other = Other("other", lambda x: x, lambda key: (jnp.ones(4),), repeats=3, calls=1)
    # In one batch, and in another.
    against = case(ratios={"vs_unfused": other}, flops=0)
    assert [row["vs_unfused"] for _, row in bench.rows([against, against])] == [1.0, 1.0]
    assert bench.row(against)["vs_unfused"] == 1.0
    assert len(Programs.made) == 4 and [row["case"] for row in bench.other_rows()] == ["other"]
    assert sorted(made.settings["calls"] for made in Programs.made) == [1, 32, 32, 32]


def test_a_case_with_the_real_clock():
    bench = bench_of(Calls, calls=4)
    row = bench.row(case(function=lambda x: x @ x, make=lambda key: (jax.random.normal(key, (384, 384)),), flops=0, nbytes=0))
    assert row["time"] > 0 and row["remarks"] == ""


def test_batches_are_measured_in_order_as_long_as_there_is_time(monkeypatch, no_arrays):
    monkeypatch.setattr(measure, "_BATCH", 2)
    asked = [case(name=str(i)) for i in range(5)]
    assert [c.name for c, _ in bench_of().rows(asked)] == list("01234")
    answers = iter([True] * 5 + [False])  # one question before each batch and each case
    assert [c.name for c, _ in bench_of().rows(asked, lambda: next(answers))] == list("012")


def test_what_xla_chooses_by_timing_compiles_alone(monkeypatch, no_arrays):
    """Four products and four sums: no two products at once, and a sum beside another job."""
    running, seen = [], []

    class Slow(Programs):
        def __init__(self, function, sets, **settings):
            super().__init__(function, sets, **settings)
            self.kind = function(2.0)

        def compile(self):
            running.append(self.kind)
            seen.append(list(running))
            time.sleep(0.02)
            running.remove(self.kind)

    def product(x):
        return "product" if isinstance(x, float) else jnp.dot(x, x)

    def total(x):
        return "sum" if isinstance(x, float) else x + x

    monkeypatch.setattr(measure.os, "cpu_count", lambda: 8)
    list(bench_of(Slow).rows([case(function=function, flops=0) for function in (product, total) * 4]))
    assert len(seen) == 8 and max(each.count("product") for each in seen) == 1 and max(map(len, seen)) > 1


def test_what_is_compared_says_what_it_holds():
    other = dataclasses.replace(timed(9e-3), held=7_000_000)
    row = measure.case_row(case(), timed(5e-3), {"vs_unfused": other}, ceilings_of())
    assert row["vs_unfused_held"] == 7.0 and row["held"] == ""
    assert {"vs_unfused_held", "vs_ragged_dot_held", "vs_cudnn_attention_held"} <= {c["key"] for c in measure.COLUMNS}


def test_a_table_says_what_is_not_in_it(tmp_path):
    path = tmp_path / "x.json"
    with stand_ins(path, only=["dense", "decode"], match="^dense.*fp8|^dense.*bf16"):
        benchmark.main(["benchmark", "kernels"])
    words = "**Left out** by `--match=^dense.*fp8|^dense.*bf16`: dense (3 of 5 cases), decode (all 3 cases).\n\nOn a Hopper"
    assert read_results(path)["notes"].startswith(words)
    with stand_ins(path, only=["dense", "decode"], minutes=0.0):
        benchmark.main(["benchmark", "kernels"])
    words = "**Not in this table**: dense (all 5 cases), decode (all 3 cases): --minutes=0 were over before them."
    assert read_results(path)["notes"].startswith(words)


def test_a_table_of_everything_says_nothing_is_missing():
    found = [case(), case(suite="decode")]
    assert measure.missing_words(found, found, found, "", None) == ""


def test_a_run_that_dies_has_said_what_is_missing(tmp_path):
    def dying(path, **content):
        written.append(content)
        if len(written) == 2:
            raise KeyboardInterrupt

    written = []
    with stand_ins(tmp_path / "x.json", only=["dense"]) as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(benchmark, "write_results", dying)
        benchmark.main(["benchmark", "kernels"])
    assert written[1]["notes"].startswith("**Not in this table**: dense (3 of 5 cases): the run was stopped before them.")


def test_a_pattern_that_finds_nothing_is_one_line():
    for pattern, words in (("no such case", "found in no case"), ("(", "give a regular expression")):
        with flagsaver.flagsaver(quick=True, match=pattern), pytest.raises(UserError, match=words):
            benchmark.main(["benchmark", "kernels"])


def test_cases_that_the_model_runs_are_there():
    found = list(suites.cases(cases.FULL, ("quantize", "attention", "log_prob")))
    names = {each.name for each in found}
    assert {"add + RMS norm", "add + RMS norm + quantise", "Llama-3.2-1B, causal pass and its gradients"} <= names
    assert sum("router" in name for name in names) == 5 and sum(name.startswith("sampling") for name in names) == 2
    assert [each.shape for each in found if each.name.startswith("Llama-3.2-1B, one token")] == [
        "B = 64, T = 8192, H = 32, N = 8, K = 64"
    ]


def test_full_scale_cases_have_goals_and_unique_names():
    found = list(suites.cases(cases.FULL, tuple(suites.SUITES)))
    assert len({(each.suite, each.name, each.shape) for each in found}) == len(found)
    goals = {(each.suite, key, value) for each in found for key, value in each.goals.items()}
    assert ("dense", VS_BF16, 1.5) in goals and ("dense", VS_BF16, 1.35) in goals and ("dense", VS_BF16, 0.95) in goals
    assert ("expert_mlp", "vs_grouped_bf16", 1.5) in goals and ("grouped", "vs_ragged_dot", 50.0) in goals
    assert ("decode", VS_BF16, 2.5) in goals and ("decode", SHARE, 0.7) in goals and ("quantize", SHARE, 0.8) in goals


def test_bytes_and_operations_of_a_full_case():
    found = {each.name: each for each in suites.cases(cases.FULL, ("dense", "decode"))}
    dense = found["Qwen3-8B down, x quantised"]
    assert dense.flops == 2 * 8192 * 4096 * 12288
    assert dense.nbytes == 2 * 8192 * 12288 + 4096 * 12288 + 2 * 8192 * 4096
    assert found["Qwen3-8B down, batch 64"].nbytes == 4096 * 12288 * 9 // 16
    decode = found[next(name for name in found if name.startswith("Qwen3-30B-A3B gate_up, batch 16"))]
    sizes = decode_suite.decode_group_sizes(16, 128, 8)
    hit = sum(size > 0 for size in sizes)
    assert sum(sizes) == 128 and max(sizes) <= 16 and f"{hit} of 128 experts" in decode.name
    assert decode.nbytes == shapes.QWEN3_30B_A3B.grouped()[0].packed_bytes(hit)


def test_unfused_quantize_dequantize_is_nvfp4():
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    y = jax.jit(cases.unfused_quantize_dequantize)(x)
    error = jnp.mean((x - y).astype(jnp.float32) ** 2) / jnp.mean(x.astype(jnp.float32) ** 2)
    assert y.dtype == jnp.bfloat16 and 0.005 < float(error) < 0.013  # 0.009 for Gaussian numbers


@pytest.mark.parametrize(("kind", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA GB300 (x)", "gb300_x"), ("cpu", "cpu")])
def test_device_slug(kind, slug):
    assert benchmark.device_slug(kind) == slug


def test_too_short_for_the_clock_is_no_failure_in_a_quick_run(tmp_path):
    class TooFast(Programs):
        def time(self, repeats, sets=None):
            raise TimingError("2 calls took no longer than 1")

    path = tmp_path / "x.json"
    with stand_ins(path, programs=TooFast) as patch:
        patch.setattr(suites, "cases", lambda scale, only: iter([case()]))
        benchmark.main(["benchmark", "kernels"])
    assert all(row["time"] is None for row in read_results(path)["rows"] if row["suite"] != "ceilings")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiles every case of every suite
def test_a_quick_run_with_the_real_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_import_torch", lambda: None)
    path = tmp_path / "x.json"
    with flagsaver.flagsaver(quick=True, out=str(path)):
        benchmark.main(["benchmark", "kernels"])
    rows = [row for row in read_results(path)["rows"] if row["suite"] in suites.SUITES]
    assert sum(row["time"] is not None for row in rows) > len(rows) / 2  # tiny shapes: some are too short for the clock
