"""One small model, its policies and its NVFP4 folders, made once for all tests here."""


import pytest
from nvfp4_models import CONFIG, as_others_have_it, random_params

import minite_jax as mt


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A plain folder, with a file beside its weights."""
    out = mt.save_huggingface(tmp_path_factory.mktemp("plain") / "model", random_params(CONFIG), CONFIG)
    (out / "tokenizer.json").write_text("{}")
    return out


@pytest.fixture(scope="session")
def policies(model):
    """Function of a recipe's name: the model's policy. Made once."""
    policy = mt.prepare_huggingface(model, mt.recipe("nvfp4"))
    return {"nvfp4": policy, "nvfp4_te": as_others_have_it(policy)}.__getitem__


@pytest.fixture
def folder(policies, model, tmp_path):
    """Function of a layout and a recipe: a new folder, to spoil."""

    def write(layout="modelopt", recipe="nvfp4", **more):
        return mt.save_nvfp4(
            tmp_path / f"{layout} {recipe}", policies(recipe), layout=layout, like=model, **more
        )

    return write
