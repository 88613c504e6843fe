"""The router's kernel in Triton's interpreter against the reference, and compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_SHAPES = {
    "8 experts": (20, 64, 8, 2, True),
    "12 experts, not normalised": (5, 40, 12, 3, False),
    "4 experts, all chosen": (5, 48, 4, 4, True),
}


def _interpreted():
    from pallas_kernels import gpu
    from pallas_kernels.router import reference, triton

    for name, (M, D, E, k, normalize) in _SHAPES.items():
        rng = np.random.default_rng(E)
        # Small integers: float32 holds their sums in any order, so that experts and logits are equal and many of them tie.
        x = jnp.asarray(rng.integers(-2, 3, (M, D)), jnp.float32).at[1].set(0).at[2, 3].set(jnp.nan)
        weight = jnp.asarray(rng.integers(-1, 2, (E, D)) / 8, jnp.float32)
        weights, experts = jax.jit(reference.router, static_argnames=("top_k", "normalize"))(
            x, weight, top_k=k, normalize=normalize
        )
        # The weights pass through another exponential: they are compared by tolerance here, the experts by their bits below.
        launch = triton.router_launch(M, D, E, k, normalize)
        actual, _ = gpu.interpret(launch, np.asarray(x), np.asarray(weight), M)
        np.testing.assert_allclose(actual, weights, rtol=2.0**-18)
        yield name, launch, (x, weight, M), [actual, experts]


def _compiled():
    from pallas_kernels.router import triton

    x, weight = jax.ShapeDtypeStruct((64, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((128, 2048), jnp.float32)
    yield "router", triton.router_launch(64, 2048, 128, 8, True), (x, weight, 64)


@pytest.mark.parametrize("name", _SHAPES)
def test_experts_are_the_references(child, name):
    assert child("interpret")[name] == [0, 0]


@pytest.mark.parametrize("capability", ["90", "103"])
def test_compiled_to_float32_arithmetic(child, capability):
    found = child("compile")["router"][capability]
    assert found["atomics"] == found["mma"] == 0
    assert found["multiply_adds"] > 0  # the dot, and nothing but the dot


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
