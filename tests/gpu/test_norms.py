"""RMS norm (with the add before it), SwiGLU's gate and rotary embedding on a GPU: the kernels' bits are the reference's, for
every number of rows, every time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_backward, rms_norm
from pallas_kernels.rotary import rotary
from pallas_kernels.silu_mul import silu_mul

pytestmark = pytest.mark.gpu

_ROWS = 4096
_COUNTS = (1, 2, 7, 16, 17, 64, 127, 129)


def _norm(width):
    weight = jnp.asarray(np.random.default_rng(width).uniform(0.5, 2, width), jnp.float32)
    return lambda x, implementation: rms_norm(x, weight, eps=1e-6, implementation=implementation)


def _add_norm(width):
    """Both results side by side; a row's y is the row itself, turned round."""
    weight = jnp.asarray(np.random.default_rng(width).uniform(0.5, 2, width), jnp.float32)

    def run(x, implementation):
        return jnp.concatenate(add_rms_norm(x, jnp.flip(x, 1), weight, eps=1e-6, implementation=implementation), axis=1)

    return run


def _rotary(heads, head_dim):
    angle = np.random.default_rng(heads).uniform(0, 6, (_ROWS, head_dim // 2))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    def run(x, implementation):
        turned = rotary(x.reshape(-1, heads, head_dim), cos[: len(x)], sin[: len(x)], implementation=implementation)
        return turned.reshape(x.shape)

    return run


# Name: operation on rows, width of a row, whether a row does not know its place.
_OPS = {
    "rms_norm 2048": (_norm(2048), 2048, True),
    "rms_norm 128": (_norm(128), 128, True),
    "rms_norm 80": (_norm(80), 80, True),
    "add_rms_norm 2048": (_add_norm(2048), 2048, True),
    "add_rms_norm 80": (_add_norm(80), 80, True),
    "silu_mul 768": (lambda x, implementation: silu_mul(x, implementation=implementation), 1536, True),
    "silu_mul 72": (lambda x, implementation: silu_mul(x, implementation=implementation), 144, True),
    "rotary 32x128": (_rotary(32, 128), 4096, False),
    "rotary 3x24": (_rotary(3, 24), 72, False),
}


def _inputs(width, dtype):
    x = np.random.default_rng(0).standard_normal((_ROWS, width)) * 4
    return jnp.asarray(x * 10.0 ** np.random.default_rng(1).integers(-2, 3, (_ROWS, 1)), dtype)


def _both_ways(op, implementation):
    @jax.jit
    def run(x):
        value, pullback = jax.vjp(lambda x: op(x, implementation), x)
        return value, *pullback(jnp.flip(value, 0))

    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", _OPS)
def test_bits_are_the_references_forward_and_backward(name, dtype):
    op, width, _ = _OPS[name]
    x = _inputs(width, dtype)
    for kernel, reference in zip(_both_ways(op, "triton")(x), _both_ways(op, "reference")(x), strict=True):
        np.testing.assert_array_equal(np.asarray(kernel, np.float32), np.asarray(reference, np.float32))


@pytest.mark.parametrize("width", [2048, 128, 80])
def test_gradient_of_the_norms_weight_has_the_references_bits(width):
    x = _inputs(width, "bfloat16")
    weight = jnp.linspace(0.5, 2, width)

    def gradient(implementation, num_rows):
        @jax.jit
        def run(rows, weight):  # arguments: constants would be folded, with roundings of their own
            op = lambda weight: rms_norm(rows, weight, eps=1e-6, implementation=implementation)  # noqa: E731
            return jax.vjp(op, weight)[1](rows)[0]

        return np.asarray(run(x[:num_rows], weight))

    for num_rows in (1, 33, _ROWS):
        np.testing.assert_array_equal(gradient("triton", num_rows), gradient("reference", num_rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [4096, 2048, 80])
def test_gradient_past_and_through_the_norm_has_the_references_bits(width, dtype):
    total = _inputs(width, dtype)
    g_sum, g_normed = jnp.flip(total, 0), jnp.flip(total, 1)
    weight = jnp.linspace(0.5, 2, width)

    def gradients(implementation, num_rows):
        run = jax.jit(lambda *inputs: add_rms_norm_backward(*inputs, eps=1e-6, implementation=implementation))
        return run(total[:num_rows], weight, g_sum[:num_rows], g_normed[:num_rows])

    for num_rows in (1, 33, _ROWS):
        for kernel, reference in zip(gradients("triton", num_rows), gradients("reference", num_rows), strict=True):
            np.testing.assert_array_equal(np.asarray(kernel, np.float32), np.asarray(reference, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_add_and_norm_are_an_add_and_the_norms_kernel(dtype):
    x = _inputs(2048, dtype)
    y, weight = jnp.flip(x, 0), jnp.linspace(0.5, 2, 2048)
    total, normed = jax.jit(lambda x, y, w: add_rms_norm(x, y, w, eps=1e-6, implementation="triton"))(x, y, weight)
    assert np.asarray(total).tobytes() == (np.asarray(x, np.float32) + np.asarray(y, np.float32)).astype(x.dtype).tobytes()
    alone = rms_norm(total, weight, eps=1e-6, implementation="triton")
    assert np.asarray(normed).tobytes() == np.asarray(alone).tobytes()


@pytest.mark.parametrize("name", [name for name, (_, _, anywhere) in _OPS.items() if anywhere])
def test_rows_alone_have_the_bits_they_have_in_a_batch(name):
    op, width, _ = _OPS[name]
    run = jax.jit(lambda x: op(x, "triton"))
    x = _inputs(width, "bfloat16")
    whole = np.asarray(run(x))
    for count in _COUNTS:
        for first in (0, _ROWS - count):
            part = slice(first, first + count)
            assert np.asarray(run(x[part])).tobytes() == whole[part].tobytes(), (count, first)


@pytest.mark.parametrize("name", ["rms_norm 2048", "add_rms_norm 2048", "silu_mul 768", "rotary 32x128"])
def test_forty_runs_give_one_result(name):
    op, width, _ = _OPS[name]
    run, x = _both_ways(op, "triton"), _inputs(width, "bfloat16")
    first = [np.asarray(y).tobytes() for y in run(x)]
    for _ in range(39):
        assert [np.asarray(y).tobytes() for y in run(x)] == first
