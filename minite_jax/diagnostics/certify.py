"""The exactness certificate of a matmul: which of its sums no order of additions can change.

**What is proved.** Let an output be the sum of products p_1 .. p_K, and let the unit u be the largest power of two that divides
every p_k. If

    |p_1| + ... + |p_K| <= 2^24 u

then every partial sum, in every order and for every shape of the adding tree, is a whole multiple of u of at most 2^24 u. Those
are all float32 numbers, so each addition is exact, and the result is the true sum whatever the tile, the split of K, the
use of fused multiply-adds or the machine, as long as it accumulates in float32.

**How.** A float is an odd integer times a power of two, and the product of odd integers is odd: the power of a product is the
sum of the two powers, and u is the smallest of them. So the unit comes from integer arithmetic. The sum of magnitudes is taken
in float64: while it stays below 2^53 u it is exact, and once above, rounding cannot bring it back to 2^24 u.

The condition is sufficient, not necessary: a sum that fails may still come out the same in every order that is tried
(`order_dependence` tries some). The sign of a zero is outside the claim: if every product is -0, the sum is -0 or +0 according
to what the accumulator starts from.

Outer scales of NVFP4 operands play no part: they multiply the finished sum.

**Other accumulators.** The same holds with b bits in place of 24 for an adder that keeps b bits below the leading one of its
largest term (`Accumulator`): where the magnitudes sum to at most 2^b units, no term reaches beyond what is kept. Hopper's fp8
tensor cores are such adders, as far as anybody has measured: they align the products of a step and the sum so far to the largest
exponent and drop what lies more than 13 bits below. The vendor documents none of it: that certificate is as good as the model.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels import operands
from pallas_kernels.operands import Operand

FLOAT32_SIGNIFICAND_BITS = 24


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """What adds the products.

    Attributes:
      name: for tables.
      bits: sums of magnitudes up to 2^bits units are exact in it, in any order.
    """

    name: str
    bits: int


FLOAT32 = Accumulator("float32", FLOAT32_SIGNIFICAND_BITS)
# About 14 bits are kept, the leading one of the largest term included: DeepSeek-V3, arXiv:2412.19437, 3.3.2, and docs/kernels.md.
HOPPER_FP8 = Accumulator("Hopper's fp8 tensor cores", 13)

_SMALLEST_NORMAL_EXPONENT, _LARGEST_EXPONENT = -126, 127
# The power of two that zero is a multiple of: larger than that of any sum of two, so that it never is the smallest.
_ZERO_EXPONENT = 8192
# Products that are held at once.
_BLOCK_PRODUCTS = 1 << 22
_BLOCK_COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What is known of each output of a matmul.

    Attributes:
      bits: [M, N] int32, the smallest b with sum of magnitudes <= 2^b units: the significand that an accumulator needs. 0 where
        every product is 0. Above 53 it may be one too low or too high.
      proven: [M, N] bool, whether every partial sum in any order is exact. Besides ``bits <= accumulator.bits`` it asks that
        partial sums can neither overflow nor be subnormal in float32, and that no operand is.
      accumulator: that of the proof.
    """

    bits: Int[np.ndarray, "M N"]
    proven: Bool[np.ndarray, "M N"]
    accumulator: Accumulator = FLOAT32

    @property
    def fraction_proven(self) -> float:
        """Share of the outputs that are proven; NaN if there is none."""
        return float(self.proven.mean()) if self.proven.size else float("nan")


def certify(
    x: Operand, w: Operand, group_sizes: Int[Array, "E"] | None = None, *, accumulator: Accumulator = FLOAT32
) -> Certificate:
    """The certificate of ``matmul(x, w)`` or, with group sizes, of ``grouped_matmul(x, w, group_sizes)``.

    Runs on the host, in blocks of a few megabytes beside the operands themselves; time is of order M N K.

    Args:
      x: [M, K] as the matmul gets it.
      w: [N, K], or [E, N, K] with `group_sizes`.
      group_sizes: [E] rows of each group. Rows behind the last group are no sums: they are left out, and M below is the sum.
      accumulator: what adds: `FLOAT32`, `HOPPER_FP8`, or another.

    Returns:
      `Certificate` of [M, N] outputs.

    Raises:
      ValueError: K differs, or an operand holds NaN or infinity.
    """
    x_MK, pairs = _pairs(x, w, group_sizes)
    num_rows, num_features = sum(rows.stop - rows.start for rows, _ in pairs), w.shape[-2]
    bits_MN = np.zeros((num_rows, num_features), np.int32)
    proven_MN = np.zeros((num_rows, num_features), bool)
    for rows, w_NK in pairs:
        x_exponent, w_exponent = _lowest_bit_exponent(x_MK[rows]), _lowest_bit_exponent(w_NK)
        x_normal, w_normal = _is_normal(x_MK[rows]), _is_normal(w_NK)
        for m, n in _blocks(*x_exponent.shape, num_features):
            magnitude = np.abs(x_MK[rows][m]).astype(np.float64) @ np.abs(w_NK[n]).astype(np.float64).T
            unit = np.min(x_exponent[m][:, None] + w_exponent[n][None], axis=-1).astype(np.int32)
            fraction, exponent = np.frexp(magnitude)
            needed = np.where(magnitude == 0, 0, exponent - (fraction == 0.5) - unit)
            in_range = (unit >= _SMALLEST_NORMAL_EXPONENT) & (unit <= _LARGEST_EXPONENT - FLOAT32_SIGNIFICAND_BITS)
            exact = (needed <= accumulator.bits) & (in_range | (magnitude == 0))
            here = np.ix_(np.arange(rows.start, rows.stop)[m], np.arange(num_features)[n])
            bits_MN[here] = needed
            proven_MN[here] = exact & x_normal[m][:, None] & w_normal[n][None]
    return Certificate(bits=bits_MN, proven=proven_MN, accumulator=accumulator)


