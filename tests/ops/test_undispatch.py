import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.undispatch import undispatch


def _inputs(dtype):
    rng = np.random.default_rng(12)
    return jnp.asarray(rng.standard_normal((21, 40)), dtype), jnp.asarray(rng.permutation(21).reshape(7, 3), jnp.int32)


@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float32", "bfloat16"), ("float32", "float32")])
def test_a_tokens_rows_are_added_in_rank_order_and_rounded_once(dtype, out_dtype):
    rows, slot = _inputs(dtype)
    gathered = np.asarray(rows, np.float32)[np.asarray(slot)]
    expected = ((gathered[:, 0] + gathered[:, 1]) + gathered[:, 2]).astype(jnp.dtype(out_dtype or dtype))
    result = jax.jit(undispatch, static_argnames="out_dtype")(rows, slot, out_dtype=out_dtype and jnp.dtype(out_dtype))
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_it_is_the_transpose_of_copying_tokens_to_their_experts():
    rows, slot = _inputs("float32")
    token = np.argsort(np.asarray(slot).reshape(-1)) // 3
    transposed = jax.linear_transpose(lambda x: x[token], jax.ShapeDtypeStruct((7, 40), jnp.float32))(rows)[0]
    np.testing.assert_allclose(undispatch(rows, slot), transposed, rtol=1e-5, atol=1e-6)  # another order of three numbers


def test_missing_rows_are_refused():
    rows, slot = _inputs("float32")
    with pytest.raises(ValueError, match=r"undispatch: rows \(20, 40\) must be one for each of the 21 places in slot \(7, 3\)"):
        undispatch(rows[:20], slot)
