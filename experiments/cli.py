"""The command line of every script: shared flags, and mistakes answered in one line.

    _CONFIG = cli.config_flag()
    _WORKDIR = cli.workdir_flag()

    def main(argv): ...

    if __name__ == "__main__":
        cli.run(main, config="configs/quickstart.py")

A wrong flag, a misspelt configuration field or an unusable file ends the script with one line on stderr that
says what is wrong and how to mend it, and a status that is not 0. `--traceback` shows where such an error was
raised. `--implementation` says whether operations run as the reference or as kernels (`pallas_kernels.dispatch`).
"""

import difflib
import functools
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from minite_jax.checkpoint.config import flat_fields, to_plain
from minite_jax.errors import UserError
from minite_jax.files import hindrance
from minite_jax.metrics.provenance import provenance
from minite_jax.optional import require
from pallas_kernels import dispatch

# Errors that mean wrong input rather than a mistake in the code, as long as their message is one line.
_EXPECTED = (UserError, OSError, ValueError, OverflowError, NotImplementedError, ImportError)
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, dispatch.IMPLEMENTATIONS, "What operations run as, where they have it. Default: kernels on a GPU."
)
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show the traceback of errors that are one line otherwise.")


@functools.cache
def config_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--config=FILE` and `--config.field=value`; a second call gives the same flag."""
    config_flags = require("ml_collections.config_flags.config_flags", "experiments")
    # No default here: it would be read while the flag is defined, before anybody can catch what is wrong.
    return config_flags.DEFINE_config_file(
        "config",
        None,
        "Configuration file; --config.field=value changes one field.",
        flag_values,
        lock_config=True,
    )


@functools.cache
def workdir_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--workdir`, the folder that a run writes into; a second call gives the same flag."""
    return flags.DEFINE_string(
        "workdir", None, "Folder of the run: config.json, metrics.jsonl, checkpoints/, plots/.", flag_values
    )


@functools.cache
def out_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--out`, what a script writes; a second call gives the same flag. None: the script's own place."""
    return flags.DEFINE_string("out", None, "File or folder to write in place of the script's usual one.", flag_values)


@functools.cache
def checkpoint_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--checkpoint`, the model that a script reads; a second call gives the same flag."""
    return flags.DEFINE_string(
        "checkpoint", None, "Workdir of a run; in some scripts also a Hugging Face model's folder or a GGUF file.", flag_values
    )


@functools.cache
def results_dir_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--results_dir`, where result files go; a second call gives the same flag. None: the script's own place."""
    return flags.DEFINE_string("results_dir", None, "Folder of the result files.", flag_values)


@functools.cache
def html_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--html`, a page with pictures that a script also writes; a second call gives the same flag."""
    return flags.DEFINE_string("html", None, "Also write what was found to this file, as one page with pictures.", flag_values)


def check_page(file: str | None) -> None:
    """Refuses a file for `--html` that cannot be written, before the work is done for it.

    Raises:
        UserError: it is a folder, or its folder is missing or not writable.
    """
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise UserError(f"--html={path} is a folder: give the name of a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--html={path}: there is no folder {path.parent}; make it first")
    if (why := hindrance(path.parent)) is not None:
        raise UserError(f"--html={path} cannot be written: {why}")


@functools.cache
def recipe_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--recipe`; a second call gives the same flag. None: the run's own, or what the script says."""
    return flags.DEFINE_string(
        "recipe", None, "Precision recipe. Default: the run's own; else bf16, or nvfp4 where NVFP4 is written.", flag_values
    )


@functools.cache
def prompts_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--prompts`, how many problems are answered; a second call gives the same flag. None: what the script says."""
    help = "How many problems are answered. Default: what the script says."
    return flags.DEFINE_integer("prompts", None, help, lower_bound=2, flag_values=flag_values)


@functools.cache
def rounds_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--rounds`, how often something is timed; a second call gives the same flag. None: what the script says."""
    help = "How often each thing is timed, in turns. Default: what the script says."
    return flags.DEFINE_integer("rounds", None, help, lower_bound=1, flag_values=flag_values)


@functools.cache
def minutes_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--minutes`, after which a script begins nothing new; a second call gives the same flag."""
    return flags.DEFINE_float("minutes", None, "Start nothing new after so many minutes.", flag_values=flag_values)


