"""Choices of other engines, put into the one forward: off they change no bit, on they change what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from experiments.baselines import choices
from experiments.baselines.swaps import Swaps
from experiments.build import sample_prompts
from minite_jax.diagnostics.attribute import attribute
from minite_jax.diagnostics.replay import replay
from minite_jax.errors import UserError
from minite_jax.model import scored_tokens, tiny_dense, tiny_moe
from pallas_kernels import dispatch, nvfp4
from pallas_kernels.log_prob import Truncation
from pallas_kernels.silu_mul import silu_mul

pytestmark = pytest.mark.timeout(1200)  # programs compile for minutes on a machine with other load

QUICK = {"xla_backend_optimization_level": 0}
_RECIPE = mt.recipe("nvfp4")
_CONFIG = tiny_dense(num_hidden_layers=2, vocab_size=64)
_MOE = tiny_moe(num_hidden_layers=2, vocab_size=64)
_TOKENS = np.random.default_rng(0).integers(0, 64, (6, 12)).astype(np.int32)
_MASK = np.ones((6, 11), bool)
_NAMES = ["attention", "gate"]


@functools.cache
def _params(config=_CONFIG):
    return mt.init_params(config, jax.random.key(0))


@functools.cache
def _policy(config=_CONFIG):
    return mt.prepare(_params(config), config, _RECIPE)


_score = jax.jit(lambda policy: scored_tokens(policy, jnp.asarray(_TOKENS), Truncation())[0], compiler_options=QUICK)


def _switched(parts):
    """Log-probs with parts like "gate@1" on; "head@2" lies outside of the layers."""
    on = {}
    for name, layer in (part.split("@") for part in parts):
        on.setdefault(name, []).append(int(layer))
    policy = choices.switched_policy(_policy(), _NAMES)
    return np.asarray(_score(policy.replace(switches=choices.switches_of(_NAMES, _CONFIG, on))))


_GROUPS = {name: [f"{name}@{i}" for i in choices.places(name, _CONFIG)] for name in _NAMES}


def test_two_planted_causes_are_found_with_their_layers():
    """The other engine has XLA's attention in layer 1 and its gate in layer 0; one program runs every combination."""
    theirs = _switched(frozenset({"attention@1", "gate@0"}))
    found = attribute(_switched, theirs, _MASK, {part: [part] for parts in _GROUPS.values() for part in parts}, target=0.999)
    assert found.none.gap > 1e-3 and set(found.chosen[-1].names) == {"attention@1", "gate@0"}
    assert found.chosen[-1].gap == 0 and found.chosen[-1].exact == 1 and found.stopped == "100% are explained"
    # By groups of layers first, then within the one that was chosen.
    found = attribute(_switched, _switched(frozenset(_GROUPS["attention"])), _MASK, _GROUPS)
    assert found.chosen[-1].names == ("attention",) and found.chosen[-1].gap == 0
    assert [part.names for part in found.parts["attention"]] == [("attention@0",), ("attention@1",)]


@pytest.mark.slow
def test_off_is_the_strict_policy_to_the_bit():
    np.testing.assert_array_equal(_switched(frozenset()), np.asarray(_score(_policy())))


def test_levels_that_change_nothing_are_refused():
    dense = tiny_dense()
    for level, config, recipe, message in (
        ("router", dense, _RECIPE, "level router changes nothing in this model with recipe nvfp4"),
        ("scales", dense, mt.recipe("bf16"), "level scales changes nothing in this model with recipe bf16"),
        ("te_scales", dense, mt.recipe("nvfp4_a16"), "level te_scales changes nothing"),
        ("loose", dense, _RECIPE, "no alignment level 'loose': choose from strict, scales"),
    ):
        with pytest.raises(UserError, match=message):
            choices.check_level(level, config, recipe)
    choices.check_level("te_weights", dense, mt.recipe("nvfp4_a16"))
    assert choices.level_policy(choices.STRICT, _policy(), _params()) is _policy()


def test_a_policy_with_substitutes_is_not_trained():
    with pytest.raises(ValueError, match="has no gradient"):
        choices.level_policy("attention", _policy(), _params()).with_masters(_params())


def test_every_choice_is_of_an_operation_and_in_a_level():
    ours = {name for _, names in choices.OPERATIONS.values() for name in names}
    assert ours | {"weights"} == set(choices.CHOICES) == {name for names in choices.LEVELS.values() for name in names}


