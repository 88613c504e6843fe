"""What tests of the kernel benchmark are made of: a clock that is a stand-in, a case, times and ceilings."""

import types

import jax.numpy as jnp

from experiments.kernels import ceilings, measure
from experiments.kernels.cases import BF16, COPY, FP8, READ, Case
from experiments.kernels.peers import Measured, Peers
from experiments.timing import Timing


def clock(function, sets, **settings):
    """Says a time without running anything. (The benchmark traced the function before: all that it calls is there and fits.)"""
    return Timing(1e-3, 0.01, settings.get("repeats", 20), settings.get("calls", 8))


class Programs:
    """In place of `timing.Calls`: nothing is traced, compiled or run; keeps what it was asked for."""

    made = []

    def __init__(self, function, sets, **settings):
        self.settings, self.sets = settings, sets
        self.made.append(self)

    def compile(self):
        return self

    def time(self, repeats, sets=None):
        assert len(sets) == len(self.sets)
        return clock(None, sets, repeats=repeats, calls=self.settings["calls"])


def bench_of(programs=Programs, repeats=1, calls=2, **rates):
    return measure.Bench(Peers(1, types.SimpleNamespace()), ceilings_of(**rates), programs, repeats, calls=calls)


def case(**changes):
    fields = dict(
        suite="dense", name="copy", operands="", shape="", function=lambda x: x + 1, make=lambda key: (jnp.ones((256, 256)),),
        flops=4e9, nbytes=3e6, ceiling=FP8,
    )  # fmt: skip
    return Case(**{**fields, **changes})


def ceilings_of(**rates):
    def ceiling(name, unit, rate):
        measured = Measured() if rate is None else Measured(Timing(1.0, 0.0, 1, 1))
        return ceilings.Ceiling(name, unit, {"somebody": (rate or 0.0, measured)})

    rates = {"copy": 4e12, "read": 3e12, "bf16": 0.5e12, "fp8": 1e12} | rates
    units = {COPY: "B", READ: "B", BF16: "FLOP", FP8: "FLOP"}
    return {name: ceiling(name, unit, rates[name.split()[0]]) for name, unit in units.items()}


def timed(seconds, host_share=0.0):
    return Measured(Timing(seconds, 0.02, 20, 8, host_share))
