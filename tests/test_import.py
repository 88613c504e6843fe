"""`import minite_jax` is quick and light, and none of its modules imports a heavy package when imported."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import minite_jax

HEAVY = (
    "triton", "jax_triton", "torch", "tensorflow", "matplotlib", "orbax", "tensorboardX", "safetensors", "tokenizers", "jinja2",
)  # fmt: skip


def loaded_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    root = Path(__file__).parents[1]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in listing.stdout.split()}


def test_import_is_quick_and_light():
    start = time.monotonic()
    loaded = loaded_after("import minite_jax")
    seconds = time.monotonic() - start
    assert "minite_jax" in loaded
    assert not loaded & {*HEAVY, "jax"}
    assert seconds < 10  # milliseconds in truth; the bound leaves room for a busy machine


def test_no_module_imports_a_heavy_package():
    loaded = loaded_after(
        "import importlib, pkgutil, minite_jax\n"
        "for module in pkgutil.walk_packages(minite_jax.__path__, 'minite_jax.'):\n"
        "    importlib.import_module(module.name)"
    )
    assert not loaded & set(HEAVY)


def test_public_names_resolve():
    for name in minite_jax.__all__:
        assert getattr(minite_jax, name) is not None
        assert name in dir(minite_jax)
    with pytest.raises(AttributeError, match="no_such_name"):
        minite_jax.no_such_name  # noqa: B018


def test_missing_package_names_its_extra():
    from minite_jax.optional import require

    assert require("json", "experiments").loads("[1]") == [1]
    with pytest.raises(ImportError, match=r"pip install 'minite_jax\[experiments\]'"):
        require("no_such_package.inner", "experiments")
