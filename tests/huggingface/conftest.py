"""Folders of small models, see `tests/data/huggingface`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from minite_jax.checkpoint.huggingface import files

DATA = Path(__file__).parents[1] / "data" / "huggingface"


@pytest.fixture(scope="session")
def data():
    """The folder with the models."""
    return DATA


@pytest.fixture
def copy_of(tmp_path):
    """Function of a model's name: a copy of its folder, to spoil."""

    def copy(name):
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return copy


@pytest.fixture
def rewrite():
    """Function that writes a safetensors file anew from ``{name: (dtype, shape, bytes)}``."""

    def write(path, tensors):
        order, header, _ = files.make_header({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
        path.write_bytes(header + b"".join(tensors[name][2] for name in order))

    return write


@pytest.fixture
def contents():
    """Function of a safetensors file: ``{name: (dtype, shape, bytes)}``."""

    def read(path):
        tensors, _ = files.read_header(path)
        raw = path.read_bytes()
        return {name: (each.dtype, each.shape, raw[each.offset : each.offset + each.nbytes]) for name, each in tensors.items()}

    return read


@pytest.fixture
def edit_json():
    """Function that changes keys of a JSON file; None removes one."""

    def edit(path, **changes):
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit


@pytest.fixture(scope="session")
def expected():
    """Function of a model's name: what transformers computes for it."""
    return lambda name: np.load(DATA / name / "expected.npz")
