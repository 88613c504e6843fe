"""The sampling script: a run's checkpoint end to end, a model's folder with a stand-in for the model, wrong input in one line."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

import minite_jax as mt
from configs import quickstart
from experiments import model_files, sample
from experiments.training import Run
from minite_jax import checkpoint
from minite_jax.checkpoint import nvfp4_files
from minite_jax.checkpoint.huggingface import to_json
from minite_jax.errors import UserError
from minite_jax.model import tiny_dense
from minite_jax.model.rope import RopeScaling

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture
def run(capsys):
    """Calls the script with flags; gives what it wrote to stdout and the last line of stderr."""

    def run(**values):
        with flagsaver.flagsaver(**values):
            sample.main(["sample"])
        printed = capsys.readouterr()
        return printed.out, printed.err.splitlines()[-1]

    return run


@pytest.fixture
def refusal(run, capsys):
    def refusal(**values):
        with pytest.raises((UserError, ValueError)) as error:
            run(**values)
        assert "\n" not in str(error.value) and capsys.readouterr().out == ""
        return str(error.value)

    return refusal


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Of a run that has saved its first weights."""
    config = quickstart.get_config()
    config.model.update(dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    config.model.update(dict(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, intermediate_size=16))
    config.recipe.name = "bf16"
    folder = tmp_path_factory.mktemp("run")
    state = Run(config, folder).state
    config.plot_beside = "a run that is gone"
    checkpoint.save(folder, 0, state, config)
    return str(folder)


@pytest.mark.slow  # compiling; what streams give is a contract test
def test_a_run_end_to_end(run, workdir):
    text, said = run(checkpoint=workdir, prompt="26455?")
    assert said.startswith("6 tokens in, ") and ("ended by" in said or said.count("cut at --max_tokens=8") == 1)
    lines, said_of_lines = run(checkpoint=workdir, prompt="26455?", log_probs=True)
    assert said_of_lines.partition("; the first")[0] == said.partition("; the first")[0]
    rows = [line.split("\t") for line in lines.splitlines()]
    assert "".join(json.loads(piece) for _, _, piece in rows) + "\n" == text
    # The learner's forward gives these tokens these log-probs, to the last bit.
    tokens = [int(token) for _, token, _ in rows if token]
    source = sample.open_checkpoint(Path(workdir))
    policy, prompt = source.load(), source.tokenizer.encode("26455?")
    scored = mt.token_log_probs(policy, jnp.asarray([prompt + tokens]), source.sampling.truncation)[0, len(prompt) - 1 :]
    assert [np.float32(log_prob) for log_prob, token, _ in rows if token] == scored.tolist()
    assert run(checkpoint=workdir, prompt="26455?", seed=1)[0] != text


def test_a_run_is_sampled_as_it_was_trained(run, workdir, monkeypatch):
    asked = []
    monkeypatch.setattr(
        mt, "stream", lambda *args, **kwargs: asked.append((args, kwargs)) or iter([(ord("="), -1.0), (46, -0.25)])
    )
    text, said = run(checkpoint=workdir, prompt="26455?", seed=3)
    assert text == "=.\n"
    assert said.startswith('6 tokens in, 2 out, ended by "."; log-prob -1.25 nats; the first after ')
    (policy, prompt, params), options = asked[0]
    assert isinstance(policy, mt.Policy) and policy.recipe.name == "bf16"
    assert prompt == list(b"26455?")
    assert params == mt.SamplingParams(max_tokens=8, stop_ids=(46,))
    assert (jax.random.key_data(options["key"]) == jax.random.key_data(jax.random.key(3))).all()
    run(checkpoint=workdir, prompt="26455?", temperature=0.0, top_k=5, top_p=0.5, max_tokens=2)
    assert asked[1][0][2] == mt.SamplingParams(temperature=0.0, top_k=5, top_p=0.5, max_tokens=2, stop_ids=(46,))


def test_wrong_flags_for_a_run(refusal, workdir, tmp_path):
    assert refusal(checkpoint=workdir, prompt="264551?") == (
        "the prompt is too long, 7 tokens: prompts of its task, digit_sum, have at most 6, such as '02282?'"
    )
    assert refusal(checkpoint=workdir, prompt="1?", chat=True).endswith(
        "is no chat model, its tokens are bytes; leave --chat out"
    )
    assert refusal(checkpoint=workdir, prompt="1?", thinking=True).startswith("--thinking is for a chat: give --chat too")
    assert refusal(checkpoint=workdir, prompt="1?", system="x").startswith("--system is for a chat: give --chat too")
    assert refusal(checkpoint=workdir, prompt="1?", recipe="fp4").startswith("no recipe 'fp4'; there are ")
    assert refusal(checkpoint=workdir, prompt="1?", temperature=-1.0).startswith("temperature=-1.0 must be 0 (greedy)")
    missing = tmp_path / "no"
    assert refusal(checkpoint=str(missing), prompt="1?").startswith(f"--checkpoint={missing}: there is no such folder")
    assert refusal(checkpoint=str(tmp_path), prompt="1?").startswith(f"--checkpoint={tmp_path} has neither checkpoints/, ")
    (tmp_path / "checkpoints").mkdir()
    assert refusal(checkpoint=str(tmp_path), prompt="1?").startswith("there is no checkpoint in ")


class Model:
    """A folder with a byte-level tokenizer, and a stand-in for the model that answers what it is told."""

    def __init__(self, folder, monkeypatch):
        tokenizers = pytest.importorskip("tokenizers")
        pytest.importorskip("jinja2")
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        backend.add_tokens(["<think>", "</think>"])
        backend.save(str(folder / "tokenizer.json"))
        self.folder, self.encode = folder, lambda text: backend.encode(text, add_special_tokens=False).ids
        self.write("tokenizer_config", chat_template=TEMPLATE, eos_token="<|im_end|>")
        self.write("generation_config", eos_token_id=[257], temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
        self.describe(vocab_size=320)
        self.answer, self.asked = [97], None
        monkeypatch.setattr(mt, "prepare_huggingface", lambda path, recipe: recipe if path == folder else None)
        monkeypatch.setattr(mt, "stream", self._stream)

    def write(self, name, **content):
        (self.folder / f"{name}.json").write_text(json.dumps(content))

    def describe(self, **changes):
        self.write("config", **to_json(tiny_dense(**changes), extra={"max_position_embeddings": 600}))

    def _stream(self, policy, prompt, params, *, key):
        self.asked = policy, prompt, params, key
        return iter([(token, -0.5) for token in self.answer])


@pytest.fixture
def model(tmp_path, monkeypatch):
    return Model(tmp_path, monkeypatch)


def test_a_chat_with_a_folder(run, model):
    model.answer = [*model.encode("<think></think>é 🙂"), 319, 257]
    out, said = run(checkpoint=str(model.folder), prompt="2+2?", chat=True, system="Be brief.", thinking=False)
    assert out == "<think></think>é 🙂\ufffd\n"
    assert 'ended by "<|im_end|>"; log-prob -5.5 nats' in said
    recipe, prompt, params, _ = model.asked
    assert prompt == model.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    assert params == mt.SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=512, stop_ids=(257,))
    assert recipe.name == "bf16"


def test_lines_of_tokens(run, model):
    model.answer = [*model.encode("é"), 257, model.encode("é")[0]]
    out, said = run(checkpoint=str(model.folder), prompt="a", log_probs=True, recipe="nvfp4", temperature=0.0, max_tokens=4)
    first, second = model.encode("é")
    assert out.splitlines() == [
        f'-0.5\t{first}\t""', f'-0.5\t{second}\t"é"', '-0.5\t257\t"<|im_end|>"', f'-0.5\t{first}\t""', '\t\t"\ufffd"',
    ]  # fmt: skip
    assert "cut at --max_tokens=4" in said
    recipe, prompt, params, _ = model.asked
    assert prompt == model.encode("a") and recipe.name == "nvfp4" and params.temperature == 0.0


def test_greedy_where_the_folder_says_so(run, model):
    model.write("generation_config", temperature=0.6, do_sample=False)
    run(checkpoint=str(model.folder), prompt="a")
    assert model.asked[2] == mt.SamplingParams(temperature=0.0, max_tokens=512, stop_ids=(257,))


def test_wrong_flags_for_a_folder(refusal, model):
    folder = str(model.folder)
    assert refusal(checkpoint=folder, prompt="a" * 601) == "the prompt is too long, 601 tokens: the model has 600 positions"
    assert refusal(checkpoint=folder, prompt="a" * 100) == (
        "the prompt, 100 tokens, and --max_tokens=512 are too long together: the model has 600 positions; lower --max_tokens"
    )
    model.describe(vocab_size=256)
    assert refusal(checkpoint=folder, prompt="a") == (
        f"the tokenizer in {folder} has 260 tokens and its model 256: copy the files of one model there"
    )
    model.describe(vocab_size=320)
    model.write("tokenizer_config")
    assert "has no chat template" in refusal(checkpoint=folder, prompt="a", chat=True)
    (model.folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(checkpoint=folder, prompt="a")


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("value", ["1", [1], True])
def test_settings_that_are_no_numbers(refusal, model, name, value):
    model.write("generation_config", **{name: value})
    said = refusal(checkpoint=str(model.folder), prompt="a")
    assert said.endswith(f"generation_config.json: {name}={value!r} must be a number")


def test_text_that_cannot_be_sampled_from(refusal, model):
    folder = str(model.folder)
    assert refusal(checkpoint=folder, prompt="a\udc80") == "the text is no valid Unicode at character 1: give it as UTF-8"
    assert refusal(checkpoint=folder, prompt="a", max_tokens=0) == "max_tokens=0 must be at least 1"
    assert refusal(checkpoint=folder, prompt="a", temperature=float("nan")).startswith("temperature=nan must be 0 (greedy)")


YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768)


@pytest.mark.parametrize(
    ("said", "scaling", "wanted"),
    [(None, None, float("inf")), (40_960, None, 40_960), (40_960, YARN, 131_072), (200_000, YARN, 200_000)],
)
def test_positions(said, scaling, wanted):
    assert model_files.max_positions({"max_position_embeddings": said}, tiny_dense(rope_scaling=scaling), "") == wanted


@pytest.mark.parametrize("said", ["x", [1], 0, -5, True, float("inf")])
def test_positions_that_are_no_number(said):
    with pytest.raises(UserError, match="c.json: max_position_embeddings=.* must be a whole number above 0"):
        model_files.max_positions({"max_position_embeddings": said}, tiny_dense(), "c.json")


def test_an_nvfp4_folder_is_sampled_by_its_own_recipe(run, model, monkeypatch):
    asked = []
    monkeypatch.setattr(nvfp4_files, "open_nvfp4", lambda folder: SimpleNamespace(config=tiny_dense(vocab_size=320)))
    monkeypatch.setattr(mt, "load_nvfp4", lambda *given: asked.append(given))
    model.write("hf_quant_config")
    run(checkpoint=str(model.folder), prompt="a")
    run(checkpoint=str(model.folder), prompt="a", recipe="nvfp4_46")
    assert asked == [(model.folder, None), (model.folder, mt.recipe("nvfp4_46"))]


@pytest.mark.slow
def test_an_nvfp4_folder_end_to_end(run, refusal, model, tmp_path):
    recipe = mt.recipe("nvfp4", last_plain=1)
    config = tiny_dense(vocab_size=320, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32)
    policy = nvfp4_files.pack_params(mt.init_params(config, jax.random.key(1)), config, recipe)
    folder = mt.save_nvfp4(tmp_path / "q", policy)
    (folder / "tokenizer.json").write_bytes((model.folder / "tokenizer.json").read_bytes())
    run(checkpoint=str(folder), prompt="a")
    read = model.asked[0]
    assert read.recipe == recipe
    jax.tree.map(np.testing.assert_array_equal, read.weights, policy.weights)
    assert "the given recipe has it otherwise" in refusal(checkpoint=str(folder), prompt="a", recipe="bf16")
