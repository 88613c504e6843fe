"""Saving and restoring a training state with orbax.

    workdir/checkpoints/<step>/state/           the arrays, in orbax's format, one flat entry per leaf
                               config.json      the configuration of the run
                               manifest.json    every leaf's shape and dtype, every file's size and CRC-32

A step's folder is written under a temporary name and renamed when it is whole, so a folder named by a number
is always a finished checkpoint. Orbax notices neither a flipped bit nor a wrong dtype; the manifest is there
for both.
"""

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import PyTree

from minite_jax.checkpoint import leaves as leaf_lib
from minite_jax.checkpoint.config import check_config, to_plain
from minite_jax.checkpoint.errors import CheckpointError

FORMAT = 1
_UNFINISHED = ".unfinished-"


def has_only_leftovers(workdir: str | os.PathLike) -> bool:
    """Whether a folder holds what a killed `save` left, which the next one removes, and nothing else."""
    folder = Path(workdir) / "checkpoints"
    entries = [*folder.iterdir()] if folder.is_dir() else []
    return bool(entries) and all(each.name.startswith(_UNFINISHED) for each in entries) and len(os.listdir(workdir)) == 1


def save(workdir: str | os.PathLike, step: int, state: PyTree, config: Any, keep: int | None = 3) -> Path:
    """Writes a checkpoint and returns its folder.

    It is synchronous: when it returns, the files are written and the arrays may be donated. Until then the
    newest checkpoint is the previous one, and if anything fails it stays so.

    Args:
        workdir: folder of the run.
        step: number of the checkpoint, at least 0.
        state: pytree whose leaves are arrays of any dtype or typed PRNG keys (flax.struct dataclasses, optax
            states).
        config: what the run was configured with; see `to_plain`.
        keep: so many of the newest checkpoints stay, older ones are deleted; None keeps all.

    Raises:
        CheckpointError: the step is there already, a leaf is no array, or writing failed (a full disk, say).
        TypeError: the configuration cannot be written as JSON.
        ValueError: `step` is negative or `keep` is below 1.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"a checkpoint needs step >= 0 and keep >= 1 (or None), not step {step} and keep {keep}")
    if jax.process_count() > 1:
        raise CheckpointError("checkpoints are written by one process; this run has several")
    arrays = leaf_lib.flatten(state)
    described = {name: leaf_lib.describe(name, leaf) for name, leaf in arrays.items()}
    plain = to_plain(config)
    folder = _folder(workdir)
    final = folder / str(step)
    if final.exists():
        raise CheckpointError(f"{final} exists already: resume from it, or choose another --workdir")
    unfinished = folder / f"{_UNFINISHED}{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
            shutil.rmtree(leftover)
        unfinished.mkdir()
        _write_arrays(unfinished / "state", arrays, described)
        (unfinished / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
        manifest = {
            "format": FORMAT,
            "leaves": {name: leaf.to_json() for name, leaf in described.items()},
            "files": {name: list(_fingerprint(path)) for name, path in _files(unfinished)},
        }
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        unfinished.rename(final)
    except Exception as error:  # orbax and tensorstore raise many types
        newest = latest_step(workdir)
        left = "there is no earlier one" if newest is None else f"the checkpoint of step {newest} is untouched"
        raise CheckpointError(f"could not save step {step} under {folder}: {_reason(error)}; {left}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # also after Ctrl-C
    _prune(folder, keep)
    return final


def restore(
    workdir: str | os.PathLike,
    template: PyTree,
    config: Any,
    step: int | None = None,
    may_differ: Collection[str] = (),
) -> PyTree:
    """Reads a checkpoint into the structure of `template`.

    Args:
        workdir: folder of the run.
        template: pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes that are
            wanted; their values are not read. Each restored array has its template's sharding, or lies on the
            default device where the template names none.
        config: the configuration at hand; it must equal the checkpoint's.
        step: which checkpoint; None takes the newest.
        may_differ: dotted fields of the configuration that need not agree, such as the number of steps.

    Returns:
        A pytree like `template`, equal in every bit to what was saved.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, it comes from another configuration, or a
            leaf has another shape or dtype than the template's, or is missing or unknown. Names what differs.
    """
    where, path = _find(workdir, step)
    wanted = leaf_lib.flatten(template)
    described = {name: leaf_lib.describe(name, leaf) for name, leaf in wanted.items()}
    manifest = _read_manifest(workdir, where, path)
    check_config(where, _read_json(workdir, where, path / "config.json"), config, may_differ)
    leaf_lib.check_fit(where, manifest, described)
    try:
        arrays = _read_arrays(path / "state", wanted, described)
    except Exception as error:  # orbax and tensorstore raise many types
        raise _damaged(workdir, where, path, _reason(error)) from error
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])


def steps(workdir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a finished checkpoint, in order; empty if there is none."""
    folder = _folder(workdir)
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def latest_step(workdir: str | os.PathLike) -> int | None:
    """Returns the newest step that has a finished checkpoint, None if there is none."""
    return max(steps(workdir), default=None)


