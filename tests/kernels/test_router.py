"""The router's kernel in Triton's interpreter against the reference, and compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_SHAPES = {
    "8 experts": (20, 64, 8, 2, True),
    "12 experts, not normalised": (5, 40, 12, 3, False),
    "4 experts, all chosen": (5, 48, 4, 4, True),
    "1 expert": (3, 16, 1, 1, False),
    "66 experts, 20 chosen": (3, 70, 66, 20, True),  # two tiles of experts and of the width, neither full; a loop
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
        for kind in (jnp.float32, jnp.bfloat16):
            (logits,) = gpu.interpret(triton.logits_launch(M, D, E, kind), np.asarray(x.astype(kind)), np.asarray(weight), M)
            launch = triton.choice_launch(len(logits), M, E, k, normalize)
            actual, _ = gpu.interpret(launch, logits, M)
            np.testing.assert_allclose(actual, weights, rtol=2.0**-18)
            yield f"{name}, {kind.__name__}", launch, (logits, M), [actual, experts]

    # Tokens that pick one number of each expert: the logit is the weight, to the last of its 24 bits.
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-60, 60, (16, 16))).astype(np.float32)
    weight[3, 4] = np.finfo(np.float32).max  # to round it to bfloat16 would make it infinite
    x = np.eye(16, dtype=jnp.bfloat16)
    launch = triton.logits_launch(16, 16, 16, x.dtype)
    planes = np.zeros(launch.out_shape[0].shape, np.float32)
    planes[0] = weight.T  # 16 products are all in the first part of D
    yield "three parts", launch, (x, weight, 16), [planes]

    # Few tokens: parts of D by programs of their own, and the choice adds. Many: one program adds. The same bits.
    M, D, E = 20, 700, 12
    x = rng.standard_normal((M, D)).astype(jnp.bfloat16)
    weight = rng.standard_normal((E, D)).astype(np.float32)
    (planes,) = gpu.interpret(triton.logits_launch(M, D, E, x.dtype), x, weight, M)
    assert len(planes) == 4 and all(np.abs(plane).max() > 0 for plane in planes[:3])
    triton._MANY_TOKENS, triton._TILE_TOKENS = 0, 16  # numpy's products of other shapes have other bits
    yield "few and many", triton.logits_launch(M, D, E, x.dtype), (x, weight, M), [sum(planes[1:], start=planes[0])[None]]


def _compiled():
    from pallas_kernels.router import triton

    array = jax.ShapeDtypeStruct
    for kind in (jnp.bfloat16, jnp.float32):
        inputs = array((64, 2048), kind), array((128, 2048), jnp.float32), 64
        yield f"logits, {kind.__name__}", triton.logits_launch(64, 2048, 128, kind), inputs
    for top_k in (8, 128):  # 128: what a trace of all probabilities asks for
        yield f"choice, {top_k}", triton.choice_launch(4, 64, 128, top_k, True), (array((4, 64, 128), jnp.float32), 64)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _SHAPES)
def test_experts_are_the_references(child, name, kind):
    assert child("interpret")[f"{name}, {kind}"] == [0, 0]


def test_a_weight_has_all_its_bits(child):
    assert child("interpret")["three parts"] == [0]


def test_few_and_many_tokens_have_the_same_bits(child):
    assert child("interpret")["few and many"] == [0]


@pytest.mark.parametrize("capability", ["90", "103"])
def test_compiled_to_three_products_or_to_float32_arithmetic(child, capability):
    found = {name: each[capability] for name, each in child("compile").items()}
    assert not any(each["atomics"] for each in found.values())
    assert found["logits, bfloat16"]["mma"] > 0 and found["logits, bfloat16"]["mma"] % 3 == 0
    assert found["logits, bfloat16"]["multiply_adds"] == 0
    assert found["logits, float32"]["mma"] == 0 and found["logits, float32"]["multiply_adds"] > 0  # the dot


if __name__ == "__main__":
    import child

    child.main(_interpreted, _compiled)
