"""Scripts are called in this process: their flags have to count as parsed."""

import jax
import pytest
from absl import flags

from experiments.kernels import measure


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])


@pytest.fixture
def no_arrays(monkeypatch):
    """The benchmark's inputs are shapes alone."""
    monkeypatch.setattr(measure, "make_sets", lambda make, key, count: [jax.eval_shape(make, key)] * count)
