"""RMS norm, SwiGLU's gate and rotary embedding: the kernels in Triton's interpreter against the reference, and compiled for GPUs
that are not here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_KERNELS = [
    "rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward", "silu_mul", "silu_mul_backward", "rotary",
]  # fmt: skip
_CASES = [f"{kernel}-{dtype}" for kernel in _KERNELS for dtype in ("bfloat16", "float32")]
_EPS = 1e-6


def _interpreted():
    from pallas_kernels.rms_norm import reference as norm_reference
    from pallas_kernels.rms_norm import triton as norm
    from pallas_kernels.rotary import reference as rotary_reference
    from pallas_kernels.rotary import triton as rotary
    from pallas_kernels.silu_mul import reference as silu_reference
    from pallas_kernels.silu_mul import triton as silu

    rng = np.random.default_rng(0)
    M, D, F = 35, 24, 80  # two tiles of rows in the norm's backward, two programs of the gate's; widths that are no powers of two
    H, K = 3, 12
    weight = jnp.asarray(rng.uniform(0.5, 2, D), jnp.float32)
    cos, sin = jnp.asarray(rng.standard_normal((2, 5, K // 2)), jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float32):
        name = jnp.dtype(dtype).name
        x, g = (jnp.asarray(rng.standard_normal((M, D)) * 3, dtype) for _ in range(2))
        x = x.at[4].set(0).at[5].multiply(1e-15)

        def case(kernel, launch, op, *inputs, name=name, size=(), **options):
            expected = jax.jit(lambda *inputs: op(*inputs, **options))(*inputs)
            return f"{kernel}-{name}", launch, (*inputs, *size), jax.tree.leaves(expected)

        launch = norm.rms_norm_launch(M, D, dtype, _EPS)
        yield case("rms_norm", launch, norm_reference.rms_norm, x, weight, size=(M,), eps=_EPS)
        launch = norm.rms_norm_backward_launch(M, D, dtype, _EPS)
        yield case("rms_norm_backward", launch, norm_reference.rms_norm_backward, x, weight, g, size=(M,), eps=_EPS)
        launch = norm.rms_norm_launch(M, D, dtype, _EPS, add=True)
        yield case("add_rms_norm", launch, norm_reference.add_rms_norm, x, g, weight, size=(M,), eps=_EPS)
        launch = norm.rms_norm_backward_launch(M, D, dtype, _EPS, add=True)
        inputs = (x, weight, g, jnp.flip(x))
        yield case("add_rms_norm_backward", launch, norm_reference.rms_norm_backward, *inputs, size=(M,), eps=_EPS)

        gate_up = jnp.asarray(rng.standard_normal((M, 2 * F)) * 9, dtype)
        gate_up = gate_up.at[6, :6].set(jnp.asarray([-200.0, 200, -90, -86, 0, -1e30], dtype))
        yield case("silu_mul", silu.silu_mul_launch(M, F, dtype), silu_reference.silu_mul, gate_up, size=(M,))
        launch = silu.silu_mul_backward_launch(M, F, dtype)
        yield case("silu_mul_backward", launch, silu_reference.silu_mul_backward, gate_up, jnp.flip(gate_up[:, F:]), size=(M,))

        heads = jnp.asarray(rng.standard_normal((5, H, K)), dtype)
        yield case("rotary", rotary.rotary_launch(5, H, K, dtype), rotary_reference.rotary, heads, cos, sin)


def _compiled():
    from pallas_kernels.rms_norm import triton as norm
    from pallas_kernels.rotary import triton as rotary
    from pallas_kernels.silu_mul import triton as silu

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    M, D, F = 64, 2048, 768
    x, weight, gate_up = array(M, D), array(D, dtype=jnp.float32), array(M, 2 * F)
    angles = array(M, 64, dtype=jnp.float32)
    yield "rms_norm", norm.rms_norm_launch(M, D, jnp.bfloat16, _EPS), (x, weight, M)
    yield "rms_norm_backward", norm.rms_norm_backward_launch(M, D, jnp.bfloat16, _EPS), (x, weight, x, M)
    yield "add_rms_norm", norm.rms_norm_launch(M, D, jnp.bfloat16, _EPS, add=True), (x, x, weight, M)
    yield "add_rms_norm_backward", norm.rms_norm_backward_launch(M, D, jnp.bfloat16, _EPS, add=True), (x, weight, x, x, M)
    yield "silu_mul", silu.silu_mul_launch(M, F, jnp.bfloat16), (gate_up, M)
    yield "silu_mul_backward", silu.silu_mul_backward_launch(M, F, jnp.bfloat16), (gate_up, array(M, F), M)
    yield "rotary", rotary.rotary_launch(M, 32, 128, jnp.bfloat16), (array(M, 32, 128), angles, angles)


@pytest.mark.parametrize("case", _CASES)
def test_bits_are_the_references(child, case):
    results = child("interpret")[case]
    assert results == [0] * len(results)


@pytest.mark.parametrize("capability", ["90", "103"])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_compiled_without_atomics_or_contraction(child, kernel, capability):
    found = child("compile")[kernel][capability]
    assert found["atomics"] == found["multiply_adds"] == 0
    assert found["wide_loads"] > 0  # 16 bytes a lane


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
