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
    """One ceiling.

    Attributes:
      name: as in the cases.
      amount: bytes or operations of one call.
      unit: "B" or "FLOP".
      measured: source -> its time, or why there is none.
    """

    name: str
    amount: float
    unit: str
    measured: dict[str, Measured]

    @property
    def rate(self) -> float | None:
        """Bytes or operations a second of the fastest source; None where none was run."""
        times = [each.timing.seconds for each in self.measured.values() if each.timing is not None]
        return self.amount / min(times) if times else None

    def words(self) -> str:
        """The ceiling for people: "fp8 matmul 1,383 TFLOP/s"."""
        if self.rate is None:
            return f"{self.name} not run"
        return (
            f"{self.name} {self.rate / 1e12:,.0f} TFLOP/s" if self.unit == "FLOP" else f"{self.name} {self.rate / 1e9:,.0f} GB/s"
        )


def measure(others: peers.Peers, time: Callable[..., Timing], *, quick: bool) -> dict[str, Ceiling]:
    """Measures every ceiling, through JAX and, where it is there, through PyTorch.

    Args:
      others: PyTorch's side.
      time: `timing.time_jax` with its settings.
      quick: a thousandth of the size.
    """
    nbytes, n = (2**20, 64) if quick else (_GIB, 8192)
    words_key, matrix_key = jax.random.split(jax.random.key(0))
    words = [(jax.random.bits(words_key, (nbytes // 4,)),)]
    matrices = [(normal(key, n, n), normal(key, n, n)) for key in jax.random.split(matrix_key)]

    def through_jax(function, sets):
        try:
            return Measured(time(function, sets, calls=2 if quick else 8))
        except Exception as error:  # one ceiling less: the shares that need it are not known
            return Measured(failure=peers.reason(error))

    copy = {"XLA": through_jax(lambda x: x ^ jnp.uint32(1), words), "PyTorch": others.time(Peer(peers.COPY, (nbytes,)))}
    read = {"XLA": through_jax(jnp.max, words), "PyTorch": others.time(Peer(peers.READ, (nbytes,)))}
    bf16 = {
        "XLA": through_jax(lambda x, w: x @ w.T, matrices),
        "PyTorch": others.time(Peer(peers.CUBLAS_BF16, (n, n, n))),
    }
    fp8 = {"PyTorch": others.time(Peer(peers.CUBLAS_FP8, (n, n, n)))}
    found = [
        Ceiling(COPY, 2 * nbytes, "B", copy),
        Ceiling(READ, nbytes, "B", read),
        Ceiling(BF16, 2 * n**3, "FLOP", bf16),
        Ceiling(FP8, 2 * n**3, "FLOP", fp8),
    ]
    return {each.name: each for each in found}
