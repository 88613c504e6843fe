"""Learning rates by step, clipping, and AdamW's first steps, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minite_jax.learner import OptimizerConfig, init_state, make_optimizer, schedule


def test_constant():
    rate = schedule(OptimizerConfig(learning_rate=3e-3))
    assert float(rate(0)) == float(rate(1000)) == pytest.approx(3e-3)


def test_warm_up_then_constant():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10))
    assert [float(rate(step)) for step in (0, 1, 5, 10, 500)] == pytest.approx([0, 0.1, 0.5, 1, 1])


def test_cosine_counts_the_warm_up_and_ends_at_its_fraction():
    rate = schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=10, decay_steps=110, final_fraction=0.1))
    assert [float(rate(step)) for step in (0, 5, 10, 60, 110, 1000)] == pytest.approx([0, 1, 2, 1.1, 0.2, 0.2])


def _steps(config, gradients, start=1.0):
    """The parameter (one number) after each gradient."""
    optimizer = make_optimizer(config)
    params, values = {"w": jnp.float32([start])}, []
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        step, state = update({"w": jnp.float32([gradient])}, state, params)
        params = {"w": params["w"] + step["w"]}
        values.append(float(params["w"][0]))
    return values


def test_the_first_update_of_a_warm_up_is_not_lost():
    # Adam's first step is the rate itself, whatever the gradient's size: 1/10 of the peak, then 2/10.
    first, second = _steps(OptimizerConfig(learning_rate=0.1, warmup_steps=10, max_grad_norm=0.0), [5.0, 5.0])
    assert first == pytest.approx(1 - 0.01, rel=1e-6)
    assert second == pytest.approx(1 - 0.03, rel=1e-6)


def test_adamw_by_hand():
    config = OptimizerConfig(learning_rate=0.1, b1=0.5, b2=0.75, eps=0.5, weight_decay=0.2, max_grad_norm=0.0)
    # Step 1: m = g = 2, v = g^2 = 4 (bias corrected). Step 2, g = -1: m = (0.5 - 0.5) / 0.75 = 0 ...
    w = 1 - 0.1 * (2 / (2 + 0.5) + 0.2 * 1)
    after_two = w - 0.1 * (0.0 / 1 + 0.2 * w)
    assert _steps(config, [2.0, -1.0]) == pytest.approx([w, after_two], rel=1e-6)


def test_gradients_are_clipped_by_the_global_norm():
    # eps as large as a gradient: Adam's step then shows the gradient's size.
    large = _steps(OptimizerConfig(learning_rate=1.0, eps=1.0, max_grad_norm=3.0), [300.0])
    assert large == pytest.approx([1 - 3 / 4], rel=1e-5)
    small = _steps(OptimizerConfig(learning_rate=1.0, eps=1.0, max_grad_norm=3.0), [2.0])
    assert small == pytest.approx([1 - 2 / 3], rel=1e-5)
    unclipped = _steps(OptimizerConfig(learning_rate=1.0, eps=1.0, max_grad_norm=0.0), [300.0])
    assert unclipped == pytest.approx([1 - 300 / 301], rel=1e-3)


def test_one_thousand_steps_of_a_millionth_are_not_lost():
    # float32 masters: in bfloat16 the weight would stay at 1.
    values = _steps(OptimizerConfig(learning_rate=1e-6), [1.0] * 1000)
    assert values[-1] == pytest.approx(0.999, abs=2e-5)


def test_phases_share_one_shape_of_state():
    params = {"w": jnp.ones((2, 3))}
    configs = (
        OptimizerConfig(learning_rate=1.0),
        OptimizerConfig(learning_rate=1.0, warmup_steps=3, decay_steps=9, max_grad_norm=0.0),
    )
    states = [init_state(params, make_optimizer(config)) for config in configs]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert int(states[0].step) == 0
    assert all(np.shape(a) == np.shape(b) for a, b in zip(*map(jax.tree.leaves, states), strict=True))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        *[(dict(learning_rate=x), f"learning_rate={x} must be 0 or") for x in (-1e-3, float("nan"), float("inf"), 1e39)],
        *[(dict(b1=x), f"b1={x} must lie in [0, 1)") for x in (-0.1, 1.0, float("nan"))],
        (dict(b2=1.5), "b2=1.5 must lie in [0, 1)"),
        (dict(eps=-1e-8), "eps=-1e-08 must be 0 or"),
        (dict(weight_decay=-0.1), "weight_decay=-0.1 must be 0 or"),
        (dict(final_fraction=float("nan")), "final_fraction=nan must be 0 or"),
        *[(dict(max_grad_norm=x), f"max_grad_norm={x} must be positive, or 0") for x in (-1.0, float("nan"))],
        (dict(warmup_steps=-1), "warmup_steps=-1 must be at least 0"),
        (dict(decay_steps=-1), "decay_steps=-1 must be at least 0"),
    ],
)
def test_values_out_of_range(fields, wanted):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**(dict(learning_rate=1e-3) | fields))
    assert wanted in str(error.value) and "\n" not in str(error.value)
