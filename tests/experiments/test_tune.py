"""The search for tile configurations, on a stand-in for a kernel whose times are known."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import tune
from experiments.kernels.cases import COPY, Case
from experiments.timing import Calls, Timing
from pallas_kernels import tuning

DEFAULT = dict(BLOCK_M=64, num_warps=4, own=1)


def trials(seconds):
    """Trials of configurations whose times a function knows; it raises for one that does not compile."""

    def one(parameters):
        try:
            seconds(parameters)
        except ValueError as error:
            return error
        result = [jnp.zeros(1) if parameters.get("BLOCK_M") != 256 else -jnp.zeros(1)]  # equal numbers, other bits
        return tune.Trial(lambda: seconds(parameters), result)

    return lambda configs: [one(parameters) for parameters in configs]


def known(parameters):
    """BLOCK_M = 256 is fastest but gives other bits, 128 is the next, 8 warps do not compile with 128."""
    if parameters["num_warps"] == 8 and parameters["BLOCK_M"] == 128:
        raise ValueError("too much shared memory")
    return {64: 3.0, 128: 2.0, 256: 1.0}[parameters["BLOCK_M"]]


def test_the_fastest_with_the_same_bits():
    lines = []
    assert tune.search("op", DEFAULT, trials(known), lines.append) == dict(BLOCK_M=128, num_warps=4, own=1)
    assert any("BLOCK_M=256: REFUSED: other bits than the default" in line for line in lines)
    assert any("BLOCK_M=128, num_warps=8: ValueError: too much shared memory" in line for line in lines)
    assert lines[-1].endswith(": taken")


def test_a_gain_within_the_noise_is_none():
    lines = []
    flat = trials(lambda parameters: 1.0 - 0.001 * parameters["num_warps"])
    assert tune.search("op", DEFAULT, flat, lines.append) == DEFAULT
    assert lines[-1] == "  the default stays"


def test_a_winner_by_luck_loses_at_the_end():
    """Equal kernels with noise of 15 %: some candidate looks faster in the search, and is then measured again."""
    rng = np.random.default_rng(0)
    lines, stays = [], 0
    for _ in range(20):
        noisy = trials(lambda parameters: 1 + rng.uniform(-0.15, 0.15))
        stays += tune.search("op", DEFAULT, noisy, lines.append) == DEFAULT
    assert stays >= 19 and any(line.endswith("us: the default stays") for line in lines)


def test_drift_is_in_both():
    """A GPU that becomes slower and slower: what is measured later is not worse for it."""
    now = iter(range(10**6))
    drifting = trials(lambda parameters: (1 + 0.01 * next(now)) * {64: 1.0, 128: 0.8, 256: 1.0}[parameters["BLOCK_M"]])
    assert tune.search("op", DEFAULT, drifting, lambda line: None)["BLOCK_M"] == 128


def test_parameters_change_together_first(monkeypatch):
    monkeypatch.setattr(tune, "STARTS", (dict(BLOCK_M=128, num_warps=8), dict(BLOCK_M=128, other=1)))
    together = trials(lambda p: 1.0 if (p["BLOCK_M"], p["num_warps"]) == (128, 8) else 2.0 + (p != DEFAULT))
    assert tune.search("op", DEFAULT, together, lambda line: None) == dict(BLOCK_M=128, num_warps=8, own=1)


def test_no_time_left_in_a_search():
    left = iter([True, False, False])
    lines = []
    found = tune.search("op", DEFAULT, trials(known), lines.append, lambda: next(left))
    assert found == DEFAULT and "  no time left: the search ends here" in lines


def test_the_default_must_run():
    with pytest.raises(ValueError, match="too much"):
        tune.search("op", dict(DEFAULT, BLOCK_M=128, num_warps=8), trials(known), lambda line: None)


def test_bits():
    nan, other = (jnp.asarray([bits], jnp.uint32).view(jnp.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert tune.same_bits([nan], [nan]) and not tune.same_bits([nan], [other])
    assert not tune.same_bits(jnp.zeros(1), -jnp.zeros(1)) and not tune.same_bits(jnp.zeros(1), jnp.zeros(2))
    assert tune.same_bits((jnp.asarray([True]), jnp.ones(3, jnp.bfloat16)), (jnp.asarray([True]), jnp.ones(3, jnp.bfloat16)))


@pytest.fixture
def case():
    def scaled(x):
        tiles = tuning.config("scale", rows=x.shape[0], features=x.shape[1], depth=1, default=dict(num_warps=4))
        return x * 2 if tiles["num_warps"] == 4 else x + x

    return Case("suite", "scale", "", "", scaled, lambda key: (jax.random.normal(key, (8, 16)),), 0, 1024, COPY)


class Known:
    """In place of `timing.Calls`: the second configuration, which compiles to an addition, takes half the time."""

    def __init__(self, function, sets, *, calls, kernels):
        assert len(sets) == 32 and calls == 32 and not kernels
        self.seconds = 1.0 if "add" in str(jax.make_jaxpr(function)(*sets[0])) else 2.0

    def compile(self):
        return self

    def time(self, repeats):
        return Timing(self.seconds, 0.0, repeats, 1)


def test_the_table(case, tmp_path):
    kind, path, lines = jax.devices()[0].device_kind, tmp_path / "tuning.json", []
    path.write_text(json.dumps({"scale": {kind: {"64x16x1": {"num_warps": 4}}, "another": {"1x1x1": {"num_warps": 1}}}}))
    tune.tune([case, case], Known, path, lines.append)
    table = json.loads(path.read_text())
    expected = {kind: {"8x16x1": {"num_warps": 8}, "64x16x1": {"num_warps": 4}}, "another": {"1x1x1": {"num_warps": 1}}}
    assert table == {"scale": expected}
    assert sum(line.startswith("scale: scale at 8x16x1") for line in lines) == 1  # the second case asks for the same
    assert tuning.lookup("scale", kind, rows=8, features=16, depth=1, table=table) == {"num_warps": 8}
    assert tune.tune([case], None, path, lines.append) == table  # nothing is left to measure


def test_a_default_that_stays_is_an_empty_entry(case, tmp_path):
    """So that it keeps a neighbour's configuration away and is nobody else's."""

    class Equal(Known):
        def time(self, repeats):
            return Timing(1.0, 0.0, repeats, 1)

    table = tune.tune([case], Equal, tmp_path / "tuning.json", [].append)
    kind = jax.devices()[0].device_kind
    assert table == {"scale": {kind: {"8x16x1": {}}}}
    assert tune.tune([case], None, tmp_path / "tuning.json", [].append) == table


def test_a_kernel_whose_default_fails_is_passed_over(case, tmp_path):
    class Failing(Known):
        def compile(self):
            raise RuntimeError("ptxas died")

    lines = []
    assert tune.tune([case, case], Failing, tmp_path / "tuning.json", lines.append) == {}
    assert [line for line in lines if "passed over" in line] == ["  passed over: RuntimeError: ptxas died"]
    assert not (tmp_path / "tuning.json").exists()


def test_candidates_are_traced_with_their_own_parameters(case):
    sets = [case.make(jax.random.key(0))]
    found = tune.try_all("scale", [dict(num_warps=4), dict(num_warps=8), dict(no=1)], case, sets, Calls)
    assert isinstance(found[2], ValueError)
    assert tune.same_bits(found[0].result, found[1].result) and tuning._overrides == {}


def test_no_time_left(case, tmp_path):
    lines = []
    tune.tune([case], None, tmp_path / "tuning.json", lines.append, more=lambda: False)
    assert lines == ["no time left: the same command goes on from here"] and not (tmp_path / "tuning.json").exists()


def test_asked_for(case):
    assert tune.asked_for(case, (jnp.ones((8, 16)),)) == [("scale", (8, 16, 1), dict(num_warps=4))]
