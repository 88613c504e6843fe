"""What is faster than memory and tensor cores can be is no measurement."""

import dataclasses

import jax.numpy as jnp
import pytest
from bench_parts import bench_of, case, ceilings_of, timed

from experiments.kernels import limits, measure
from experiments.kernels.cases import BF16, FP8, READ, SHARE, VS_BF16, VS_FP8, Other
from experiments.kernels.peers import Measured, Peer

# 1.07 GB of keys and values read by an H200 that was measured to read 4.5 TB/s and to multiply 700 TFLOP/s.
DECODE = dict(nbytes=1.0737e9, flops=1.7e10, ceiling=READ, ratios={VS_BF16: Peer("b", ())}, goals={SHARE: 0.8, VS_BF16: 0.5})
H200 = dict(copy=4.2e12, read=4.5e12, bf16=700e12, fp8=1380e12)


def gone_round(seconds, sets=2, nbytes=1.0737e9):
    return dataclasses.replace(timed(seconds), cycled=sets * nbytes)


def test_a_time_under_which_the_bytes_cannot_have_moved_is_no_measurement():
    decode = case(**DECODE)
    row = measure.case_row(decode, gone_round(259e-6), {VS_BF16: gone_round(178.4e-6)}, ceilings_of(**H200))
    assert row[VS_BF16] == "faster than reading allows" and row["met"] is None and row[SHARE] == pytest.approx(92.1, abs=0.1)
    assert row["remarks"] == "cuBLAS bf16: 178.4 us (spread 2 %) is faster than reading allows"
    # Ours as well: no figure is made of it.
    row = measure.case_row(decode, gone_round(178.4e-6), {VS_BF16: gone_round(259e-6)}, ceilings_of(**H200))
    assert row["time"] == "faster than reading allows" and {row[key] for key in ("gbs", "tflops", SHARE, VS_BF16)} == {None}
    assert row["met"] is None and measure.failures([row]) == [row]
    # A goal that another figure misses is missed.
    row = measure.case_row(decode, gone_round(400e-6), {VS_BF16: gone_round(178.4e-6)}, ceilings_of(**H200))
    assert row["met"] is False


@pytest.mark.parametrize("seconds", [1.0737e9 / 4.35e12, 1.0737e9 / 4.9e12])
def test_within_the_tolerance_is_a_measurement(seconds):
    assert limits.too_fast(case(**DECODE), gone_round(seconds), ceilings_of(**H200)) == ""


def test_what_the_cache_can_hold_may_be_faster_than_memory():
    small = case(**{**DECODE, "nbytes": 1e6, "flops": 0})
    found, at_ten_terabytes = ceilings_of(**H200), 1e6 / 10e12
    assert limits.too_fast(small, gone_round(at_ten_terabytes, 32, 1e6), found) == ""
    assert limits.too_fast(small, gone_round(at_ten_terabytes, 200, 1e6), found) == limits.FASTER_THAN_READING


@pytest.mark.parametrize(
    ("ceiling", "key", "tflops", "words"),
    [
        (BF16, None, 730, ""),
        (BF16, None, 740, limits.FASTER_THAN_MATMULS),
        (FP8, None, 1400, ""),
        (FP8, None, 1460, limits.FASTER_THAN_MATMULS),
        (FP8, VS_FP8, 1400, ""),
        (FP8, VS_BF16, 1400, limits.FASTER_THAN_MATMULS),  # it multiplies bfloat16
        (BF16, VS_FP8, 1400, ""),
    ],
)
def test_matmuls_have_the_limit_of_their_type(ceiling, key, tflops, words):
    matmul = case(flops=1e12, nbytes=1e6, ceiling=ceiling)
    assert limits.too_fast(matmul, timed(1 / tflops), ceilings_of(**H200), key) == words


def test_without_ceilings_nothing_is_impossible():
    nothing = ceilings_of(copy=None, read=None, bf16=None, fp8=None)
    assert limits.too_fast(case(**DECODE), gone_round(1e-9), nothing) == ""
    assert limits.too_fast(case(**DECODE), Measured(), ceilings_of(**H200)) == ""


def test_an_impossible_comparison_has_no_time_in_its_own_row(no_arrays):
    bench = bench_of(copy=1e9, read=1e9)  # of 300 MB, for which the stand-in says a millisecond
    other = Other("other", lambda x: x, lambda key: (jnp.ones((1024, 1024, 64)),))
    bench.row(case(nbytes=3e8, flops=0, make=other.make, ratios={"vs_unfused": other}))
    assert [row["time"] for row in bench.other_rows()] == ["faster than reading allows"]
