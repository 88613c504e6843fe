import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def _run(file: str, mode: str) -> dict:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(_ROOT),
        "TRITON_INTERPRET": "1" if mode == "interpret" else "0",
    }
    done = subprocess.run([sys.executable, file, mode], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def child(request):
    """Results of this test file as a program, by mode; see `child.py`."""
    return functools.partial(_run, str(request.path))