@functools.cache
def revision_flag(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines `--revision`, see `origin`; a second call gives the same flag."""
    help = "Git revision, where the source is a copy without its own history."
    return flags.DEFINE_string("revision", None, help, flag_values)


def origin() -> dict:
    """Where the figures of this process come from (`minite_jax.metrics.provenance`), with the revision that was given."""
    found, revision = provenance(), revision_flag().value
    return found if revision is None else found | dict(revision=revision, dirty=False)


def run(
    main: Callable[[list[str]], Any],
    config: str | None = None,
    required: tuple[str, ...] = (),
    commands: tuple[str, ...] = (),
) -> None:
    """Parses `sys.argv`, calls `main(argv)` and ends the process with its status.

    Args:
        main: the script; `argv` has the program's name, and the command where there are commands: other positional arguments
            are refused.
        config: file that `--config` stands for when the command line has none.
        required: names of flags that must be given.
        commands: names of which exactly one must be given, as in `python -m experiments.benchmark kernels`.
    """
    if config is not None and not any(re.fullmatch(r"--?config(=.*)?", each) for each in sys.argv[1:]):
        sys.argv.insert(1, f"--config={config}")  # ml_collections looks for its overrides in sys.argv itself
    app.run(functools.partial(call, main), flags_parser=functools.partial(parse, required=required, commands=commands))


def call(main: Callable[[list[str]], Any], argv: list[str]) -> Any:
    """Runs `main`, and ends the process with one line if that raises an error that is the user's to mend."""
    try:
        dispatch.prefer(_IMPLEMENTATION.value)
        return main(argv)
    except KeyboardInterrupt:
        fail("interrupted", status=130)
    except _EXPECTED as error:
        line = str(error)
        if _TRACEBACK.value or not line or "\n" in line:
            raise  # many lines: not one of ours, so the traceback is wanted
        fail(line)


def parse(
    argv: list[str],
    flag_values: flags.FlagValues = flags.FLAGS,
    required: tuple[str, ...] = (),
    commands: tuple[str, ...] = (),
) -> list[str]:
    """Parses the command line; ends the process with one line if it is wrong.

    Args:
        argv: the command line, program name first.
        flag_values: where the flags are defined.
        required: names of flags that must be given.
        commands: names of which exactly one must be given.

    Returns:
        What is left of the command line: the program's name, and the command if there are commands.
    """
    try:
        rest = flag_values(argv)
        if "config" in flag_values and flag_values["config"].value is not None:
            # A file that cannot be loaded is kept as an object whose attributes raise what went wrong.
            to_plain(flag_values["config"].value)
    except Exception as error:  # ml_collections lets KeyError, AttributeError, TypeError, OSError, ... through
        fail(explain(error, argv))
    if commands and (len(rest) < 2 or rest[1] not in commands):
        known = " or ".join(f"`{command}`" for command in commands)
        fail(f"which command? say {known}" if len(rest) < 2 else f"there is no command {rest[1]!r}: say {known}")
    strays = rest[2:] if commands else rest[1:]
    if strays:
        fail(f"{strays[0]!r} is no flag: flags look like --name=value")
    missing = [name for name in required if flag_values[name].value in (None, "")]
    if missing:
        how = "missing" if flag_values[missing[0]].value is None else "empty"
        fail(f"--{missing[0]} is {how}: give --{missing[0]}=... ({flag_values[missing[0]].help.rstrip('.')})")
    return rest


def explain(error: BaseException, argv: list[str]) -> str:
    """Returns one line that says what is wrong with a command line whose parsing raised `error`."""
    file = _config_file(argv)
    if file is not None:
        path, _, argument = file.partition(":")
        if not Path(path).is_file():
            near = difflib.get_close_matches(Path(path).name, [each.name for each in Path(path).parent.glob("*.py")])
            hint = f"did you mean {Path(path).parent / near[0]}?" if near else "give the path of a file with get_config()"
            return f"there is no configuration file {path}: {hint}"
        try:
            config = _load_config(path, argument)
        except SyntaxError as mistake:
            return f"{mistake.filename}, line {mistake.lineno}: {mistake.msg}"
        except Exception as mistake:
            return f"{path} could not be read as a configuration: {_first_line(mistake)}"
        fields = flat_fields(config)
        for name in _overrides(argv):
            sections = {field.rsplit(".", depth)[0] for field in fields for depth in range(1, field.count(".") + 1)}
            if name not in fields and name not in sections:
                return f"unknown field --config.{name}{_suggest(name, list(fields), path)}"
    message = _first_line(error)
    unknown = re.fullmatch(r"Unknown command line flag '([^']*)'\.?(?: Did you mean: (.*?) ?\?)?", message)
    if unknown:
        name, near = unknown.groups()
        names = " or ".join(f"--{each.strip()}" for each in near.split(",")) if near else None
        return f"unknown flag --{name}: " + (f"did you mean {names}?" if names else "--help lists the flags")
    return message


def fail(message: str, status: int = 1) -> None:
    """Ends the process with `message` as the one line on stderr."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    sys.exit(status)


def _suggest(name: str, fields: list[str], path: str) -> str:
    # A field of the same name in another section is as likely as a misspelt one.
    last = name.rsplit(".", 1)[-1]
    near = [field for field in fields if field.rsplit(".", 1)[-1] == last]
    near += [field for field in difflib.get_close_matches(name, fields, n=3, cutoff=0.6) if field not in near]
    if near:
        return ": did you mean " + " or ".join(f"--config.{field}" for field in near[:3]) + "?"
    return f": {path} lists the fields"


def _config_file(argv: list[str]) -> str | None:
    for index, argument in enumerate(argv[1:], start=1):
        if match := re.fullmatch(r"--?config=(.*)", argument):
            return match[1]
        if re.fullmatch(r"--?config", argument) and index + 1 < len(argv):
            return argv[index + 1]
    return None


def _overrides(argv: list[str]) -> list[str]:
    matches = (re.match(r"--?config\.([^=]+)", argument) for argument in argv[1:])
    return [re.sub(r"\[.*?\]", "", match[1]) for match in matches if match]  # `field[0]` is an entry of `field`


def _load_config(path: str, argument: str) -> dict[str, Any]:
    namespace = runpy.run_path(path)
    if "get_config" not in namespace:
        raise ValueError("it has no function get_config()")
    return to_plain(namespace["get_config"](*([argument] if argument else [])))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
