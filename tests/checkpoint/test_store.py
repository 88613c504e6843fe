"""Checkpoints come back with every bit, or with one clear line that says why not."""

import errno
import os
import resource
import shutil
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minite_jax import checkpoint
from minite_jax.checkpoint import CheckpointError, store

CONFIG = {"model": {"width": 64, "layers": (1, 2)}, "steps": 80, "recipe": "nvfp4"}


@flax.struct.dataclass
class State:
    params: dict
    optimizer: optax.OptState
    step: jax.Array
    key: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="state")


def make_state(seed=0, device=None):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w": jax.random.normal(keys[0], (8, 4)),
        "half": jax.random.normal(keys[1], (3,)).astype(jnp.bfloat16),
        "packed": jnp.arange(256, dtype=jnp.uint8).reshape(2, 128),
        # Every bit pattern of E4M3, NaN and -0 included.
        "scale": jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn),
        "layer.3/moe/down": jnp.array([[jnp.nan, -0.0], [jnp.inf, 1e-45]], jnp.float32),
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "layers": [jnp.ones((2,)), jnp.float16(0.1)],
        "host": np.arange(3, dtype=np.float64) / 3,
    }
    optimizer = optax.adamw(1e-3).init({"w": params["w"]})
    state = State(params, optimizer, jnp.int32(16777217), jax.random.fold_in(keys[2], 5))
    return state if device is None else jax.device_put(state, device)


def raw(leaf):
    leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf).tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        assert (left.dtype, left.shape, raw(left)) == (right.dtype, right.shape, raw(right)), path


