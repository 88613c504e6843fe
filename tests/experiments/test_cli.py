"""A wrong command line is one line and a status that is not 0, never a traceback."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import cli
from minite_jax.checkpoint import CheckpointError

ROOT = Path(__file__).parents[2]
CONFIG = """
import ml_collections

def get_config(size="small"):
    sampler = ml_collections.ConfigDict({"engine": "aligned", "temperature": 1.0})
    fields = {"lr": 1e-3, "steps": 3, "size": size, "sampler": sampler, "stop": (1, 2)}
    return ml_collections.ConfigDict(fields)
"""
SCRIPT = """
from pathlib import Path
from experiments import cli
from minite_jax.errors import UserError

_CONFIG = cli.config_flag()
_WORKDIR = cli.workdir_flag()

def main(argv):
    if _CONFIG.value.steps == 13:
        raise UserError("steps is 13: choose another number")
    Path(_WORKDIR.value).mkdir()
    print(_CONFIG.value.steps, _CONFIG.value.sampler.engine)

cli.run(main, config="config.py", required=("workdir",))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def get_config(:\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def parse(folder, monkeypatch, capsys):
    """Parses a command line with flags of its own; returns the line on stderr, or the flags if right."""

    def parse(*arguments):
        monkeypatch.delitem(sys.modules, "config_config", raising=False)  # an earlier test's configuration
        values = flags.FlagValues()
        cli.config_flag(values)
        cli.workdir_flag(values)
        argv = ["script.py", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            cli.parse(argv, values, required=("workdir",))
        except SystemExit as end:
            assert end.code == 1
            printed = capsys.readouterr()
            assert printed.out == "" and printed.err.count("\n") == 1
            return printed.err.strip()
        return values

    return parse


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "--config.sampler.engin=naive",
            "unknown field --config.sampler.engin: did you mean --config.sampler.engine?",
        ),
        ("--config.engine=x", "unknown field --config.engine: did you mean --config.sampler.engine?"),
        (
            "--config.samplr.engine=naive",
            "unknown field --config.samplr.engine: did you mean --config.sampler.engine?",
        ),
        (
            "--config.sampler.engine.x=1",
            "unknown field --config.sampler.engine.x: did you mean --config.sampler.engine?",
        ),
        ("--config.zzz=1", "unknown field --config.zzz: config.py lists the fields"),
        ("--config.lr=abc", "flag --config.lr=abc: could not convert string to float: 'abc'"),
        ("--config.steps=2.5", "flag --config.steps=2.5: invalid literal for int() with base 10: '2.5'"),
        ("--workdr=x", "unknown flag --workdr: did you mean --workdir?"),
        ("--zzz=x", "unknown flag --zzz: --help lists the flags"),
        ("stray", "'stray' is no flag: flags look like --name=value"),
    ],
)
def test_wrong_arguments(parse, argument, line):
    assert parse("--config=config.py", "--workdir=x", argument) == f"script: {line}"


def test_an_empty_workdir_is_not_the_folder_at_hand(parse):
    assert parse("--config=config.py", "--workdir=").startswith(
        "script: --workdir is empty: give --workdir=... (Folder of the run"
    )


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("confg.py", "there is no configuration file confg.py: did you mean config.py?"),
        (
            "zzz/none.py",
            "there is no configuration file zzz/none.py: give the path of a file with get_config()",
        ),
        ("broken.py", "broken.py, line 1: invalid syntax"),
        ("empty.py", "empty.py could not be read as a configuration: it has no function get_config()"),
    ],
)
def test_wrong_files(parse, file, line):
    assert parse(f"--config={file}", "--workdir=x") == f"script: {line}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "which command? say `kernels` or `tune`"),
        (["kernel"], "there is no command 'kernel': say `kernels` or `tune`"),
        (["kernels", "stray"], "'stray' is no flag: flags look like --name=value"),
    ],
)
def test_wrong_commands(arguments, line, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["script.py", *arguments], flags.FlagValues(), commands=("kernels", "tune"))
    assert capsys.readouterr().err.strip().partition(": ")[2] == line


def test_a_command_may_stand_before_or_behind_flags():
    for arguments in (["kernels", "--repeats=3"], ["--repeats=3", "kernels"]):
        values = flags.FlagValues()
        repeats = flags.DEFINE_integer("repeats", 20, "Repeats.", flag_values=values)
        assert cli.parse(["script.py", *arguments], values, commands=("kernels", "tune")) == ["script.py", "kernels"]
        assert repeats.value == 3


def test_a_required_flag_is_asked_for(parse):
    assert parse("--config=config.py").startswith("script: --workdir is missing: give --workdir=... (Folder of the run")


def test_what_is_right_is_parsed(parse):
    values = parse("--config=config.py:large", "--workdir=x", "--config.sampler.engine=naive", "--config.lr", "2")
    assert values.config.sampler.engine == "naive" and values.config.lr == 2.0 and values.config.size == "large"


def raises(error):
    def main(_):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (CheckpointError("there is no checkpoint"), "there is no checkpoint", 1),
        (ValueError("K = 17 is not a multiple of 16"), "K = 17 is not a multiple of 16", 1),
        (OverflowError("int too large to convert to float"), "int too large to convert to float", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_errors_of_a_script_that_the_user_can_mend(capsys, error, line, status):
    with pytest.raises(SystemExit) as end:
        cli.call(raises(error), ["x"])
    assert end.value.code == status
    assert capsys.readouterr().err.split(": ", 1)[1] == f"{line}\n"


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("two\nlines"), ValueError(), AssertionError("x")])
def test_mistakes_in_the_code_keep_their_traceback(error):
    with pytest.raises(type(error)):
        cli.call(raises(error), ["x"])


def test_traceback_on_demand():
    with flagsaver.flagsaver(traceback=True), pytest.raises(ValueError, match="wrong"):
        cli.call(raises(ValueError("wrong")), ["x"])


def test_flags_are_shared_by_all_scripts():
    assert cli.workdir_flag() is cli.workdir_flag() and cli.config_flag() is cli.config_flag()


def run_script(folder, *arguments):
    command = [sys.executable, "script.py", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_script_from_start_to_end(folder):
    right = run_script(folder, "--workdir=run", "--config.steps=7")
    assert (right.returncode, right.stdout, right.stderr) == (0, "7 aligned\n", "")
    for arguments in (["--config.stesp=7"], ["--config.steps=13"]):
        wrong = run_script(folder, "--workdir=other", *arguments)
        assert wrong.returncode == 1 and wrong.stdout == ""
        assert wrong.stderr.startswith("script: ") and wrong.stderr.count("\n") == 1
    assert not (folder / "other").exists()


def test_all_scripts_together_define_no_flag_twice():
    """Tests import several scripts into one process, and a notebook may."""
    code = (
        "import importlib, pkgutil, experiments\n"
        "for module in pkgutil.iter_modules(experiments.__path__):\n"
        "    importlib.import_module(f'experiments.{module.name}')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
