"""Differences that no layer makes are named; each from traces whose headers do not give it away."""

import json

import numpy as np
import pytest

from minite_jax.diagnostics import causes
from minite_jax.diagnostics.compare import compare
from minite_jax.diagnostics.logs import read_log
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, TraceError, add_row_set, new_header

RNG = np.random.default_rng(0)
N, V = 24, 40
LOGITS = (2.5 * RNG.standard_normal((N - 1, V))).astype(np.float32)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def sampled(kept=None):
    """Token ids that a mask keeps."""
    masked = np.where(kept, LOGITS, -np.inf) if kept is not None else LOGITS
    return np.concatenate([[0], (masked + RNG.gumbel(size=masked.shape)).argmax(1)])


def trace(ids, log_probs=None, logits=None, sampling=None, positions=None, model=None):
    rows = Rows(ids, range(len(ids)) if positions is None else positions, [0] * len(ids))
    header = new_header(rows, engine={"name": "test"}, sampling=sampling, model=model)
    add_row_set(header, "scored", range(len(ids) - 1))
    result = MemoryTrace(header)
    if logits is not None:
        result.add("final/logits", logits.astype(np.float32), "scored")
    if log_probs is not None:
        result.add("final/log_prob", log_probs[np.arange(len(ids) - 1), ids[1:]].astype(np.float32), "scored")
    return result.close()


def top_k(k):
    return LOGITS >= np.sort(LOGITS, 1)[:, -k][:, None]


def top_p(p, temperature=1.0):
    order = np.argsort(-LOGITS, 1)
    prob = np.exp(log_softmax(np.take_along_axis(LOGITS, order, 1) / temperature))
    kept = np.zeros(LOGITS.shape, bool)
    np.put_along_axis(kept, order, np.cumsum(prob, 1) - prob < p, 1)
    return kept


def cut(kept, temperature=1.0):
    return log_softmax(np.where(kept, LOGITS / temperature, -1e30))


