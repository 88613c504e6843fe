"""Provenance: what a figure needs to be believed, inside and outside a checkout."""

import datetime
import json
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from minite_jax.metrics import provenance as module


def git(folder, *arguments):
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "--quiet", "checkout")
    git(package, "add", ".")
    git(package, "commit", "--quiet", "--message", "first")
    return package


def test_keys_and_json():
    found = module.provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["device_count"] == jax.device_count() and found["backend"] == jax.default_backend()
    assert found["versions"]["jax"] == jax.__version__ and found["versions"]["python"].startswith("3.")
    assert {"jaxlib", "flax", "optax", "numpy", "triton", "jax_triton", "minite_jax"} <= set(found["versions"])
    assert all(isinstance(found[key], str) and found[key] for key in ("device", "platform", "revision", "command"))
    date = datetime.datetime.fromisoformat(found["date"])
    assert abs(datetime.datetime.now(datetime.UTC) - date) < datetime.timedelta(minutes=5)


def test_revision_and_dirty_flag(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert module._revision(checkout) == (head, False)
    (checkout / "new.py").write_text("")
    assert module._revision(checkout) == (head, True)


def test_outside_a_checkout_the_revision_is_unknown(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    assert module._revision(tmp_path) == ("unknown", None)


def test_a_copy_inside_another_checkout_does_not_take_its_commit(checkout):
    installed = checkout.parent / "site-packages" / "minite_jax"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert module._revision(installed) == ("unknown", None)


def test_without_git_the_revision_is_unknown(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(checkout)))
    assert module._revision(checkout) == ("unknown", None)


def test_missing_package_is_said():
    assert module._version("no-such-package-of-anybody") == "not installed"