def template_of(state):
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else jnp.zeros_like(leaf), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with one checkpoint. Tests that change it work on a copy."""
    workdir = tmp_path_factory.mktemp("run")
    checkpoint.save(workdir, 5, make_state(), CONFIG)
    return workdir


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("abstract", [False, True])
def test_every_dtype_comes_back_bit_for_bit(saved, abstract):
    state = make_state()
    template = make_state(seed=1)
    if abstract:
        shapes = jax.eval_shape(make_state)
        template = shapes.replace(params=shapes.params | {"host": np.zeros(3)})
    got = checkpoint.restore(saved, template, CONFIG)
    assert_same(got, state)
    assert int(got.step) == 16777217 and got.step.dtype == jnp.int32
    assert isinstance(got.params["host"], np.ndarray)


def test_a_restored_key_continues_the_stream(saved):
    key, restored = make_state().key, checkpoint.restore(saved, make_state(1), CONFIG).key
    assert raw(jax.random.normal(key, (16,))) == raw(jax.random.normal(restored, (16,)))
    assert raw(jax.random.split(key, 3)) == raw(jax.random.split(restored, 3))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_the_generator_of_a_key_belongs_to_it(tmp_path, impl):
    state = {"key": jax.random.split(jax.random.key(3, impl=impl), 2)}
    checkpoint.save(tmp_path, 0, state, {})
    assert_same(checkpoint.restore(tmp_path, state, {}), state)
    message = rf"'key' as PRNG key of {impl} \[2, 4\] where PRNG key of threefry2x32 \[2, 2\]|'key' as PRNG key of"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(tmp_path, {"key": jax.random.split(jax.random.key(3), 2)}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w": jnp.zeros((8, 4), jnp.bfloat16)},
            r"'params.w' as float32 \[8, 4\] where bfloat16 \[8, 4\] is wanted",
        ),
        ({"w": jnp.zeros((4, 8))}, r"'params.w' as float32 \[8, 4\] where float32 \[4, 8\] is wanted"),
        ({"packed": jnp.zeros((2, 128), jnp.int8)}, r"'params.packed' as uint8 \[2, 128\] where int8"),
        (
            {"empty": jnp.zeros((0, 3))},
            r"'params.empty' as bfloat16 \[0, 3\] where float32 \[0, 3\] is wanted",
        ),
        ({"extra": jnp.zeros(2)}, r"lacks 'params.extra' \(float32 \[2\]\)"),
        ({"layers": []}, r"has 'params.layers.0' \(float32 \[2\]\), which is unknown here"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved, change, message):
    state = make_state()
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.restore(saved, state.replace(params=state.params | change), CONFIG)
    assert "\n" not in str(caught.value)


def test_the_silent_cast_of_a_step_counter_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"'step' as int32 \[\] where float32 \[\] is wanted"):
        checkpoint.restore(saved, make_state().replace(step=jnp.float32(0)), CONFIG)


def test_a_key_is_not_its_numbers(saved):
    with pytest.raises(CheckpointError, match=r"'key' as PRNG key of threefry2x32 \[\] where uint32 \[2\]"):
        checkpoint.restore(saved, make_state().replace(key=jnp.zeros(2, jnp.uint32)), CONFIG)


def test_restored_arrays_have_the_sharding_of_the_template(saved, tmp_path):
    first, second = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=[first, second], axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("x"))
    state = make_state()
    template = jax.device_put(template_of(state), second)
    template = template.replace(params=template.params | {"w": jax.device_put(state.params["w"], split)})
    template.params["host"] = state.params["host"]
    got = checkpoint.restore(saved, template, CONFIG)
    assert_same(got, state)
    assert got.params["w"].sharding == split
    assert got.step.devices() == got.key.devices() == got.params["empty"].devices() == {second}
    # And back from two devices to one.
    checkpoint.save(tmp_path, 0, got, CONFIG)
    back = checkpoint.restore(tmp_path, state, CONFIG)
    assert_same(back, state)
    assert back.params["w"].devices() == {first}


def test_a_donating_step_right_after_a_save_changes_nothing(tmp_path):
    w = jnp.arange(4096.0)
    expected = raw(w)
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    checkpoint.save(tmp_path, 0, {"w": w}, {})
    for _ in range(3):
        w = advance(w)
    assert raw(checkpoint.restore(tmp_path, {"w": w}, {})["w"]) == expected


def test_saving_a_megabyte_is_quick(tmp_path):
    state = {str(i): jnp.full((64, 64), i, jnp.float32) for i in range(64)}
    checkpoint.save(tmp_path, 0, state, {})  # pays for importing orbax
    seconds = []
    for step in (1, 2, 3):
        start = time.monotonic()
        checkpoint.save(tmp_path, step, state, {})
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 1.0


def test_another_configuration_is_refused_by_field(saved):
    state = make_state()
    other = {"model": {"width": 32, "layers": [1, 2]}, "steps": 90, "extra": None, "recipe": "nvfp4"}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(saved, state, other)
    message = str(caught.value)
    assert "extra was absent and is null" in message
    assert "model.width was 64 and is 32" in message and "steps was 80 and is 90" in message
    assert "recipe" not in message and "layers" not in message and "\n" not in message
    checkpoint.restore(saved, state, CONFIG | {"steps": 90}, may_differ=("steps",))
    checkpoint.restore(saved, state, other, may_differ=("steps", "model", "extra"))
    with pytest.raises(CheckpointError, match="steps was 80"):
        checkpoint.restore(saved, state, CONFIG | {"steps": 90}, may_differ=("step",))
    assert checkpoint.read_config(saved) == CONFIG | {"model": {"width": 64, "layers": [1, 2]}}


def test_missing_checkpoints_are_one_line(saved, tmp_path):
    assert checkpoint.latest_step(tmp_path) is None and checkpoint.steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*: check --workdir"):
        checkpoint.restore(tmp_path, make_state(), CONFIG)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4 in .*: it has 5"):
        checkpoint.restore(saved, make_state(), CONFIG, step=4)


def test_only_the_newest_are_kept(tmp_path):
    for step in (3, 20, 100, 7000):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {}, keep=2)
    assert checkpoint.steps(tmp_path) == [100, 7000]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["100", "7000"]
    assert checkpoint.restore(tmp_path, {"x": jnp.float32(0)}, {}, step=100)["x"] == 100
    checkpoint.save(tmp_path, 7001, {"x": jnp.float32(0)}, {}, keep=None)
    assert checkpoint.steps(tmp_path) == [100, 7000, 7001]


def test_nothing_is_written_over(copy):
    with pytest.raises(CheckpointError, match="5 exists already"):
        checkpoint.save(copy, 5, make_state(1), CONFIG)
    assert_same(checkpoint.restore(copy, make_state(1), CONFIG), make_state())


@pytest.mark.parametrize("damage", ["flip", "shorten", "delete"])
def test_a_damaged_array_file_is_named(copy, damage):
    files = [path for path in (copy / "checkpoints" / "5" / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flip":
        largest.write_bytes(content)
    elif damage == "shorten":
        largest.write_bytes(content[: len(content) // 2])
    else:
        largest.unlink()
    with pytest.raises(
        CheckpointError, match=f"is damaged, the file state/.*{largest.name}.*: delete that folder and start the run"
    ) as caught:
        checkpoint.restore(copy, make_state(), CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
@pytest.mark.parametrize("content", [None, "", '{"format": 1', "[]", '{"format": 1, "leaves": {"w": 3}, "files": {}}'])
def test_damaged_json_is_one_line(copy, name, content):
    checkpoint.save(copy, 9, make_state(), CONFIG)
    path = copy / "checkpoints" / "9" / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=r"is damaged, .*: delete that folder to go on from step 5$") as caught:
        checkpoint.restore(copy, make_state(), CONFIG)
    assert "\n" not in str(caught.value)
    assert_same(checkpoint.restore(copy, make_state(), CONFIG, step=5), make_state())


def assert_only_step_5_is_left(workdir):
    assert checkpoint.latest_step(workdir) == 5
    assert os.listdir(workdir / "checkpoints") == ["5"]
    assert_same(checkpoint.restore(workdir, make_state(1), CONFIG), make_state())


FULL = "could not save step 6 under .*: No space left on device; the checkpoint of step 5 is untouched"


@pytest.mark.parametrize("layer", ["arrays", "manifest", "rename"])
def test_a_full_disk_leaves_the_previous_checkpoint(copy, monkeypatch, layer):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if layer == "arrays":

        def half(path, *_):
            path.mkdir()
            (path / "d").write_bytes(b"half")
            full()

        monkeypatch.setattr(store, "_write_arrays", half)
    elif layer == "manifest":
        monkeypatch.setattr(store, "_fingerprint", full)
    else:
        monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(CheckpointError, match=FULL) as caught:
        checkpoint.save(copy, 6, make_state(), CONFIG)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert_only_step_5_is_left(copy)


def test_a_write_that_the_system_refuses(copy, caplog):
    """The refusal comes from the kernel, below orbax and tensorstore: a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"noise": jax.random.normal(jax.random.key(0), (200_000,))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="could not save step 6 .*; the checkpoint of step 5 is untouched"):
            checkpoint.save(copy, 6, state, CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not caplog.records  # one line, and no traceback of orbax beside it
    assert_only_step_5_is_left(copy)


def test_ctrl_c_while_saving_leaves_the_previous_checkpoint(copy, monkeypatch):
    def interrupted(path, *_):
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_write_arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(copy, 6, make_state(), CONFIG)
    assert_only_step_5_is_left(copy)


def test_what_a_killed_process_left_is_never_a_checkpoint(copy):
    killed = copy / "checkpoints" / ".unfinished-6"
    shutil.copytree(copy / "checkpoints" / "5", killed)
    assert checkpoint.steps(copy) == [5]
    checkpoint.save(copy, 7, make_state(), CONFIG)
    assert sorted(os.listdir(copy / "checkpoints")) == ["5", "7"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr": 0.1}, "leaf 'lr' of the state is a float, not an array"),
        ({}, "holds no arrays"),
        ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, "two leaves are called 'a.b'"),
    ],
)
def test_states_that_cannot_be_saved(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, 0, state, {})
    assert not (tmp_path / "checkpoints").exists()


def test_arguments_are_checked(tmp_path):
    state = {"x": jnp.ones(2)}
    for step, keep in ((-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="step >= 0 and keep >= 1"):
            checkpoint.save(tmp_path, step, state, {}, keep=keep)
    with pytest.raises(TypeError, match="config.a.b is a ndarray, which JSON cannot hold"):
        checkpoint.save(tmp_path, 0, state, {"a": {"b": np.zeros(2)}})
    with pytest.raises(TypeError, match="mapping or a dataclass, not a int"):
        checkpoint.save(tmp_path, 0, state, 3)
    assert not (tmp_path / "checkpoints").exists()