BASE = log_softmax(LOGITS)
HOT = {"temperature": 0.7}
CASES = {
    "temperature": (None, {}, BASE, log_softmax(LOGITS / 0.7), causes.TEMPERATURE, "temperature 0.7"),
    "raw": (None, HOT, log_softmax(LOGITS / 0.7), BASE, causes.RAW, "raw"),
    "divided": (None, {}, BASE, BASE / 0.5, causes.DIVIDED, "raw ones times 2"),
    "narrow": (np.arange(V) < 30, {}, BASE, log_softmax(LOGITS[:, :30]), causes.VOCABULARY, "over 30 tokens"),
    "top_k": (top_k(5), {}, BASE, cut(top_k(5)), causes.MASK, "top_k = 5"),
    "top_p": (top_p(0.8), {}, BASE, cut(top_p(0.8)), causes.MASK, "top_p about 0.8"),
    "no top_k": (top_k(5), {"top_k": 5}, cut(top_k(5)), BASE, causes.RAW, "of all tokens"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("logits_in", ["first", "second"])
def test_conventions_of_log_probs(case, logits_in):
    kept, sampling, first, second, kind, text = CASES[case]
    ids = sampled(kept)
    pad = lambda x: np.pad(x, ((0, 0), (0, V - x.shape[1])), constant_values=-99)  # noqa: E731
    given = {logits_in: LOGITS}
    a = trace(ids, pad(first), given.get("first"), sampling)
    b = trace(ids, pad(second), given.get("second"))
    found = causes.log_prob_causes(a, b)
    assert [each.kind for each in found] == [kind] and text in found[0].text, found


@pytest.mark.parametrize("logits_in", ["first", "second"])
def test_no_cause_where_the_logits_differ(logits_in):
    other = LOGITS + 0.02 * RNG.standard_normal(LOGITS.shape)
    ids = sampled()
    logits = {"first": LOGITS, "second": None} if logits_in == "first" else {"first": None, "second": other}
    a, b = trace(ids, BASE, logits["first"]), trace(ids, log_softmax(other), logits["second"])
    assert causes.log_prob_causes(a, b) == [] and causes.log_prob_causes(a, a) == []


def test_tokens_and_positions():
    ids = np.arange(10)
    other = ids.copy()
    other[4] = 99
    [cause] = causes.row_causes(trace(ids), trace(other))
    assert cause.kind == causes.TOKENS and "token 4: 4 in the first trace, 99 in the second" in cause.text and cause.first
    [cause] = causes.row_causes(trace(ids), trace(ids, positions=ids + 3))
    assert cause.kind == causes.POSITIONS and "3 larger" in cause.text
    [cause] = causes.row_causes(trace(ids), trace(np.concatenate([[77], ids])))
    assert cause.kind == causes.POSITIONS and "second trace has 1 more tokens in front ([77])" in cause.text
    assert causes.row_causes(trace(ids), trace(ids)) == []


def test_weights():
    prints = {f"layers.{i}.qkv": str(i) for i in range(8)}
    model = lambda weights: {"weights": weights, "weights_of": "x"}  # noqa: E731
    a = trace(np.arange(4), model=model(prints))
    [cause] = causes.weight_causes(a, trace(np.arange(4), model=model({k: "new" for k in prints})))
    assert cause.kind == causes.WEIGHTS and "8 of 8 weights differ: stale" in cause.text
    [cause] = causes.weight_causes(a, trace(np.arange(4), model=model({**prints, "layers.3.qkv": "new"})))
    assert cause.text == "1 of 8 weights differ: layers.3.qkv"
    assert causes.weight_causes(a, a) == []


@pytest.mark.slow
def test_a_rotation_by_other_positions(world):
    config, name = world.config, "layer.0/attention/q"
    turned = {}

    def turn(x):
        half = x.shape[-1] // 2
        angle = 3 * config.rope_theta ** (-np.arange(half) / half)
        z = (x[..., :half].astype(np.float32) + 1j * x[..., half:].astype(np.float32)) * np.exp(1j * angle)
        turned["q"] = np.concatenate([z.real, z.imag], -1).astype(x.dtype)
        return turned["q"]

    header = {**world.trace.header, "tensors": {}}
    other = MemoryTrace(header)
    for each in world.trace.names:
        array = world.trace.read(each)[0]
        other.add(each, turn(array) if each == name else array, world.trace.header["tensors"][each].get("rows"))
    other = other.close()
    [cause] = causes.rotation_causes(world.trace, other, compare(world.trace, other))
    assert cause.kind == causes.ROTATION and "15 of 15 tokens are turned as at positions 3 larger" in cause.text


def test_numbers_above_0_are_no_log_probs(tmp_path):
    logs = []
    for name, values in (("a", [-0.1, -0.2, -0.3]), ("b", [-0.1, 0.2, 0.3])):
        file = tmp_path / name
        file.write_text(json.dumps(LOGS["trl"] | {"sampling_per_token_logps": values}))
        logs.append(read_log(file))
    [cause] = causes.log_prob_causes(*logs)
    assert cause.kind == causes.POSITIVE
    assert "2 of 3 of the second trace, first at sequence 0, position 2: negated ones" in cause.text
    [cause] = causes.log_prob_causes(*reversed(logs))
    assert "of the first trace" in cause.text


LOGS = {
    "slime": {"tokens": [1, 2, 3, 4, 5], "response_length": 3, "rollout_log_probs": [-0.1, -0.2, -0.3]},
    "verl": {"prompts": [1, 2], "responses": [3, 4, 5], "rollout_log_probs": [-0.1, -0.2, -0.3], "old_log_probs": [-9, -9, -9]},
    "nemo": {"input_ids": [1, 2, 3, 4, 5], "response_length": 3, "generation_logprobs": [0, 0, -0.1, -0.2, -0.3]},
    "trl": {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "sampling_per_token_logps": [-0.1, -0.2, -0.3]},
    "vllm": {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5], "logprobs": [-0.1, -0.2, -0.3], "temperature": 0.8},
}


@pytest.mark.parametrize("framework", LOGS)
def test_logs(tmp_path, framework):
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join([json.dumps(LOGS[framework])] * 2))
    log = read_log(file)
    values, rows = log.read("final/log_prob")
    assert log.rows.token_ids.tolist() == [1, 2, 3, 4, 5] * 2 and log.rows.positions.tolist() == [0, 1, 2, 3, 4] * 2
    np.testing.assert_array_equal(values, np.float32([-0.1, -0.2, -0.3] * 2))
    assert rows.tolist() == [1, 2, 3, 6, 7, 8]  # a token's log-prob is in the row before it
    assert log.header["sampling"] == ({"temperature": 0.8} if framework == "vllm" else {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"), ("[1]", "line 2 begins a JSON array"), ("7", "line 2 is no JSON object"),
        ('{"tokens": [1, 2]}', "line 2: no log-probs; it has tokens"),
        ('{"tokens": [1, 2], "response_length": 9, "rollout_log_probs": [0]}', "response_length 9 does not fit 2 tokens"),
        ('{"prompts": [1], "responses": [2, 3], "rollout_log_probs": [0, 0, 0, 0]}', "4 rollout_log_probs for 3 tokens"),
        ('{"tokens": [1, 2], "rollout_log_probs": ["x"]}', "rollout_log_probs holds 'x', which is no number"),
        ('{"tokens": [1, 2], "rollout_log_probs": [true]}', "rollout_log_probs holds 'True', which is no number"),
        ('{"tokens": [1, 2], "rollout_log_probs": [-1%s]}' % ("0" * 400), "an integer that is no float"),
        ('{"tokens": [1, "2"], "rollout_log_probs": [0]}', "entry 1 of tokens is '2', not an integer from 0"),
        ('{"tokens": [1, -2], "rollout_log_probs": [0]}', "entry 1 of tokens is -2"),
        ('{"tokens": [1, 2], "response_length": true, "rollout_log_probs": [0]}', "response_length True does not fit"),
        ('{"tokens": [1, 2], "tokens": [1, 3], "rollout_log_probs": [0]}', "tokens is there twice"),
        ('{"tokens": [1, 2], "rollout_log_probs": [0], "temperature": "x"}', "temperature is 'x', not a number"),
        ('{"tokens": [1, 2], "rollout_log_probs": [0], "temperature": 0.5}', "temperature 0.5, but 1 on the lines before"),
        ("{}", "it has no field: say which field holds them"),
        ('{"text": "a", "rollout_log_probs": [0]}', "no token ids"),
    ],
)  # fmt: skip
def test_spoiled_logs(tmp_path, line, message):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(LOGS["slime"] | {"temperature": 1.0}) + "\n" + line)
    with pytest.raises(TraceError, match=message):
        read_log(file)
