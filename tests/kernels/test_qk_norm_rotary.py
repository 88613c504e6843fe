"""Split, norm and rotation in one: the kernels in Triton's interpreter against the reference, and compiled for GPUs that are not
here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_KERNELS = ["forward", "backward"]
_EPS = 1e-6


def _interpreted():
    from pallas_kernels.qk_norm_rotary import reference, triton

    rng = np.random.default_rng(0)
    M, H, N, K = 11, 3, 1, 12  # 33 query rows: two tiles; numbers that are no powers of two
    sizes = dict(num_heads=H, num_kv_heads=N, eps=_EPS)
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, K)), jnp.float32)
    cos, sin = jnp.asarray(rng.standard_normal((2, M, K // 2)), jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float32):
        name = jnp.dtype(dtype).name
        qkv = jnp.asarray(rng.standard_normal((M, H + 2 * N, K)) * 3, dtype).at[4].set(0).at[5].multiply(1e-15)
        gradients = tuple(jnp.asarray(rng.standard_normal((M, heads, K)), dtype) for heads in (H, N, N))
        inputs = (qkv, *weights, cos, sin)
        expected = jax.jit(lambda *inputs: reference.qk_norm_rotary(*inputs, **sizes))(*inputs)
        yield f"forward-{name}", triton.forward_launch(M, H, N, K, dtype, _EPS), (*inputs, M), expected
        inputs = (*inputs, *gradients)
        expected = jax.jit(lambda *inputs: reference.qk_norm_rotary_backward(*inputs, **sizes))(*inputs)
        yield f"backward-{name}", triton.backward_launch(M, H, N, K, dtype, _EPS), (*inputs, M), expected


def _compiled():
    from pallas_kernels.qk_norm_rotary import triton

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    M, H, N, K = 64, 32, 4, 128
    weight, angles = array(K, dtype=jnp.float32), array(M, K // 2, dtype=jnp.float32)
    inputs = (array(M, H + 2 * N, K), weight, weight, angles, angles)
    yield "forward", triton.forward_launch(M, H, N, K, jnp.bfloat16, _EPS), (*inputs, M)
    gradients = (array(M, H, K), array(M, N, K), array(M, N, K))
    yield "backward", triton.backward_launch(M, H, N, K, jnp.bfloat16, _EPS), (*inputs, *gradients, M)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_bits_are_the_references(child, kernel, dtype):
    results = child("interpret")[f"{kernel}-{dtype}"]
    assert results == [0] * 3


@pytest.mark.parametrize("capability", ["90", "103"])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_compiled_without_atomics_or_contraction(child, kernel, capability):
    found = child("compile")[kernel][capability]
    assert found["atomics"] == found["multiply_adds"] == 0
    assert found["wide_loads"] > 0  # 16 bytes a lane


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
