"""Held-out problems that scripts ask for."""

import pytest

from configs import quickstart
from experiments.build import build
from experiments.evaluation import held_out_prompts
from minite_jax.errors import UserError


def test_more_problems_than_there_are_is_one_line():
    setup = build(quickstart.get_config())
    has = setup.task.size("heldout")
    assert len(held_out_prompts(setup, 3)) == 3
    with pytest.raises(UserError, match=f"{has + 1} held-out problems are asked for.* has {has}: ask for fewer"):
        held_out_prompts(setup, has + 1)
