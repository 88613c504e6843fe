"""Settings of the whole test-suite: device, shape checks, strict broadcasting."""

import itertools
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

# Compiling is most of what the fast tests cost, and LLVM's optimisations are half of that. The fast tests of these folders ask
# what a program does, not how a compiler bends it, and leave them out; their slow tests have them, and with --optimized (`make
# test-all`) all do. Bits are held under XLA's defaults: in contracts, kernels, learner, model, nvfp4 and ops.
_COMPILED_QUICKLY = {"baselines", "checkpoint", "diagnostics", "experiments", "gguf", "huggingface"}

# XLA takes three memory mappings for every kernel of a CPU's program, a thousand for a sampler's. Linux gives a process 65,530 as
# a rule, and without one more XLA's compiler ends the process by a segmentation fault. Counting takes up to 0.1 s.
_MOST_MAPPINGS, _TESTS_BETWEEN = 40_000, 10
_tests_begun = itertools.count()


def _mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        choices=("cpu", "gpu"),
        help="where the tests run: by default those marked gpu on a GPU, all others on the CPU. With gpu, `pytest --platform=gpu "
        "tests/contracts` holds a GPU's kernels to the contracts",
    )
    parser.addoption("--optimized", action="store_true", help="compile the programs of all tests with XLA's optimisations")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): as pytest-xdist knows it; here for runs without that plugin")
    marked_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    wants_gpu = config.getoption("platform") == "gpu" or (config.getoption("platform") is None and marked_gpu)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    import jax

    wants_all = item.config.getoption("optimized") or any(item.get_closest_marker(name) for name in ("slow", "gpu"))
    quickly = item.path.parent.name in _COMPILED_QUICKLY and not wants_all
    of_another_kind = not quickly and os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"  # no part of the caches' keys
    counts = next(_tests_begun) % _TESTS_BETWEEN == 0 or item.get_closest_marker("slow")
    if of_another_kind or (counts and _mappings() > _MOST_MAPPINGS):
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", quickly)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))  # for the subprocesses of tests
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU, and JAX sees none")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` one process takes a whole file, unless its tests are grouped otherwise: a file's tests share what
    they compile. Tests with a group of their own come first: those groups take longest, and the short ones then fill the gaps.
    """
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
