"""Is a time possible? What is faster than memory and tensor cores were measured to be in the same run is no measurement.

The tolerances are for noise of the times and of the ceilings, which are medians too. Both figures are the fewest that the case
needs, whoever computes it: another library that moves more bytes, or that computes more, is only further away from the limit.
"""

from experiments.kernels.cases import BF16, COPY, FP8, READ, VS_FP8, VS_GROUPED_FP8, Case
from experiments.kernels.ceilings import Ceiling
from experiments.kernels.peers import Measured

FASTER_THAN_READING, FASTER_THAN_MATMULS = "faster than reading allows", "faster than matmuls allow"
IMPOSSIBLE = (FASTER_THAN_READING, FASTER_THAN_MATMULS)

_MEMORY_TOLERANCE, _MATMUL_TOLERANCE = 1.1, 1.05
# The L2 of an H200. So much of the sets may lie there when a call comes round to its set again.
_CACHE_BYTES = 60e6
_FP8_PEERS = (VS_FP8, VS_GROUPED_FP8)


def too_fast(case: Case, measured: Measured, ceilings: dict[str, Ceiling], key: str | None = None) -> str:
    """Why the time is no measurement, one of `IMPOSSIBLE`; "" where it may be one, or where there is none.

    Args:
      case: what was computed.
      measured: the time of our kernels, or of what they are compared with.
      ceilings: by name, measured in the same run; those that were not say nothing.
      key: of the comparison; None: our kernels.
    """
    if measured.timing is None:
        return ""
    seconds = measured.timing.seconds
    # Copying moves bytes both ways and reading one way; whichever was faster is what the memory can do.
    rates = [ceilings[name].rate for name in (READ, COPY) if ceilings[name].rate is not None]
    from_memory = case.nbytes * max(0.0, 1 - _CACHE_BYTES / measured.cycled) if measured.cycled > 0 else 0.0
    if rates and from_memory > _MEMORY_TOLERANCE * max(rates) * seconds:
        return FASTER_THAN_READING
    # What decodes or routes may use either type. Float32 products are slower than both.
    is_fp8 = key in _FP8_PEERS if key is not None else case.ceiling != BF16
    rate = ceilings[FP8 if is_fp8 else BF16].rate
    if rate is not None and case.flops > _MATMUL_TOLERANCE * rate * seconds:
        return FASTER_THAN_MATMULS
    return ""
