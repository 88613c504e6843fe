"""Grouped matmul: empty groups, one hot group, rows behind the last group, and the bits of the dense matmul."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.model.moe import make_dispatch
from minite_jax.precision import MatmulFormat, expert_linear
from pallas_kernels import nvfp4
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dgrad, grouped_matmul_wgrad
from pallas_kernels.matmul import matmul

_ROW = nvfp4.ScaleRule.fp8_exact("row")
_MATRIX = nvfp4.ScaleRule.fp8_exact("matrix")
_grouped = jax.jit(grouped_matmul, static_argnames="out_dtype")
_dgrad = jax.jit(grouped_matmul_dgrad)
_wgrad = jax.jit(grouped_matmul_wgrad)

# Of 8 rows and 4 groups: full, then with empty groups, trailing rows, one hot group at either end, nothing at all.
_SIZES = ([2, 2, 2, 2], [3, 0, 2, 0], [0, 0, 0, 8], [8, 0, 0, 0], [0, 0, 0, 0], [0, 5, 0, 0])


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _sizes(*sizes):
    return np.array(sizes, np.int32)


@pytest.mark.parametrize("sizes, rows", [([3, 0, 2, 0], [1, 1, 1, 3, 3, 0, 0, 0]), ([0, 0, 0, 8], [4] * 8),
                                         ([8, 0, 0, 0], [1] * 8), ([0, 0, 0, 0], [0] * 8)])  # fmt: skip
def test_multiples_of_the_identity(sizes, rows):
    w = np.stack([(i + 1) * np.eye(16, dtype=np.float32) for i in range(4)])
    result = _grouped(jnp.ones((8, 16), jnp.bfloat16), w.astype(jnp.bfloat16), _sizes(*sizes))
    np.testing.assert_array_equal(np.asarray(result, np.float32), np.repeat(np.float32(rows)[:, None], 16, axis=1))


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "nvfp4"])
def test_exact_on_the_lattice_forward_and_backward(lattice, lattice_nvfp4, quantized):
    x, w = lattice(1, 8, 32), lattice(2, 4 * 24, 32).reshape(4, 24, 32)
    g = np.random.default_rng(3).integers(-1, 2, (8, 24)).astype(np.float32)
    operand_x, operand_w = (lattice_nvfp4(x, (8,)), lattice_nvfp4(w, (4,))) if quantized else (x, w)
    for sizes in _SIZES:
        group = np.repeat(np.arange(4), sizes)
        y, dx, dw = np.zeros((8, 24)), np.zeros((8, 32)), np.zeros((4, 24, 32))
        for row, e in enumerate(group):
            y[row], dx[row] = w[e] @ x[row], g[row] @ w[e]
            dw[e] += np.outer(g[row], x[row])
        np.testing.assert_array_equal(_grouped(operand_x, operand_w, _sizes(*sizes), out_dtype=jnp.float32), y)
        np.testing.assert_array_equal(_dgrad(g, operand_w, _sizes(*sizes)), dx)
        np.testing.assert_array_equal(_wgrad(operand_x, g, _sizes(*sizes)), dw)


def test_rows_behind_the_last_group_are_not_read(assert_same_bits):
    x, w, g = _normal(1, 8, 32), _normal(2, 4, 24, 32), _normal(3, 8, 24)
    sizes = _sizes(3, 0, 2, 0)
    clean = _grouped(x, w, sizes), _dgrad(g, w, sizes), _wgrad(x, g, sizes)
    x[5:], g[5:], w[[1, 3]] = np.nan, np.nan, np.nan  # nor are the matrices of empty groups
    y, dx, dw = poisoned = _grouped(x, w, sizes), _dgrad(g, w, sizes), _wgrad(x, g, sizes)
    assert_same_bits(poisoned, clean)
    assert not np.asarray(y, np.float32)[5:].any() and not np.asarray(dx)[5:].any()
    assert not np.asarray(dw)[[1, 3]].any() and np.asarray(dw)[[0, 2]].any()


def test_bits_are_those_of_the_dense_matmul(assert_same_bits, random_nvfp4):
    _check_against_dense(assert_same_bits, _normal(4, 130, 96), _normal(5, 3, 40, 96))
    _check_against_dense(assert_same_bits, random_nvfp4(4, (130, 96), (130,))[0], random_nvfp4(5, (3, 40, 96), (3,))[0])


def _check_against_dense(assert_same_bits, x, w):
    multiply = jax.jit(matmul)
    dense = [np.asarray(multiply(x, jax.tree.map(lambda leaf, e=e: leaf[e], w))) for e in range(3)]
    for sizes in ([130, 0, 0], [0, 0, 130], [1, 33, 96], [64, 2, 64], [31, 1, 0]):
        expected = np.zeros_like(dense[0])
        start = 0
        for e, size in enumerate(sizes):
            expected[start : start + size] = dense[e][start : start + size]
            start += size
        assert_same_bits(_grouped(x, w, _sizes(*sizes)), expected)


def test_bits_in_a_larger_program_with_sizes_known_when_it_is_compiled(assert_same_bits):
    # One tile, and the compiler can know it: a loop that it would like to inline.
    x, w = _normal(6, 7, 96), _normal(7, 2, 40, 96)
    expected = _grouped(x, w, _sizes(7, 0), out_dtype=jnp.float32)

    @jax.jit
    def program(x, w):
        y = grouped_matmul(jnp.where(x == x, x, 0.0) * 2.0 * 0.5, w, jnp.asarray(_sizes(7, 0)), out_dtype=jnp.float32)
        return y, jnp.sum(jnp.tanh(y + 1.0))

    assert_same_bits(program(x, w)[0], expected)


def test_rows(check_rows):
    """A token's bits depend neither on the tokens that share its expert nor on those of other experts.

    The derivative belongs to `expert_linear`.
    """
    w = jnp.asarray(_normal(8, 3, 40, 96))
    rng = np.random.default_rng(9)

    def of_sorted(rows):
        x, expert = rows
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.sum(expert[:, None] == jnp.arange(3)[None, :], axis=0, dtype=jnp.int32)
        return grouped_matmul(x[order], w, sizes, out_dtype=jnp.float32)[jnp.argsort(order)]

    check_rows(of_sorted, (_normal(10, 130, 96), rng.integers(0, 3, 130).astype(np.int32)), differentiable=False)


def test_gradients_against_autodiff():
    x, w, g = _normal(11, 40, 32), _normal(12, 3, 24, 32), _normal(13, 40, 24)
    sizes = np.array([33, 0, 5])
    group = np.repeat(np.arange(3), sizes)

    def plain(x, w):
        return jnp.einsum("mk,mnk->mn", x[:38], w[group])

    dx, dw = jax.jit(lambda x, w, g: jax.vjp(plain, x, w)[1](g))(x, w, g[:38])
    # Float32 sums of at most 38 terms of size 1.
    np.testing.assert_allclose(_dgrad(g, w, _sizes(*sizes)), dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(_wgrad(x, g, _sizes(*sizes)), dw, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must agree in their last axis"):
        grouped_matmul(jnp.ones((2, 16)), jnp.ones((1, 3, 32)), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=r"group_sizes \(2,\) must have one entry for each of w \(1, 3, 16\)"):
        grouped_matmul(jnp.ones((2, 16)), jnp.ones((1, 3, 16)), jnp.ones(2, jnp.int32))


@pytest.mark.parametrize("gather", [True, False], ids=["gate_up", "down"])
def test_expert_linear_is_exact_on_the_lattice(lattice, lattice_nvfp4, gather):
    experts = np.array([[0, 2], [2, 4], [4, 0], [2, 0], [0, 4]])  # two of five experts get no token
    dispatch = make_dispatch(jnp.asarray(experts), 5)
    assignments = experts.reshape(-1)[np.asarray(dispatch.order)]
    np.testing.assert_array_equal(assignments, np.sort(experts.reshape(-1)))
    np.testing.assert_array_equal(dispatch.group_sizes, [4, 0, 3, 0, 3])
    token = np.asarray(dispatch.order) // 2
    w = lattice(1, 5 * 24, 32).reshape(5, 24, 32)
    x = lattice(2, 5 if gather else 10, 32)
    g = np.random.default_rng(3).integers(-1, 2, (10, 24)).astype(np.float32)
    format = MatmulFormat(_ROW, _MATRIX)

    @jax.jit
    def run(x, stored, master, g):
        of = lambda x, master: expert_linear(format, x, stored, master, dispatch, gather=gather)  # noqa: E731
        y, pullback = jax.vjp(of, x, master)
        return y, *pullback(g)

    y, dx, dw = run(x, lattice_nvfp4(w, (5,)), np.full_like(w, np.nan), g)
    rows = token if gather else np.arange(10)
    expected_dx, expected_dw = np.zeros_like(x), np.zeros_like(w)
    for i, (row, e) in enumerate(zip(rows, assignments, strict=True)):
        np.testing.assert_array_equal(y[i], w[e] @ x[row])
        expected_dx[row] += g[i] @ w[e]
        expected_dw[e] += np.outer(g[i], x[row])
    np.testing.assert_array_equal(dx, expected_dx)
    np.testing.assert_array_equal(dw, expected_dw)


def test_forty_runs_give_one_result():
    x, w, g = _normal(11, 40, 32), _normal(12, 3, 24, 32), _normal(13, 40, 24)
    sizes = _sizes(33, 0, 5)
    run = lambda: (_grouped(x, w, sizes), _dgrad(g, w, sizes), _wgrad(x, g, sizes))  # noqa: E731
    assert len({b"".join(np.asarray(a).tobytes() for a in run()) for _ in range(40)}) == 1
