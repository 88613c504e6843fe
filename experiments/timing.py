"""How long does a GPU take for one call? Timers for JAX and for PyTorch that leave the host out.

    timing = time_jax(kernel, [(x0, w0), (x1, w1), ...])
    timing.seconds, timing.spread

Starting a jitted program costs the host 50-100 us, more than many kernels take. So one program makes R calls and another 2 R,
each call on the next of several sets of inputs, and the time of a call is (time(2 R) - time(R)) / R: whatever a program costs
beside its calls is in both and cancels. That holds for the device's part. The host's part need not be equal: XLA makes a CUDA
graph of one program, and records it anew whenever a buffer has moved, which may happen to one of the two alone and then at every
run, so that the median does not help. Therefore short programs start behind another run that keeps the device busy meanwhile.
PyTorch's calls are replayed as a CUDA graph between two events, behind another replay, so that the device never waits for the
host there either.

Give as many sets of inputs as together exceed the device's cache several times (`sets_beyond_cache`), and random numbers: zeros
make a GPU faster than it is.
"""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The L2 of an H200 is 60 MB, of which PyTorch and we count on 50; inputs that together exceed this many bytes are not in it.
CACHE_BYTES = 200e6
# So much of the GPU's memory may be filled with the inputs of one case, and as much with its results.
MEMORY_BYTES = 16e9
# Calls that together take so long are told from what the host does; longer measurements only cost time.
_ENOUGH_SECONDS = 2e-3
# A program that takes so long hides nothing behind another: what the host needs is a small part of it.
_LONG_SECONDS = 20e-3
# Kernels of ours are custom calls by this name.
_KERNEL_CALL = re.compile(r'custom_call_target="[^"]*(?:triton|mosaic)[^"]*"', re.IGNORECASE)
# What XLA makes of other operations.
_WORK = re.compile(r" (?:fusion|custom-call|while|call|dot|convolution|sort|reduce|copy|add|multiply)(?:-start)?\(")


class TimingError(RuntimeError):
    """A measurement that means nothing, with the reason."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
      seconds: median over the repeats.
      spread: half the distance between the quartiles, as a share of the median. Differences below it are noise.
      repeats: how many measurements.
      calls: calls in one measurement.
      host_share: time in which the host hands a call over, as a share of `seconds`; near 1 means that the host, not the device,
        was measured. 0 on a CPU, where the host is the device.
    """

    seconds: float
    spread: float
    repeats: int
    calls: int
    host_share: float = 0.0


