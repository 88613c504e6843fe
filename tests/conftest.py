"""Settings of the whole test-suite: device, shape checks, strict broadcasting."""

import os
import pathlib

import pytest
from jaxtyping import install_import_hook

# Before anything imports these packages: every jaxtyping annotation is checked when its function is called. Not in the kernels'
# modules, whose functions are compiled by Triton.
_ROOT = pathlib.Path(__file__).parent.parent
_CHECKED = [
    ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    for path in (_ROOT / "pallas_kernels").rglob("*.py")
    if path.stem != "__init__" and not path.stem.startswith("triton")
]
install_import_hook(["minite_jax", *_CHECKED], "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    wants_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    settings = {"JAX_NUMPY_RANK_PROMOTION": "raise"}
    if not wants_gpu:
        # Two CPU devices, so that sharded restores can be tested. Arrays go to the first one by default.
        settings |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    os.environ.update(settings)  # for the subprocesses of tests

    import jax  # after the settings above

    jax.config.update("jax_numpy_rank_promotion", "raise")
    if not wants_gpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU, and JAX sees none")
