"""The random Hadamard transform against its matrix."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4


def matrix(signs):
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return np.diag(np.float64(signs)) @ h / 4


@pytest.mark.parametrize("signs", [None, tuple([1] * 8 + [-1] * 8)])
def test_equals_the_matrix_and_its_inverse(signs):
    # Small integers: sums, and their quarters, are exact.
    x = np.random.default_rng(0).integers(-9, 9, (3, 48)).astype(np.float32)
    expected = (x.reshape(3, 3, 16) @ matrix(signs or nvfp4.HADAMARD_SIGNS)).reshape(3, 48)
    y = nvfp4.random_hadamard(jnp.asarray(x), signs)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), expected)
    np.testing.assert_array_equal(np.asarray(nvfp4.inverse_random_hadamard(y, signs), np.float32), x)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"got \(2, 24\)"):
        nvfp4.random_hadamard(jnp.zeros((2, 24)))
    with pytest.raises(ValueError, match="16 numbers"):
        nvfp4.random_hadamard(jnp.zeros((2, 16)), (1, -1))