def test_substitutes_are_in_place_while_they_last():
    x = jnp.ones((2, 8))
    with dispatch.substituted({"silu_mul": lambda ours, x: ours(x) + 1}):
        inside = silu_mul(x)
    np.testing.assert_array_equal(inside, silu_mul(x) + 1)


@pytest.mark.slow
def test_our_scales_leave_bfloat16_quotients_and_tensor_scales_nothing_to_change():
    """Scales of two significant bits: a quotient in bfloat16 lies on the same side of every threshold; a power of two shifts."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    flipped = {}
    for rule in (nvfp4.ScaleRule.fp8_exact(), nvfp4.ScaleRule.te(outer="row")):
        both = jax.jit(lambda x, rule=rule: (nvfp4.quantize(x, rule), choices.xla.quantize_with_bfloat16_quotients(x, rule)))
        ours, theirs = both(x)
        flipped[rule.family] = float(np.mean(np.asarray(ours.codes != theirs.codes)))
    assert flipped["fp8_exact"] == 0 < flipped["te"] < 0.05
    read = jax.jit(lambda x, outer: nvfp4.dequantize(nvfp4.quantize(x, nvfp4.ScaleRule.fp8_exact(outer=outer))), static_argnums=1)
    row, tensor = read(x, "row"), read(x, "matrix")
    np.testing.assert_array_equal(row, tensor)


# --- whole programs


_SAMPLING = mt.SamplingParams(n=2, max_tokens=6, stop_ids=(2, 3))
_PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [20, 3, 21, 22, 1]]
# Nothing to see with our scales (the test above), in float32 sums that are exact, or where a batch is as small as here.
_SILENT = {"scales", "bf16_quantiser", "bf16_operands", "split_k", "k_order", "router"}


@pytest.mark.slow
@pytest.mark.parametrize("level", list(choices.LEVELS))
def test_each_level_samples_and_has_a_gap(level):
    rollouts = sample_prompts(_policy(_MOE), _params(_MOE), _PROMPTS, jax.random.key(1), _SAMPLING, level)
    tokens_BT, mask_BT, sampled_BT = (np.asarray(x) for x in rollouts.sequences())
    strict_BT = np.asarray(mt.token_log_probs(_policy(_MOE), tokens_BT, _SAMPLING.truncation))
    assert np.isfinite(sampled_BT).all() and mask_BT.sum() > 20
    difference = np.abs(strict_BT - sampled_BT)[mask_BT]
    assert difference.max() < 3  # unrelated log-probs of this model differ by more
    if level == choices.STRICT:
        assert difference.max() == 0
    elif level not in _SILENT:
        assert difference.max() > 0


@pytest.mark.slow
def test_causes_that_another_program_planted_are_found():
    """The other engine is a policy of its own whose choices are fixed, compiled apart and sampled through its cache."""
    names = ("te_scales", "weights")
    theirs = choices.switched_policy(_policy(_MOE), ["te_scales"])
    everywhere = tuple((True,) for _ in range(3))
    theirs = theirs.with_substitutes(choices._substitutes(("te_scales",), everywhere))
    theirs = theirs.replace(weights=choices.their_weights(_policy(_MOE), _params(_MOE)))
    prompts = [np.random.default_rng(i).integers(4, 64, 5).tolist() for i in range(48)]
    rollouts = mt.sample(theirs, prompts, mt.SamplingParams(max_tokens=6), key=jax.random.key(2))
    swaps = Swaps(_policy(_MOE), _params(_MOE), rollouts, Truncation(), [*names, "gate", "combine"])
    np.testing.assert_array_equal(
        swaps(frozenset())[np.asarray(rollouts.mask)],
        np.asarray(mt.token_log_probs(_policy(_MOE), rollouts.sequences()[0]))[np.asarray(rollouts.sequences()[1])],
    )
    found = attribute(swaps, rollouts.log_probs, rollouts.mask, swaps.groups)
    assert set(found.chosen[-1].names) == set(names) and found.chosen[-1].share > 0.99
    assert [part.names for part in found.parts["weights"]] == [("weights@0",), ("weights@1",)]


@pytest.mark.slow
def test_a_replay_has_the_samplers_bits():
    rollouts = mt.sample(_policy(_MOE), _PROMPTS, _SAMPLING, key=jax.random.key(3))
    np.testing.assert_array_equal(replay(_policy(_MOE), rollouts, _SAMPLING.truncation), rollouts.log_probs)