def sets_beyond_cache(bytes_touched: float, bytes_per_set: float | None = None, most: int = 32) -> int:
    """How many sets of inputs exceed the cache: at least 2, at most `most`, and not more than the memory holds.

    Args:
      bytes_touched: what a call reads and writes of one set.
      bytes_per_set: the size of a set, where that is more (experts that no row goes to are not touched).
      most: upper bound.
    """
    fitting = int(MEMORY_BYTES // max(bytes_per_set or bytes_touched, 1))
    return int(max(2, min(most, fitting, -(-CACHE_BYTES // max(bytes_touched, 1)))))


def enough_calls(least_seconds: float | None, sets: int) -> int:
    """Calls in one measurement: 8, or one for each set where those are more; fewer, but two, where calls take long.

    Args:
      least_seconds: no call takes less; None: unknown.
      sets: how many sets of inputs there are.
    """
    most = max(8, sets)
    return most if not least_seconds else max(2, min(most, math.ceil(_ENOUGH_SECONDS / least_seconds)))


def per_call(short: Sequence[float], long: Sequence[float], calls: int, host: Sequence[float] = ()) -> Timing:
    """The time of one call from runs of R calls and of 2 R calls.

    Args:
      short: seconds of each run of R calls.
      long: seconds of each run of 2 R calls, paired with `short`.
      calls: R.
      host: seconds that the host needs for handing over R calls more, one for each pair.

    Raises:
      TimingError: the longer run was not the longer one.
    """
    each = [(b - a) / calls for a, b in zip(short, long, strict=True)]
    middle = statistics.median(each)
    if middle <= 0:
        raise TimingError(f"{2 * calls} calls took no longer than {calls}: too short to be measured; make more calls")
    host_share = max(0.0, statistics.median(host) / calls / middle) if host else 0.0
    return Timing(middle, spread_of(each), len(each), calls, host_share)


def spread_of(values: Sequence[float]) -> float:
    """Half the distance between the quartiles as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2 / middle


def chain(function: Callable) -> Callable:
    """A function of a list of sets of inputs that calls `function` on each, and returns a number of every result.

    Every set is a parameter of its own, also where the caller passes the same arrays twice, so that a compiler cannot merge
    calls. A call's inputs wait for the result of the call before, and the numbers are taken behind a barrier, so that it can
    neither leave a call out nor compute a part of it. Whole results are not returned: making an array of each costs the host as
    much as a short kernel takes.
    """
    inner = jax.jit(function)  # one lowering for all calls

    def run(sets):
        results = []
        for arguments in sets:
            if results:
                arguments, results[-1] = lax.optimization_barrier((arguments, results[-1]))
            results.append(inner(*arguments))
        results[-1] = lax.optimization_barrier(results[-1])
        return jnp.stack([leaf.reshape(-1)[0].astype(jnp.float32) for leaf in jax.tree.leaves(results)])

    return jax.jit(run)


def check_calls(short: str, long: str, calls: int, *, kernels: bool) -> None:
    """Raises unless the compiled texts of R and 2 R calls hold R and 2 R times the same work.

    Args:
      short: text of the program with R calls.
      long: text of the program with 2 R calls.
      calls: R.
      kernels: whether the calls are Triton kernels, which must be there exactly; else there must be more work in the longer one.

    Raises:
      TimingError: calls were merged, dropped or fused.
    """
    if kernels:
        one, two = len(_KERNEL_CALL.findall(short)), len(_KERNEL_CALL.findall(long))
        if one < calls or one % calls or two != 2 * one:
            raise TimingError(f"{calls} and {2 * calls} calls became {one} and {two} kernels: XLA merged or dropped some")
        return
    one, two = len(_WORK.findall(short)), len(_WORK.findall(long))
    if two - one < calls:
        raise TimingError(f"{calls} and {2 * calls} calls became {one} and {two} operations: XLA merged or dropped some")


class Calls:
    """Programs that make R and 2 R calls of a function: traced here, then compiled, then timed as often as wanted.

    Args:
      function: of the arrays (or trees of them) of one set; called inside jit.
      sets: sets of inputs, used in turn; their shapes will do until `time`.
      calls: R.
      kernels: whether the function consists of Triton kernels, so that their number is checked exactly.
    """

    def __init__(self, function: Callable, sets: Sequence[tuple], *, calls: int = 8, kernels: bool = False):
        self._calls, self._kernels, self._sets = calls, kernels, sets
        program = chain(function)
        self._traced = [program.trace(each) for each in self._in_turn(sets)]
        self._programs: list[Callable] = []

    def _in_turn(self, sets: Sequence[tuple]) -> list[list[tuple]]:
        """The inputs of R calls and of 2 R."""
        return [[sets[i % len(sets)] for i in range(count)] for count in (self._calls, 2 * self._calls)]

    def compile(self) -> "Calls":
        """Compiles the programs. Several may be compiled at once, each in a thread.

        Raises:
          TimingError: the compiler merged or dropped calls.
        """
        programs = [traced.lower().compile() for traced in self._traced]
        check_calls(*(program.as_text() for program in programs), self._calls, kernels=self._kernels)
        self._programs, self._traced = programs, []
        return self

    def time(self, repeats: int, sets: Sequence[tuple] | None = None) -> Timing:
        """The time of a call, from so many measurements behind a warm-up.

        Args:
          repeats: measurements.
          sets: as many sets of inputs as `Calls` was made with, where it had their shapes alone.

        Raises:
          TimingError: the calls are too short to be told apart.
        """
        inputs = self._in_turn(self._sets if sets is None else sets)
        on_cpu = jax.default_backend() == "cpu"  # there the host is the device, and nothing hides behind anything
        for program, each in zip(self._programs, inputs, strict=True):
            jax.block_until_ready(program(each))
        start = time.perf_counter()
        jax.block_until_ready(self._programs[0](inputs[0]))
        is_short = not on_cpu and time.perf_counter() - start < _LONG_SECONDS
        durations, handed_over = ([], []), ([], [])
        for _ in range(repeats):
            for i, program in enumerate(self._programs):
                busy = self._programs[1](inputs[1]) if is_short else None  # the same for both: cancels
                start = time.perf_counter()
                results = program(inputs[i])
                handed_over[i].append(time.perf_counter() - start)
                jax.block_until_ready((busy, results))
                durations[i].append(time.perf_counter() - start)
                del busy, results
        host = [b - a for a, b in zip(*handed_over, strict=True)]
        return per_call(*durations, self._calls, () if on_cpu else host)


def time_jax(function: Callable, sets: Sequence[tuple], *, repeats: int = 20, calls: int = 8, kernels: bool = False) -> Timing:
    """Times one call of a function on the default device: the median of `repeats` measurements. The rest as in `Calls`.

    Raises:
      TimingError: the compiler merged or dropped calls, or the calls are too short to be told apart.
    """
    return Calls(function, sets, calls=calls, kernels=kernels).compile().time(repeats)


def time_torch(torch: Any, function: Callable, sets: Sequence[tuple], *, repeats: int = 20, calls: int = 8) -> Timing:
    """Times one call of a PyTorch function on the current CUDA device.

    Args:
      torch: the module.
      function: of the tensors of one set.
      sets: sets of inputs, used in turn.
      repeats: measurements, of which the median is taken.
      calls: calls in one measurement.
    """
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # the warm-up makes workspaces and handles, which a capture must not
            for i in range(3):
                function(*sets[i % len(sets)])
        torch.cuda.synchronize()
        replay = _captured(torch, function, sets, calls)
        each, handed_over = [], []
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(repeats):
            replay()  # the device is busy with this one while the host prepares the next
            start.record()
            before = time.perf_counter()
            replay()
            handed_over.append(time.perf_counter() - before)
            end.record()
            torch.cuda.synchronize()
            each.append(start.elapsed_time(end) / 1e3 / calls)
    middle = statistics.median(each)
    return Timing(middle, spread_of(each), repeats, calls, statistics.median(handed_over) / calls / middle)


def _captured(torch: Any, function: Callable, sets: Sequence[tuple], calls: int) -> Callable[[], None]:
    """The calls as a graph, or as they are where they cannot be captured (an operation that waits for the host)."""

    def eager() -> None:
        for i in range(calls):
            function(*sets[i % len(sets)])

    graph = torch.cuda.CUDAGraph()
    try:
        # The mode: a thread of JAX may use CUDA meanwhile, which does not concern this capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            eager()
    except RuntimeError:
        torch.cuda.synchronize()
        return eager
    return graph.replay
