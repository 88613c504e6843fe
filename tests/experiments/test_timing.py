"""The timer's arithmetic, and that it notices calls that a compiler left out."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from experiments import timing
from experiments.timing import TimingError


def test_what_a_program_costs_beside_its_calls_cancels():
    overhead = [100e-6, 90e-6, 300e-6]
    found = timing.per_call([o + 4 * 5e-6 for o in overhead], [o + 8 * 5e-6 for o in overhead], calls=4)
    assert found.seconds == pytest.approx(5e-6) and found.spread == pytest.approx(0, abs=1e-9)
    assert (found.repeats, found.calls, found.host_share) == (3, 4, 0.0)


def test_the_median_counts():
    found = timing.per_call([1.0, 1.0, 1.0], [3.0, 3.2, 99.0], calls=2, host=[0.55, 0.55, 0.55])
    assert found.seconds == pytest.approx(1.1) and found.host_share == pytest.approx(0.25)


def test_spread_is_half_the_distance_between_the_quartiles():
    assert timing.spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4 - 2) / 2 / 3)
    assert timing.spread_of([7.0]) == 0.0


def test_too_short_to_be_measured():
    with pytest.raises(TimingError, match="8 calls took no longer than 4"):
        timing.per_call([1.0, 2.0], [0.9, 2.0], calls=4)


@pytest.mark.parametrize(("nbytes", "sets"), [(1e9, 2), (100e6, 2), (60e6, 4), (1e3, 32), (0, 32)])
def test_sets_exceed_the_cache(nbytes, sets):
    assert timing.sets_beyond_cache(nbytes) == sets


def test_sets_count_what_is_touched_and_fit_into_memory():
    assert timing.sets_beyond_cache(14e6, 226e6) == 15
    assert timing.sets_beyond_cache(14e6, 4e9) == 4
    assert timing.sets_beyond_cache(14e6, 60e9) == 2


@pytest.mark.parametrize(
    ("least", "sets", "calls"), [(None, 2, 8), (0.0, 32, 32), (50e-6, 32, 32), (178e-6, 2, 8), (0.5e-3, 2, 4), (60e-3, 8, 2)]
)
def test_what_takes_long_is_called_less_often(least, sets, calls):
    assert timing.enough_calls(least, sets) == calls


def test_programs_made_of_shapes_are_timed_with_arrays():
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    programs = timing.Calls(lambda x: x @ x, [(shape,), (shape,)], calls=2).compile()
    sets = [(jax.random.normal(key, shape.shape),) for key in jax.random.split(jax.random.key(0))]
    assert programs.time(9, sets).seconds > 0


class FakeDevice:
    """Two programs of 1 and 2 calls, 1 ms each. The host needs 0.5 ms more before it starts the first, unless the device is busy.

    A program starts at once on a device that is free, and otherwise behind what runs.
    """

    def __init__(self):
        self.host = self.free_at = 0.0

    def program(self, seconds, late):
        def run(sets):
            self.host += late  # the host works, the device goes on
            self.free_at = max(self.host, self.free_at) + seconds
            return ()

        return run

    def wait(self, results):
        self.host = max(self.host, self.free_at)

    def time(self, monkeypatch):
        calls = timing.Calls(lambda x: x, [(jnp.ones(1),)], calls=1)
        calls._programs = [self.program(1e-3, 0.5e-3), self.program(2e-3, 0.0)]
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(timing.jax, "block_until_ready", self.wait)
        return calls.time(5)


@pytest.mark.parametrize(("backend", "seconds"), [("gpu", 1e-3), ("cpu", 0.5e-3)])
def test_what_the_host_does_for_one_program_alone_hides_behind_another(backend, seconds, monkeypatch):
    monkeypatch.setattr(timing.jax, "default_backend", lambda: backend)
    assert FakeDevice().time(monkeypatch).seconds == pytest.approx(seconds)


def test_the_chain_calls_on_each_set():
    sets = [(jnp.full(3, float(i)),) for i in (0, 1, 2, 0)]
    results = timing.chain(lambda x: (x + 1, {"codes": (2 * x).astype(jnp.uint8)}))(sets)
    assert results.tolist() == [1, 0, 2, 2, 3, 4, 1, 0]


class FakeTorch:
    """As much of PyTorch as the timer asks for. Its device needs 2 ms a call; a capture may fail."""

    def __init__(self, capture_fails=False):
        self.now, self.calls, self.cuda, self.capturing = 0.0, 0, self, False
        self.capture_fails = capture_fails
        self.no_grad = self.stream = lambda *_: contextlib.nullcontext()
        self.Stream = self.synchronize = lambda: None

    def function(self, number):
        self.calls += 1
        self.now += 0.0 if self.capturing else 2.0

    def Event(self, *, enable_timing):  # noqa: N802
        event = types.SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def CUDAGraph(self):  # noqa: N802
        return types.SimpleNamespace(replay=lambda: setattr(self, "now", self.now + 5 * 2.0))

    @contextlib.contextmanager
    def graph(self, graph, *, capture_error_mode):
        self.capturing = True
        yield
        self.capturing = False
        if self.capture_fails:
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("capture_fails", [False, True])
def test_pytorch_calls_are_replayed_or_made_again(capture_fails):
    torch = FakeTorch(capture_fails)
    found = timing.time_torch(torch, torch.function, [(0,), (1,)], repeats=3, calls=5)
    assert found.seconds == pytest.approx(2e-3) and (found.repeats, found.calls, found.spread) == (3, 5, 0.0)
    assert torch.calls == 3 + 5 + (3 * 2 * 5 if capture_fails else 0)


def kernels(count, target="triton_kernel_call"):
    return "\n".join(f'  %c.{i} = f32[8] custom-call(f32[8] %a), custom_call_target="{target}"' for i in range(count))


@pytest.mark.parametrize(("short", "long"), [(4, 8), (8, 16)])
def test_every_kernel_is_there(short, long):
    timing.check_calls(kernels(short), kernels(long), 4, kernels=True)


@pytest.mark.parametrize(("short", "long"), [(0, 0), (1, 1), (4, 7), (3, 6), (5, 10)])
def test_missing_kernels_are_noticed(short, long):
    with pytest.raises(TimingError, match=f"4 and 8 calls became {short} and {long} kernels"):
        timing.check_calls(kernels(short), kernels(long), 4, kernels=True)


def test_other_custom_calls_are_no_kernels():
    with pytest.raises(TimingError, match="became 0 and 0 kernels"):
        timing.check_calls(kernels(4, "cublas"), kernels(8, "cublas"), 4, kernels=True)


def test_merged_operations_are_noticed():
    program = jax.jit(lambda x: [jnp.sin(x) + 1, jnp.sin(x) + 1]).lower(jnp.ones(8)).compile().as_text()
    with pytest.raises(TimingError, match="XLA merged or dropped some"):
        timing.check_calls(program, program, 2, kernels=False)


def test_equal_inputs_are_computed_again():
    # One set for all calls: without the dependence between them XLA would compute one and hand it out eight times.
    key = jax.random.key(0)
    sets = [(jax.random.normal(key, (512, 512)),)]
    found = timing.time_jax(lambda x: x @ x, sets, repeats=9, calls=4)
    assert found.seconds > 0 and found.repeats == 9 and found.host_share == 0.0
