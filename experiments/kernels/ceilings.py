"""What this GPU can do at best, measured in the same run: copying, reading, bf16 and fp8 matmuls."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.kernels import peers
from experiments.kernels.cases import BF16, COPY, FP8, READ, normal
from experiments.kernels.peers import Measured, Peer
from experiments.timing import Timing

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """One ceiling: the fastest of what was tried.

    Attributes:
      name: as in the cases.
      unit: "B" or "FLOP".
      tried: source -> bytes or operations of one call, and its time, or why there is none.
    """

    name: str
    unit: str
    tried: dict[str, tuple[float, Measured]]

    @property
    def rate(self) -> float | None:
        """Bytes or operations a second of the fastest source; None where none was run."""
        rates = [amount / each.timing.seconds for amount, each in self.tried.values() if each.timing is not None]
        return max(rates, default=None)

    def words(self) -> str:
        """The ceiling for people: "fp8 matmul 1,383 TFLOP/s"."""
        if self.rate is None:
            return f"{self.name} not run"
        return (
            f"{self.name} {self.rate / 1e12:,.0f} TFLOP/s" if self.unit == "FLOP" else f"{self.name} {self.rate / 1e9:,.0f} GB/s"
        )


def measure(others: peers.Peers, time: Callable[..., Timing], *, quick: bool) -> dict[str, Ceiling]:
    """Measures every ceiling, through JAX and, where it is there, through PyTorch.

    Matmuls have two sizes: on an H200 cuBLAS was 10 to 16 % faster at the smaller one in every run (tables kernels_h200 and
    kernels_h200_mosaic), so that the larger one alone was no ceiling.

    Args:
      others: PyTorch's side.
      time: `timing.time_jax` with its settings.
      quick: a thousandth of the size.
    """
    nbytes, n = (2**20, 64) if quick else (_GIB, 8192)
    words_key, matrix_key = jax.random.split(jax.random.key(0))
    words = [(jax.random.bits(words_key, (nbytes // 4,)),)]

    def through_jax(function, sets):
        try:
            return Measured(time(function, sets, calls=2 if quick else 8))
        except Exception as error:  # one ceiling less: the shares that need it are not known
            return Measured(failure=peers.reason(error))

    copy = {"XLA": through_jax(lambda x: x ^ jnp.uint32(1), words), "PyTorch": others.time(Peer(peers.COPY, (nbytes,)))}
    read = {"XLA": through_jax(jnp.max, words), "PyTorch": others.time(Peer(peers.READ, (nbytes,)))}
    bf16, fp8 = {}, {}
    for M, N, K in ((n, n, n), (n, n // 2, n // 2)):
        size, flops = f"{M} x {N} x {K}", 2 * M * N * K
        matrices = [(normal(key, M, K), normal(key, N, K)) for key in jax.random.split(matrix_key)]
        bf16[f"XLA, {size}"] = flops, through_jax(lambda x, w: x @ w.T, matrices)
        bf16[f"PyTorch, {size}"] = flops, others.time(Peer(peers.CUBLAS_BF16, (M, N, K)))
        fp8[f"PyTorch, {size}"] = flops, others.time(Peer(peers.CUBLAS_FP8, (M, N, K)))
    found = [
        Ceiling(COPY, "B", {source: (2 * nbytes, each) for source, each in copy.items()}),
        Ceiling(READ, "B", {source: (nbytes, each) for source, each in read.items()}),
        Ceiling(BF16, "FLOP", bf16),
        Ceiling(FP8, "FLOP", fp8),
    ]
    return {each.name: each for each in found}
