"""Scripts are called in this process: their flags have to count as parsed."""

import pytest
from absl import flags


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
