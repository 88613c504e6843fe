"""The exactness certificate against whole-number arithmetic and against sums in many orders."""

import fractions
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.diagnostics.certify import FLOAT32, HOPPER_FP8, certify, order_dependence
from pallas_kernels import nvfp4
from pallas_kernels.matmul import matmul

_quantize = jax.jit(nvfp4.quantize, static_argnums=1)
_matmul = jax.jit(lambda x, w: matmul(x, w, out_dtype=jnp.float32))
ROWS, FEATURES, SUMMED = 16, 16, 256
RULES = {
    "fp8_exact": (nvfp4.ScaleRule.fp8_exact("row"), nvfp4.ScaleRule.fp8_exact("matrix")),
    "te": (nvfp4.ScaleRule.te("matrix"), nvfp4.ScaleRule.te("matrix")),
}


def _data(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, SUMMED)).astype(np.float32)
    if kind == "outlier channels":
        x[:, 3::100] *= 60
    if kind == "spread":  # neighbouring blocks whose scales are up to 2^14 apart
        x *= np.repeat(2.0 ** rng.integers(-7, 8, (ROWS, SUMMED // 16)), 16, axis=1).astype(np.float32)
    return x, rng.standard_normal((FEATURES, SUMMED)).astype(np.float32)


def _quantized(kind: str, rule: str, seed: int = 0):
    x, w = _data(kind, seed)
    return _quantize(x, RULES[rule][0]), _quantize(w, RULES[rule][1])


def _products(x, w) -> np.ndarray:
    """[M, N, K] float64, exact: each factor has at most 24 bits."""
    values = lambda a: np.asarray(nvfp4.block_values(a) if isinstance(a, nvfp4.Nvfp4Array) else a, np.float64)  # noqa: E731
    return values(x)[:, None] * values(w)[None]


def _bits_by_fractions(products) -> int:
    """The definition, in Python's rational numbers."""
    exact = [fractions.Fraction(p) for p in products.tolist() if p]
    if not exact:
        return 0
    unit = fractions.Fraction(1, 1 << 400)
    while all((p / (2 * unit)).denominator == 1 for p in exact):
        unit *= 2
    return math.ceil(math.log2(sum(map(abs, exact)) / unit))


def test_bits_are_those_of_the_definition():
    rng = np.random.default_rng(1)
    x = (rng.integers(-9, 10, (5, 16)) * 2.0 ** rng.integers(-6, 7, (5, 16))).astype(np.float32)
    w = jnp.asarray(rng.standard_normal((4, 16)), jnp.bfloat16)
    x[2] = 0
    expected = [[_bits_by_fractions(row) for row in rows] for rows in _products(x, w.astype(jnp.float32))]
    certificate = certify(jnp.asarray(x), w)
    np.testing.assert_array_equal(certificate.bits, expected)
    np.testing.assert_array_equal(certificate.proven, np.array(expected) <= 24)
    assert certificate.proven[2].all()


@pytest.mark.parametrize("kind", ["plain", "outlier channels", "spread"])
@pytest.mark.parametrize("rule", RULES)
def test_a_proven_sum_is_the_true_sum_in_every_order(kind, rule):
    x, w = _quantized(kind, rule)
    certificate = certify(x, w)
    products = _products(x, w)
    whole = products * 2.0**20  # every product is a multiple of 2^-20
    assert (whole == np.rint(whole)).all() and np.abs(whole).sum(-1).max() < 2**53
    true = whole.astype(np.int64).sum(-1) * 2.0**-20

    rng = np.random.default_rng(2)
    different = np.zeros(true.shape, bool)
    for trial in range(20):
        # Random orders, and the one that provokes most: the largest first.
        order = np.argsort(-np.abs(products), axis=-1) if trial == 0 else np.broadcast_to(rng.permutation(SUMMED), products.shape)
        shuffled = np.take_along_axis(products, order, axis=-1).astype(np.float32)
        one_by_one = np.cumsum(shuffled, axis=-1, dtype=np.float32)[..., -1]
        tree = shuffled
        while tree.shape[-1] > 1:
            tree = tree[..., ::2] + tree[..., 1::2]
        different |= (one_by_one != true) | (tree[..., 0] != true)
    assert not (different & certificate.proven).any()
    # That the cases are not all easy ones is part of the test.
    assert (certificate.fraction_proven == 1.0) == (kind != "spread")
    assert different.any() == (kind == "spread" and rule == "te")

    unscaled = [operand.replace(outer_scale=jnp.ones_like(operand.outer_scale)) for operand in (x, w)]
    ours = np.asarray(_matmul(*unscaled))
    np.testing.assert_array_equal(ours[certificate.proven], true[certificate.proven].astype(np.float32))


def test_one_unit_beyond_the_limit_really_differs():
    # 2^24 in units of 1 is reached and allowed; one product more, and the order decides.
    allowed = jnp.asarray([[2.0**24 - 2, 1, 1, 0]], jnp.float32)
    beyond = jnp.asarray([[2.0**24, 1, 1, 0]], jnp.float32)
    ones = jnp.ones((1, 4), jnp.float32)
    assert certify(allowed, ones).bits == 24 and certify(allowed, ones).proven.all()
    assert not order_dependence(allowed, ones).any()
    assert certify(beyond, ones).bits == 25 and not certify(beyond, ones).proven.any()
    assert order_dependence(beyond, ones).all()


def _aligned_sum(products: np.ndarray, step: int = 32, kept: int = 13) -> np.ndarray:
    """[M, N, K] summed as the model of Hopper's fp8 units has it: `step` products and the sum so far are cut off `kept` bits
    below the leading bit of the largest, then added."""
    total = np.zeros(products.shape[:-1])
    for k in range(0, products.shape[-1], step):
        terms = np.concatenate([products[..., k : k + step], total[..., None]], axis=-1)
        _, exponent = np.frexp(np.abs(terms).max(axis=-1, keepdims=True))
        last = np.exp2(exponent - 1.0 - kept)
        total = (np.trunc(terms / last) * last).sum(axis=-1)
    return total


def test_a_short_accumulator():
    """What is proven for it comes out exact in any order, one by one or 32 at a time; and it is shorter than float32."""
    rng = np.random.default_rng(3)
    x, w = _quantized("plain", "fp8_exact")
    few = [nvfp4.Nvfp4Array(*(leaf[..., :n] for leaf, n in ((a.codes, 8), (a.block_scale, 1))), a.outer_scale) for a in (x, w)]
    for operands, least in ((few, 0.5), ((x, w), 0.0)):
        products = _products(*operands)
        true, certificate = products.sum(axis=-1), certify(*operands, accumulator=HOPPER_FP8)
        different = np.zeros(true.shape, bool)
        for step in (1, 16, 32):
            order = rng.permutation(products.shape[-1])
            different |= _aligned_sum(products[..., order], step) != true
        assert not (different & certificate.proven).any()
        assert certificate.fraction_proven >= least and certificate.accumulator is HOPPER_FP8
        assert certify(*operands, accumulator=FLOAT32).proven.all()
    assert different.any() and certificate.fraction_proven < 1  # 256 products are too many for it


def test_outer_scales_play_no_part():
    x, w = _quantized("outlier channels", "te")
    scaled = x.replace(outer_scale=x.outer_scale * 3.7)
    np.testing.assert_array_equal(certify(scaled, w).bits, certify(x, w).bits)


def test_sums_at_the_ends_of_the_range_are_not_claimed():
    ones = jnp.ones((1, 2), jnp.float32)
    tiny, huge = jnp.full((1, 2), 2.0**-100), jnp.full((1, 2), 2.0**126)
    assert certify(tiny, ones).proven.all()
    assert not certify(tiny, ones * 2.0**-30).proven.any()  # products below the smallest normal number
    assert not certify(huge, ones * 2).proven.any()  # 2^127 + 2^127 overflows
    subnormal = jnp.asarray(np.array([[2.0**-140, 1]], np.float32))
    assert not certify(subnormal, jnp.asarray([[2.0**30, 2.0**-110]], jnp.float32)).proven.any()


def test_grouped_is_dense_group_by_group(monkeypatch):
    monkeypatch.setattr(sys.modules[certify.__module__], "_BLOCK_PRODUCTS", 1 << 12)  # several blocks, each way
    x, _ = _quantized("spread", "fp8_exact")
    w = _quantize(np.stack([_data("plain", seed)[1] for seed in range(4)]), RULES["fp8_exact"][1])
    sizes = jnp.asarray([5, 0, 8, 1], jnp.int32)  # two rows are left over
    grouped = certify(x, w, sizes)
    differs = order_dependence(x, w, sizes)
    assert grouped.bits.shape == grouped.proven.shape == differs.shape == (14, FEATURES)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 13)), (3, slice(13, 14))):
        dense = certify(x, w[expert])
        np.testing.assert_array_equal(grouped.bits[rows], dense.bits[rows])
        np.testing.assert_array_equal(grouped.proven[rows], dense.proven[rows])
    assert 0 < grouped.fraction_proven < 1


def test_operands_that_nothing_can_be_said_of():
    x = jnp.ones((2, 16), jnp.float32)
    with pytest.raises(ValueError, match="NaN or infinity"):
        certify(x.at[0, 3].set(jnp.nan), x)
    with pytest.raises(ValueError, match="last axis"):
        certify(x, x[:, :8])
    assert math.isnan(certify(x, x[None], jnp.zeros((1,), jnp.int32)).fraction_proven)


def test_rows_that_are_not_there_are_refused():
    x, w = np.ones((6, 16), np.float32), np.ones((3, 8, 16), np.float32)
    with pytest.raises(ValueError, match="group_sizes sum to 12, but x has 6 rows"):
        certify(jnp.asarray(x), jnp.asarray(w), jnp.asarray([4, 4, 4]))
