"""Taps show the forward's tensors and leave its bits alone; the sampler's tensors are the learner's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minite_jax as mt
from minite_jax.diagnostics import trace as trace_lib
from minite_jax.diagnostics.alignment import dequantized
from minite_jax.diagnostics.trace_file import TraceError
from minite_jax.model import Taps, hidden_states, pack, scored_tokens, taps, tensor_names, tiny_dense, tiny_moe
from pallas_kernels.log_prob import Truncation

pytestmark = pytest.mark.xdist_group("traced_world")  # one process compiles the trace for both files


def assert_same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "config",
    [tiny_moe(), pytest.param(tiny_dense(num_hidden_layers=1, qk_norm=False, attention_bias=True), marks=pytest.mark.slow)],
    ids=["moe", "llama"],
)
def test_without_taps_the_program_is_the_one_without_offers(config, monkeypatch):
    policy = jax.eval_shape(lambda key: pack(mt.init_params(config, key), config, mt.recipe("nvfp4")), jax.random.key(0))

    def program(*patterns):
        run = lambda policy, tokens: scored_tokens(policy, tokens, Truncation(), remat=True, taps=Taps(patterns))  # noqa: E731
        return str(jax.make_jaxpr(run)(policy, jnp.zeros((2, 9), jnp.int32)))

    off, on = program(), program("*")
    monkeypatch.setattr(Taps, "__call__", lambda self, name, value, view=None, back=None: value)
    monkeypatch.setattr(Taps, "operand", lambda self, name, format, x, *rest, **options: x)
    monkeypatch.setattr(Taps, "beside", lambda self, *rest: None)
    assert off == program()
    assert off != on  # they do differ where something is wanted


def test_all_tensors_come_in_order(world):
    trace = world.trace
    assert trace.names == tensor_names(world.policy)
    rows = trace.row_numbers("final/log_prob")
    assert trace.rows.positions[rows].tolist() == [*range(8), *range(5)]


@pytest.mark.slow
def test_no_bit_of_the_result_changes(world):
    assert_same(world.trace.read("final/log_prob")[0], world.log_probs[world.scored])
    trace = trace_lib.trace_learner(world.policy, world.tokens, mask=world.mask)
    assert trace.header["model"] == world.trace.header["model"]
    for name in trace.names:
        assert_same(trace.read(name)[0], world.trace.read(name)[0])
    assert_same(np.asarray(mt.token_log_probs(world.policy, jnp.asarray(world.tokens))), world.log_probs)
    logits = np.asarray(mt.forward(world.policy, jnp.asarray(world.tokens)))[:, :-1]
    assert_same(trace.read("final/logits")[0], logits[world.scored])


def test_tensors_belong_together(world):
    read = lambda name: trace.read(name)[0]  # noqa: E731
    trace = world.trace
    assert_same(read("layer.0/input"), read("embed"))
    codes, scale, outer = (read(f"layer.1/moe/experts/gated{part}").astype(np.float32) for part in taps.PARTS)
    values = dequantized(codes.astype(np.uint8), scale, outer)
    plain = read("layer.1/moe/experts/gated").astype(np.float32)
    assert np.linalg.norm(values - plain) < 0.15 * np.linalg.norm(plain)  # FP4 rounds by a tenth
    probs, weights, experts = (read(f"layer.1/moe/router/{name}") for name in ("probs", "weights", "experts"))
    chosen = np.take_along_axis(probs, experts, axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)
    weighted = (read("layer.1/moe/experts/down").astype(np.float32) * weights[..., None]).sum(1)
    np.testing.assert_allclose(read("layer.1/moe/out").astype(np.float32), weighted, rtol=2**-7, atol=1e-3)
    # A rotation keeps lengths.
    normed, turned = (read(f"layer.1/attention/{name}").astype(np.float32) for name in ("q_norm", "q"))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(normed, axis=-1), rtol=2**-7)
    first = trace.rows.positions == 0
    assert_same(read("layer.1/attention/q")[first], read("layer.1/attention/q_norm")[first])  # no angle at position 0


@pytest.mark.slow
def test_a_selection_in_passes_is_part_of_the_whole(world):
    policy = world.policy
    patterns = ["layer.1/moe/r*", "final/st*"]
    trace = trace_lib.trace_learner(policy, world.tokens, mask=world.mask, patterns=patterns, max_bytes=1 << 10)
    assert trace.names[0] == "layer.1/moe/router/probs" and len(trace.names) == 4
    for name in trace.names:
        assert_same(trace.read(name)[0], world.trace.read(name)[0])


@pytest.mark.slow
def test_the_samplers_tensors_are_the_learners(world):
    policy = world.policy
    patterns = ["layer.1/*", "final/*"]
    trace = trace_lib.trace_sampler(policy, world.tokens, np.array([5, 3]), lengths=world.lengths, patterns=patterns)
    assert trace.header["rows"] == world.trace.header["rows"]
    for name in trace.names:
        array, rows = trace.read(name)
        whole, whole_rows = world.trace.read(name)
        place = {row: i for i, row in enumerate(whole_rows)}
        assert_same(array, whole[[place[row] for row in rows]])
    assert trace.rows.positions[trace.row_numbers("final/logits")].tolist() == [4, 5, 6, 7, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampling_is_traced_as_it_happens(world):
    policy = world.policy
    prompts, params = [[1, 2, 3], [4, 5, 6, 7, 8]], mt.SamplingParams(max_tokens=4, stop_ids=tuple(range(0, 256, 3)))
    trace, rollouts = trace_lib.trace_sampling(policy, prompts, params, key=jax.random.key(1), patterns=["layer.1/*", "final/*"])
    expected = mt.sample(policy, prompts, params, key=jax.random.key(1))
    for name in ("tokens", "log_probs", "mask", "finish_reason"):
        assert_same(getattr(rollouts, name), getattr(expected, name))
    log_prob, rows = trace.read("final/log_prob")
    assert_same(log_prob, np.asarray(expected.log_probs)[np.asarray(expected.mask)])
    # The learner on what was sampled gives the same tensors.
    lengths = np.bincount(trace.rows.sequences)
    tokens = np.zeros((2, lengths.max()), np.int32)
    tokens[trace.rows.sequences, trace.rows.positions] = trace.rows.token_ids
    mask = np.arange(lengths.max()) < lengths[:, None]
    learner = trace_lib.trace_learner(policy, tokens, mask=mask, patterns=["layer.1/*", "final/*"])
    for name in trace.names:
        array, rows = trace.read(name)
        whole, whole_rows = learner.read(name)
        place = {row: i for i, row in enumerate(whole_rows)}
        assert_same(array, whole[[place[row] for row in rows]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_inside_a_gradient_under_remat(world):
    policy, params = world.policy, world.params

    def loss(params, names):
        wanted = Taps(names)
        log_prob, _ = scored_tokens(policy.with_masters(params), jnp.asarray(world.tokens), Truncation(), remat=True, taps=wanted)
        return jnp.sum(jnp.where(world.mask[:, 1:], log_prob, 0.0)), wanted.tensors

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    plain, _ = grad(params, ())
    traced, tensors = grad(params, ("*",))
    jax.tree.map(assert_same, plain, traced)
    for name, tensor in tensors.items():
        keep = world.scored if name in trace_lib._HEAD else world.mask
        assert_same(np.asarray(tensor)[keep.reshape(-1)], world.trace.read(name)[0])


@pytest.mark.slow
def test_edits(world):
    policy = world.policy

    @functools.partial(jax.jit, static_argnums=(1,))
    def run(factor, name):
        wanted = Taps(["*"], {name: lambda x: (x * factor).astype(x.dtype)})
        hidden, _ = hidden_states(policy, jnp.asarray(world.tokens), taps=wanted)
        return {"hidden": hidden, **wanted.tensors}

    for name in ("layer.1/moe/experts/gated", "layer.0/attention/stream"):
        same, other = run(1, name), run(2, name)
        for key in same:
            if key in world.trace and not key.startswith("final/log"):
                assert_same(np.asarray(same[key])[world.mask.reshape(-1)], world.trace.read(key)[0])
        names = [key for key in tensor_names(policy) if key in same]
        changed = [key for key in names if np.asarray(same[key]).tobytes() != np.asarray(other[key]).tobytes()]
        assert changed[0] == name

    def edited(name, edit):
        return jax.eval_shape(lambda: hidden_states(policy, jnp.asarray(world.tokens), taps=Taps((), {name: edit})))

    with pytest.raises(ValueError, match="q_norm is computed beside the forward"):
        edited("layer.1/attention/q_norm", lambda x: x)
    with pytest.raises(ValueError, match="an edit of attention/qkv gave float32"):
        edited("layer.1/attention/qkv", lambda x: x.astype(jnp.float32))


def test_a_pattern_without_a_match(world):
    with pytest.raises(TraceError, match=r"no tensor is called 'layer.9/\*'"):
        trace_lib.trace_learner(world.policy, world.tokens, patterns=["layer.9/*"])
    with pytest.raises(TraceError, match="T of at least 2"):
        trace_lib.trace_learner(world.policy, world.tokens[:, :1])
