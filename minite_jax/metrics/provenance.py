"""Where a figure comes from: device, versions, revision, command, date."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
NOT_INSTALLED = "not installed"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "triton", "jax-triton")


def provenance() -> dict[str, Any]:
    """Returns what a reader needs to know about the origin of a measurement.

    Keys: `device` (name of the accelerator, or of the processor), `device_count`, `backend`, `platform`,
    `versions` (python, minite_jax, jax, jaxlib, flax, optax, numpy, triton, jax_triton; "not installed"
    where it is not), `revision` (git commit of the source, "unknown" outside a checkout), `dirty` (True if
    the checkout differs from that commit or holds files that git does not know, None if unknown), `date`
    (UTC, ISO 8601), `command`.

    It starts the JAX backend, because it asks for the device.
    """
    import jax  # here, so that reading results needs no JAX

    import minite_jax

    devices = jax.devices()
    revision, dirty = _revision()
    versions = {"python": platform.python_version(), "minite_jax": minite_jax.__version__}
    versions |= {package.replace("-", "_"): _version(package) for package in _PACKAGES}
    return {
        "device": _processor() if devices[0].platform == "cpu" else devices[0].device_kind,
        "device_count": len(devices),
        "backend": devices[0].platform,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "revision": revision,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        name = name or UNKNOWN  # no such file outside Linux: the machine's type has to do
    return f"{name} ({len(os.sched_getaffinity(0))} cores)" if hasattr(os, "sched_getaffinity") else name


def _revision(package: Path = Path(__file__).parents[1]) -> tuple[str, bool | None]:
    """Commit and dirty flag of the checkout that tracks `package`; ("unknown", None) if none does."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        # An installed copy may lie in an ignored folder of somebody else's checkout: that commit says
        # nothing about us.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN, None


def _command() -> str:
    arguments = sys.orig_argv[1:]
    return shlex.join(["python", *arguments])