def read_config(workdir: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """Returns the configuration of a checkpoint (the newest by default) as plain data.

    Raises:
        CheckpointError: there is no such checkpoint, or its configuration cannot be read.
    """
    where, path = _find(workdir, step)
    return _read_json(workdir, where, path / "config.json")


def _folder(workdir: str | os.PathLike) -> Path:
    return Path(workdir).absolute() / "checkpoints"  # orbax wants absolute paths


def _find(workdir: str | os.PathLike, step: int | None) -> tuple[str, Path]:
    present = steps(workdir)
    if not present:
        raise CheckpointError(f"there is no checkpoint in {_folder(workdir)}: check --workdir, or start a new run")
    step = present[-1] if step is None else step
    if step not in present:
        raise CheckpointError(f"there is no checkpoint of step {step} in {_folder(workdir)}: it has {_listed(present)}")
    path = _folder(workdir) / str(step)
    return f"checkpoint {path}", path


def _listed(present: list[int]) -> str:
    return ", ".join(str(step) for step in present)


def _damaged(workdir: str | os.PathLike, where: str, path: Path, reason: str) -> CheckpointError:
    others = [step for step in steps(workdir) if str(step) != path.name]
    remedy = f"to go on from step {others[-1]}" if others else "and start the run again, it has no other"
    return CheckpointError(f"{where} is damaged, {reason}: delete that folder {remedy}")


def _read_json(workdir: str | os.PathLike, where: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(workdir, where, path.parent, f"{path.name} cannot be read ({_reason(error)})") from error
    if not isinstance(content, dict):
        raise _damaged(workdir, where, path.parent, f"{path.name} holds no JSON object")
    return content


def _read_manifest(workdir: str | os.PathLike, where: str, path: Path) -> dict[str, leaf_lib.Leaf]:
    """Checks every file of a checkpoint against its manifest; returns the descriptions of the leaves."""
    manifest = _read_json(workdir, where, path / "manifest.json")
    if manifest.get("format") != FORMAT:
        stored = manifest.get("format")
        raise CheckpointError(f"{where} has format {stored!r}, this version reads {FORMAT}: use the version that wrote it")
    try:
        stored = {name: leaf_lib.Leaf.from_json(leaf) for name, leaf in manifest["leaves"].items()}
        expected = {name: (size, crc) for name, (size, crc) in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(workdir, where, path, "manifest.json is not what was written") from error
    found = dict(_files(path))
    for name, fingerprint in expected.items():
        if name not in found:
            raise _damaged(workdir, where, path, f"the file {name} is missing")
        if _fingerprint(found[name]) != fingerprint:
            raise _damaged(workdir, where, path, f"the file {name} is not what was written")
    return stored


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a checkpoint that its manifest lists, with their relative names."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != "manifest.json":
            yield name, path


def _fingerprint(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file. Of files, not arrays: that needs no device and no sharding."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _write_arrays(path: Path, arrays: dict[str, Any], described: dict[str, leaf_lib.Leaf]) -> None:
    import orbax.checkpoint as ocp  # here: it takes half a second, and most uses of the package need none

    stored = {
        name: jax.random.key_data(leaf) if leaf_lib.is_key(leaf) else leaf
        for name, leaf in arrays.items()
        if 0 not in described[name].shape  # orbax stores no empty arrays; the manifest says all about them
    }
    stored = {name: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf for name, leaf in stored.items()}
    if not stored:
        path.mkdir()
        return
    with _quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(stored))


def _read_arrays(path: Path, wanted: dict[str, Any], described: dict[str, leaf_lib.Leaf]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    arrays: dict[str, Any] = {}
    restore_args = {}
    for name, leaf in wanted.items():
        if 0 in described[name].shape:
            arrays[name] = _empty(leaf)
        elif isinstance(leaf, np.ndarray | np.generic):
            restore_args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        elif leaf_lib.is_key(leaf):
            restore_args[name] = ocp.ArrayRestoreArgs(sharding=_default_sharding())
        else:
            restore_args[name] = ocp.ArrayRestoreArgs(sharding=leaf.sharding or _default_sharding())
    if restore_args:
        with _quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays |= checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    for name, leaf in described.items():
        if leaf.key_impl is not None and 0 not in leaf.shape:
            keys = jax.random.wrap_key_data(arrays[name], impl=leaf.key_impl)
            arrays[name] = jax.device_put(keys, wanted[name].sharding or _default_sharding())
        got = leaf_lib.describe(name, arrays[name])
        if got != leaf:
            raise ValueError(f"{name!r} came back as {got} where {leaf} was saved")
    return arrays


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps orbax from logging the traceback of an error that it raises as well."""
    logger = logging.get_absl_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)


def _empty(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.zeros(leaf.shape, leaf.dtype)
    if leaf_lib.is_key(leaf):
        return jax.random.split(jax.random.key(0, impl=leaf_lib.key_impl(leaf)), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding or _default_sharding())


def _default_sharding() -> jax.sharding.Sharding:
    return jnp.zeros(()).sharding


def _prune(folder: Path, keep: int | None) -> None:
    if keep is None:
        return
    for step in steps(folder.parent)[:-keep]:
        doomed = folder / f"{_UNFINISHED}old-{step}"
        try:
            # First the name, then the files: a folder named by a number is whole at every moment.
            (folder / str(step)).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logging.warning("could not delete the old checkpoint of step %d: %s", step, error)


def _reason(error: BaseException) -> str:
    """One line that says why: the errno's text where the system gave one, else the start of the message."""
    cause: BaseException | None = error
    full = os.strerror(errno.ENOSPC)
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC or full in str(cause):
            return full  # tensorstore wraps it in its own error type and a long text
        cause = cause.__cause__ or cause.__context__
    first_line = (str(error).strip().splitlines() or [""])[0]
    return (first_line or type(error).__name__)[:200]
