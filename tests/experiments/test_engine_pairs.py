"""The study of engine pairs: its table, what it measures on a tiny model, and that a GPU could run its programs at full width."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

import minite_jax as mt
from experiments import engine_pairs
from experiments.baselines import choices, naive_engine
from experiments.baselines.swaps import Swaps
from experiments.engine_pairs import PAIRS, Engine, Study
from experiments.growing import GrowingTable
from experiments.subject import Subject, subject
from minite_jax.errors import UserError
from minite_jax.model import pack, qwen3_30b_a3b, scored_tokens, tiny_dense, tiny_moe
from minite_jax.model.params import abstract_params
from minite_jax.sampler import SamplingParams
from minite_jax.sampler.sampling import generate
from pallas_kernels import dispatch
from pallas_kernels.log_prob import Truncation

COLUMNS = [{"key": key, "label": key, "unit": ""} for key in ("name", "one", "two")]


def table(folder, notes="n"):
    with flagsaver.flagsaver(results_dir=str(folder), suffix="here"):
        return GrowingTable("t", columns=COLUMNS, notes=notes, start=0.0, title="T")


def test_a_table_grows_and_goes_on_where_it_was_cut(tmp_path, capsys):
    asked = []

    def findings(name):
        asked.append(name)
        yield {"one": 1.5}
        if name == "b" and asked.count("b") == 1:
            raise NotImplementedError("no such kernel")
        yield {"two": "yes"}

    assert table(tmp_path).fill(["a", "b"], findings) == 1
    stored = json.loads((tmp_path / "t_here.json").read_text())
    assert stored["name"] == "t_here" and stored["rows"] == [
        {"name": "a", "one": 1.5, "two": "yes"},
        {"name": "b", "one": 1.5, "two": "failed"},
    ]
    out = capsys.readouterr().out
    assert "b: NotImplementedError: no such kernel" in out and "failed in part: b" in out
    with flagsaver.flagsaver(minutes=0.0):  # what is whole is kept, and nothing new begins
        assert table(tmp_path).fill(["a", "b", "c"], findings) == 0
    assert asked == ["a", "b"] and "b: not begun" in capsys.readouterr().out
    assert table(tmp_path).fill(["a", "b"], findings) == 0 and asked == ["a", "b", "b"]
    assert table(tmp_path, notes="another model").rows == {}


def test_a_mistake_of_ours_ends_the_study(tmp_path):
    def findings(name):
        yield {"one": 1}
        raise KeyError(name)

    with pytest.raises(KeyError):
        table(tmp_path).fill(["a"], findings)


def test_one_model_must_be_named():
    for given in ({}, {"checkpoint": "runs/x", "random_model": "tiny_moe"}):
        with flagsaver.flagsaver(**given), pytest.raises(UserError, match="which model"):
            subject(4)


def test_pairs_are_made_of_choices_that_differ():
    for pair in PAIRS.values():
        assert set((*pair.first.choices, *pair.second.choices, *pair.groups)) <= set(choices.CHOICES)
        assert pair.first != pair.second and pair.groups
        assert not set(pair.groups) & set(pair.first.choices)
    with flagsaver.flagsaver(pairs=["attention", "loose"]), pytest.raises(UserError, match="--pairs=loose: there is no such"):
        engine_pairs.main(["x"])


def test_a_policy_whose_choices_concern_nothing_is_the_policy():
    policy = mt.Policy(weights={}, config=tiny_dense(), recipe=mt.recipe("bf16"))
    assert choices.policy_with(("router", "tensor_scales"), policy, {}) is policy


@pytest.fixture(scope="module")
def study():
    """Four answers of a random model."""
    config, key = tiny_moe(vocab_size=64), jax.random.key(0)
    params = mt.init_params(config, key)
    policy, sampling = mt.prepare(params, config, mt.recipe("nvfp4")), SamplingParams(max_tokens=6)
    asked = Subject(params, policy, [[5, 6, 7], [8], [9, 10, 11], [3]], sampling, key, "Tiny")
    return Study(asked, mt.sample(policy, asked.prompts, sampling, key=key))


def row(study, name):
    return {key: value for piece in study.findings(PAIRS[name]) for key, value in piece.items()}


@pytest.mark.slow
def test_what_is_swapped_is_found(study):
    """XLA's attention: the first tensor that differs is its own, and swapping it in explains the whole gap."""
    found = row(study, "attention")
    assert found["gap"] > 0 and found["exact"] < 100 and found["first"].startswith("layer.0/attention/heads: ")
    assert found["share"] > 99 and found["selected"].startswith("attention 1") and "attention@0" in found["selected"]
    assert found["traced"].startswith("yes and ")


