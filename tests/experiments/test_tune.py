"""The walk over tile configurations, on a stand-in for a kernel whose times are known."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import tune
from experiments.kernels.cases import COPY, Case
from experiments.timing import Timing
from pallas_kernels import tuning

DEFAULT = dict(BLOCK_M=64, num_warps=4, own=1)


def trial(op, parameters):
    """BLOCK_M = 256 is fastest but gives other bits, 128 is the next, 8 warps do not compile with 128."""
    if parameters["num_warps"] == 8 and parameters["BLOCK_M"] == 128:
        raise ValueError("too much shared memory")
    seconds = {64: 3.0, 128: 2.0, 256: 1.0}[parameters["BLOCK_M"]]
    return seconds, [np.asarray([parameters["BLOCK_M"] == 256])]


def test_the_fastest_with_the_same_bits():
    lines = []
    assert tune.descend("op", DEFAULT, trial, lines.append) == dict(BLOCK_M=128, num_warps=4, own=1)
    assert any("BLOCK_M=256: 1000000.0 us, REFUSED: other bits" in line for line in lines)
    assert any("num_warps=8: ValueError: too much shared memory" in line for line in lines)


def test_a_gain_within_the_noise_is_none():
    def flat(op, parameters):
        return 1.0 - 0.001 * parameters["num_warps"], [np.zeros(1)]

    assert tune.descend("op", DEFAULT, flat, lambda line: None) == DEFAULT


@pytest.fixture
def case():
    def scaled(x):
        tiles = tuning.config("scale", rows=x.shape[0], features=x.shape[1], depth=1, default=dict(num_warps=4))
        return x * 2 if tiles["num_warps"] == 4 else x + x

    return Case("suite", "scale", "", "", scaled, lambda key: (jax.random.normal(key, (8, 16)),), 0, 1024, COPY)


def test_the_table(case, tmp_path):
    def time(function, sets, *, calls, kernels):
        assert len(sets) == 32 and calls == 32 and not kernels
        # The second configuration compiles to an addition.
        return Timing(1.0 if "add" in str(jax.make_jaxpr(function)(*sets[0])) else 2.0, 0.0, 1, calls)

    kind, path, lines = jax.devices()[0].device_kind, tmp_path / "tuning.json", []
    path.write_text(json.dumps({"scale": {kind: {"64x16x1": {"num_warps": 4}}, "another": {"1x1x1": {"num_warps": 1}}}}))
    tune.tune([case, case], time, path, lines.append)
    table = json.loads(path.read_text())
    expected = {kind: {"8x16x1": {"num_warps": 8}, "64x16x1": {"num_warps": 4}}, "another": {"1x1x1": {"num_warps": 1}}}
    assert table == {"scale": expected}
    assert sum(line.startswith("scale: scale at 8x16x1") for line in lines) == 1  # the second case asks for the same
    assert tuning.lookup("scale", kind, rows=8, features=16, depth=1, table=table) == {"num_warps": 8}
    assert tune.tune([case], None, path, lines.append) == table  # nothing is left to measure


def test_no_time_left(case, tmp_path):
    lines = []
    tune.tune([case], None, tmp_path / "tuning.json", lines.append, more=lambda: False)
    assert lines == ["no time left: the same command goes on from here"] and not (tmp_path / "tuning.json").exists()


def test_asked_for(case):
    assert tune.asked_for(case, (jnp.ones((8, 16)),)) == [("scale", (8, 16, 1), dict(num_warps=4))]