def order_dependence(
    x: Operand, w: Operand, group_sizes: Int[Array, "E"] | None = None, *, orders: int = 8, seed: int = 0
) -> Bool[np.ndarray, "M N"]:
    """Which outputs really differ between the given order and some random orders of float32 additions, one after the other.

    A measurement beside the proof: a difference shows that order matters, equality among a few orders shows nothing for others.

    Args:
      x, w, group_sizes: as for `certify`.
      orders: how many random orders are tried.
      seed: of the orders.

    Returns:
      [M, N] bool, True where two orders gave different float32 numbers.

    Raises:
      ValueError: as `certify`.
    """
    x_MK, pairs = _pairs(x, w, group_sizes)
    rng = np.random.default_rng(seed)
    permutations = [rng.permutation(x_MK.shape[-1]) for _ in range(orders)]
    differs_MN = np.zeros((sum(rows.stop - rows.start for rows, _ in pairs), w.shape[-2]), bool)
    for rows, w_NK in pairs:
        for m, n in _blocks(rows.stop - rows.start, *reversed(w_NK.shape)):
            product = x_MK[rows][m][:, None] * w_NK[n][None]
            first = _sum_one_by_one(product)
            differs = [_sum_one_by_one(product[..., order]) != first for order in permutations]
            differs_MN[np.ix_(np.arange(rows.start, rows.stop)[m], np.arange(w_NK.shape[0])[n])] = np.any(differs, axis=0)
    return differs_MN


_values = jax.jit(operands.values)


def _pairs(x: Operand, w: Operand, group_sizes) -> tuple[np.ndarray, list[tuple[slice, np.ndarray]]]:
    """The rows [M, K], and each matrix [N, K] with the rows that it multiplies."""
    operands.check_contraction("certify", x, w)
    x_MK, w_values = np.asarray(_values(x)), np.asarray(_values(w))
    if not (np.isfinite(x_MK).all() and np.isfinite(w_values).all()):
        raise ValueError("certify: an operand holds NaN or infinity, so nothing can be proved; find where it comes from first")
    if group_sizes is None:
        return x_MK, [(slice(0, x_MK.shape[0]), w_values)]
    ends = np.cumsum(np.asarray(group_sizes))
    if len(ends) and ends[-1] > x_MK.shape[0]:
        raise ValueError(f"certify: group_sizes sum to {ends[-1]}, but x has {x_MK.shape[0]} rows; give x as it is multiplied")
    starts = ends - np.asarray(group_sizes)
    return x_MK, [(slice(int(a), int(b)), w_values[e]) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


def _blocks(num_rows: int, summed: int, num_features: int) -> Iterator[tuple[slice, slice]]:
    """Cuts [M, N] so that a block's products fit `_BLOCK_PRODUCTS`."""
    columns = max(1, min(_BLOCK_COLUMNS, num_features, _BLOCK_PRODUCTS // summed))
    rows = max(1, _BLOCK_PRODUCTS // (columns * summed))
    for m in range(0, num_rows, rows):
        for n in range(0, num_features, columns):
            yield slice(m, min(m + rows, num_rows)), slice(n, min(n + columns, num_features))


def _lowest_bit_exponent(x: np.ndarray) -> np.ndarray:
    """int16 e of the largest 2^e that divides a float32; `_ZERO_EXPONENT` for 0."""
    fraction, exponent = np.frexp(x)
    significand = np.abs(fraction * 2.0**FLOAT32_SIGNIFICAND_BITS).astype(np.int32)
    _, lowest = np.frexp((significand & -significand).astype(np.float32))
    return np.where(significand == 0, _ZERO_EXPONENT, exponent - FLOAT32_SIGNIFICAND_BITS + lowest - 1).astype(np.int16)


def _is_normal(x: np.ndarray) -> np.ndarray:
    """[rows] whether a row is free of subnormal numbers, which XLA for CPU takes for zero."""
    return ~((x != 0) & (np.abs(x) < 2.0**_SMALLEST_NORMAL_EXPONENT)).any(axis=-1)


def _sum_one_by_one(product: np.ndarray) -> np.ndarray:
    # `np.sum` adds in pairs; `cumsum` goes from left to right in float32.
    return np.cumsum(product, axis=-1, dtype=np.float32)[..., -1]