@pytest.mark.slow
def test_what_a_cpu_cannot_tell_apart_has_no_gap(study):
    """E4M3 or bfloat16 operands are a GPU's; and XLA finds no rounding of the strict engine that it may leave out."""
    for name in ("fp8 operands", "excess precision"):
        found = row(study, name)
        assert (found["gap"], found["exact"], found["first"], found["selected"]) == (0.0, 100.0, "none", "no gap"), name


@pytest.mark.slow
def test_swaps_score_as_the_learner_does(study):
    strict = Engine()
    run = lambda policy, *_: study.scored_as(strict, policy)  # noqa: E731
    swaps = Swaps(study.subject.policy, study.subject.params, study.rollouts, Truncation(), ["gate"], run)
    np.testing.assert_array_equal(swaps(frozenset())[study.mask], np.asarray(study.run(strict))[study.mask])


@pytest.mark.slow
def test_swaps_are_compiled_as_the_first_engine(study, monkeypatch):
    """A compiler's option that only the first has is on in the program with swaps, or that would be the second already."""
    compiled = []
    program = engine_pairs._program
    monkeypatch.setattr(engine_pairs, "_program", lambda excess: compiled.append(excess) or program(excess))
    first, second = Engine(("gate",), excess=False), Engine(("gate",), excess=True)
    pair = engine_pairs.Pair("", second, first, ("excess_precision",))
    log_probs = np.asarray(study.run(first))
    compiled.clear()
    found = study.attribute(pair, log_probs, log_probs + np.float32(0.5))
    assert compiled and set(compiled) == {False} and found.none.gap == 0.5
    assert study.attribute(pair, log_probs + np.float32(0.5), log_probs) is None


def abstract_policy(config, recipe):
    """Shapes and types of float32 masters and of the policy that is made of them."""
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(config))
    return params, jax.eval_shape(lambda params: pack(params, config, recipe), params)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="a GPU's programs are traced with Triton's package")
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_gpu_can_be_given_every_engine_at_full_width(name):
    """Shapes and types of the programs that a Hopper GPU would run: both ways of a choice must have the same."""
    config, recipe, pair = qwen3_30b_a3b(num_hidden_layers=2), mt.recipe("nvfp4"), PAIRS[name]
    names = tuple(dict.fromkeys((*pair.first.choices, *pair.groups)))
    with dispatch.planned(90):
        params, policy = abstract_policy(config, recipe)
        tokens = jax.ShapeDtypeStruct((16, 72), jnp.int32)
        fixed = [choices.policy_with(engine.choices, policy, params) for engine in (pair.first, pair.second)]
        switches = jax.eval_shape(lambda: choices.switches_of(names, config, {}))
        switched = policy.with_substitutes(choices._substitutes(names, None), switches)
        for each in (*fixed, switched):
            log_probs = jax.eval_shape(lambda policy, tokens: scored_tokens(policy, tokens, Truncation())[0], each, tokens)
            assert (log_probs.shape, log_probs.dtype) == ((16, 71), jnp.float32)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="a GPU's programs are traced with Triton's package")
@pytest.mark.parametrize("level", [*choices.LEVELS, "naive"])
def test_a_gpu_can_sample_at_every_level(level):
    """As above, of the sampler: with few tokens a matmul reads packed weights, which a learner's does not."""
    config, recipe, array = qwen3_30b_a3b(num_hidden_layers=2), mt.recipe("nvfp4"), jax.ShapeDtypeStruct
    with dispatch.planned(90):
        params, policy = abstract_policy(config, recipe)
        inputs = array((16, 8), jnp.int32), array((16,), jnp.int32), array((16,), jnp.uint32), jax.eval_shape(jax.random.key, 0)
        sampling = SamplingParams(max_tokens=64)
        if level == "naive":
            run = lambda params, *inputs: naive_engine.generate(params, config, recipe, *inputs, sampling)  # noqa: E731
            rollouts = jax.eval_shape(run, params, *inputs)
        else:
            run = lambda policy, params, *inputs: generate(  # noqa: E731
                choices.level_policy(level, policy, params), *inputs, sampling
            )
            rollouts = jax.eval_shape(run, policy, params, *inputs)
        assert (rollouts.log_probs.shape, rollouts.log_probs.dtype) == ((16, 64), jnp.float32)


@pytest.mark.slow
def test_levels_write_their_table(tmp_path):
    from experiments import levels

    given = dict(random_model="tiny_moe", random_tokens=4, problems=2, rounds=1, levels=["head"], results_dir=str(tmp_path))
    with flagsaver.flagsaver(**given):
        assert levels.main(["x"]) == 0
    strict, head = json.loads((tmp_path / "alignment_levels.json").read_text())["rows"]
    assert strict["level"] == "strict" and strict["gap"] == 0 and strict["exact"] == 100
    assert head["differs"] == choices.CHOICES["head"].about and head["gap"] < 1e-5 and head["time"] > 0
