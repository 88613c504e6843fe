"""The command line of diagnoses, on traces and logs that are written here."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import cli, diagnose, fault_study
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, copy_trace, new_header, open_trace
from minite_jax.errors import UserError

ROWS = Rows([5, 6, 7, 8, 9, 4], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1])


def trace(rows=ROWS, **tensors):
    result = MemoryTrace(new_header(rows, engine={"name": "test", "recipe": "none"}))
    for name, array in tensors.items():
        result.add(name.replace("__", "/"), array)
    return result.close()


def test_a_difference_is_printed_with_its_place(tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    y = x.copy()
    y[4, 3] += 1
    before = {f"op{i}": x for i in range(6)}
    a, b = trace(**before, hidden__out=x), trace(**before, hidden__out=y)
    assert diagnose.report(a, a) == 0
    assert "first difference: none, all bits are equal" in capsys.readouterr().out
    assert diagnose.report(a, b) == 3
    out = capsys.readouterr().out
    assert "first difference: hidden/out, first at sequence 1, position 1" in out
    assert "look at: hidden/out" in out


def test_other_tokens_come_before_everything(capsys):
    other = Rows([5, 6, 1, 8, 9, 4], ROWS.positions, ROWS.sequences)
    x = np.ones((6, 2), np.float32)
    assert diagnose.report(trace(embed=x), trace(other, embed=x)) == 3
    out = capsys.readouterr().out
    assert "other token ids: sequence 0, token 2: 7 in the first trace, 1 in the second" in out
    assert "tensors are not compared: mend that first" in out


def test_sequences_of_a_trace():
    tokens, lengths = diagnose.padded(trace(embed=np.ones((6, 1), np.float32)))
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 4]] and lengths.tolist() == [3, 3]
    with pytest.raises(UserError, match="sequence 0 does not have positions 0 to 1, each once"):
        diagnose.padded(trace(Rows([1, 2], [0, 2], [0, 0]), embed=np.ones((2, 1), np.float32)))


LOG = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0]}


def log(path, *records, **changes):
    path.write_text("\r\n\n".join(json.dumps(LOG | changes | record) for record in records or ({},)), encoding="utf-8-sig")
    return str(path)


def test_logs_and_folders_are_told_apart(tmp_path):
    diagnose.flags.FLAGS.mark_as_parsed()
    for name in ("log.jsonl", "log.txt", "log"):
        read = diagnose.read(log(tmp_path / name, {}, {}))
        assert read.names == ["final/log_prob"] and read.rows.sequences.tolist() == [0, 0, 1, 1]
    copy_trace(trace(embed=np.ones((6, 1), np.float32)), tmp_path / "t")
    for path in ("t", "t/trace.json"):
        assert diagnose.read(str(tmp_path / path)).names == ["embed"]
    for path, message in (("none", "there is no .*none: give the folder"), ("t/part-00000.safetensors", "UTF-8|not JSON")):
        with pytest.raises(UserError, match=message):
            diagnose.read(str(tmp_path / path))


@pytest.mark.slow
def test_log_probs_alone_show_a_gap_but_no_place(tmp_path, capsys):
    diagnose.flags.FLAGS.mark_as_parsed()
    a, b = (diagnose.read(log(tmp_path / name, logprobs=[value])) for name, value in (("a", -1.0), ("b", -3.0)))
    assert diagnose.report(a, b) == 0
    out = capsys.readouterr().out
    assert "log-probs: mean |difference| 2 nats, largest 2, 0 % of 1 tokens of equal bits" in out
    assert "warning: token_mult_prob_error is 7.3" in out
    assert "look at: nothing that log-probs alone can show: record tensors too" in out
    wrong = diagnose.read(log(tmp_path / "wrong", logprobs=[3.0]))
    assert diagnose.report(a, wrong) == 3
    assert "log-probs above 0: 1 of 1 of the second trace, first at sequence 0, position 0" in capsys.readouterr().out


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, message in ((file, "exists: give the name of a new folder"), (file / "x", "file is no folder")):
        with pytest.raises(UserError, match=f"--out=.*{message}"):
            diagnose._check_new(path)
    diagnose._check_new(tmp_path / "new" / "deep")
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "none" / "x.html", "there is no folder .*none; make it first")):
        with pytest.raises(UserError, match=f"--html=.*{message}"):
            cli.check_page(path)
    cli.check_page(tmp_path / "x.html")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_faults():
    rows, alarms = fault_study.study(faults=12, clean=6, seed=3)
    assert all(row["exact"] for row in rows) and len(rows) == 12
    assert len(alarms) <= 1
    assert fault_study.table(rows)[-1]["faults"] == 12


def test_the_writer_for_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    path = Path(diagnose.__file__).parent.parent / "minite_jax/diagnostics/writers/torch_hooks.py"
    spec = importlib.util.spec_from_file_location("torch_hooks", path)
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    model = torch.nn.Module()
    model.embed_tokens, model.lm_head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
    ids, mask = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with hooks.TraceHooks(model, tmp_path / "t") as writer:
        writer.rows(ids, mask)
        logits = model.lm_head(model.embed_tokens(ids))
    written = open_trace(tmp_path / "t")
    assert written.names == ["embed", "final/logits", "final/log_prob"]
    assert written.rows.token_ids.tolist() == [1, 2, 3, 4, 5]
    expected = torch.log_softmax(logits, -1)[[0, 0, 1], [0, 1, 0], [2, 3, 5]].detach().numpy()
    np.testing.assert_array_equal(written.read("final/log_prob")[0], expected)
