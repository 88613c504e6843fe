"""The memory of programs whose memory can be counted by hand. Sizes are in arrays of N x N float32."""

import jax
import jax.numpy as jnp
import pytest

from minite_jax.diagnostics.memory import footprint, nbytes

N = 256
ARRAY = 4 * N * N
SPEC = jax.ShapeDtypeStruct((N, N), jnp.float32)


def of(function, *specs, **settings):
    return footprint(jax.jit(function, **settings).trace(*(specs or (SPEC,))))


def product_of_products(x):
    y = x @ x
    z = y @ y  # y is alive
    return z @ z  # y is not


def twice_the_same(x):
    y = jnp.sin(x) @ x
    return (y @ (jnp.sin(x) @ x)) @ x


def not_across_a_checkpoint(x):
    f = jax.checkpoint(lambda x: jnp.sin(x) @ x)
    return jax.grad(lambda x: jnp.sum(f(f(x))))(x)


def searched_before_it_is_taken(p, g):
    new = p + g
    return jnp.where(jnp.isfinite(new).all(), new, p)


def a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: (y @ x) @ x, x)


@pytest.mark.parametrize(
    ("function", "arguments", "temporaries"),
    [
        (lambda x: jnp.sum(jnp.exp(x) * 2 + 1), 1, 0),  # element-wise: fused into the sum
        (lambda x: (x @ x) + 1, 1, 1),  # a product is stored
        (product_of_products, 1, 2),
        (lambda x: jnp.exp(x) @ x, 1, 1),  # what a product reads is stored
        (lambda x: (x.reshape(-1) + 1).reshape(N, N) @ x, 1, 1),  # views take nothing
        (twice_the_same, 1, 2),  # sin(x) and y: computed once. Then y and y y
        (searched_before_it_is_taken, 2, 1),
        (a_loop, 1, 1),  # the first product of the body; the second takes the carry's place
    ],
)
def test_temporaries(function, arguments, temporaries):
    found = of(function, *[SPEC] * arguments)
    assert found.arguments == arguments * ARRAY
    assert found.temporaries == pytest.approx(temporaries * ARRAY, abs=ARRAY / 16)
    assert found.peak == found.arguments + found.results + found.temporaries
    assert sum(each.nbytes for each in found.alive) == pytest.approx(found.temporaries, abs=ARRAY / 16)
    assert len(found.profile) == len(found.moments) and found.profile.max(initial=0) == found.temporaries


def test_results_take_the_place_of_donated_arguments():
    assert of(lambda x: x + 1).results == ARRAY
    assert of(lambda x: x + 1, donate_argnums=(0,)).results == 0
    two = of(lambda x: (x + 1, x + 2), donate_argnums=(0,))
    assert two.results == ARRAY and two.arguments == ARRAY


def test_a_checkpoint_keeps_its_input_only():
    kept = of(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(jnp.sin(x @ x) @ x) @ x))(x))
    recomputed = of(not_across_a_checkpoint)
    assert not any("checkpoint" in each.scope for each in kept.alive)
    # The products of the second pass are not taken from the first one.
    assert sum(name == "dot_general" for name, _ in recomputed.moments) >= 5


def test_bytes_of_trees():
    key = jax.eval_shape(lambda: jax.random.key(0))
    tree = {"a": jnp.ones((3, 5), jnp.bfloat16), "b": jax.ShapeDtypeStruct((7,), jnp.uint8), "key": key}
    assert nbytes(tree) == 2 * 15 + 7 + 8
