"""The profile of a step: which part a kernel belongs to, busy and idle time, the table and the picture."""

from types import SimpleNamespace

import pytest

from experiments.kernels import step, trace


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(update)/jvp(moe)/custom_vjp_call/triton_call", "moe"),
        ("jit(update)/transpose(jvp(moe))/triton_call", "moe backward"),
        ("jit(update)/transpose(jvp(checkpoint))/rematted_computation/attention/triton_call", "attention backward"),
        ("jit(generate)/while/body/attention/scatter", "attention"),
        ("jit(generate)/while/body/sample/head/dot", "head"),  # the innermost counts
        ("jit(update)/optimizer/mul", "optimizer"),
        ("jit(update)/pack/triton_call", "pack"),
        ("jit(update)/reduce_sum", "other"),
        ("", "other"),
    ],
)
def test_the_part_of_an_operation(path, part):
    assert trace.part_of(path) == part


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("multiply_kernel", "multiply_kernel"),
        ("loop_add_fusion_3", "loop_add_fusion"),
        ("void cutlass::gemm::kernel<int, 4>(Params)", "kernel"),
        ("MemcpyD2D", "MemcpyD2D"),
    ],
)
def test_a_kernels_short_name(name, short):
    assert trace.short_name(name) == short


def test_operations_are_read_from_a_programs_text():
    text = """
%body.4 (x: (s32[], bf16[2])) -> (s32[], bf16[2]) {
  %fusion.1 = f32[2]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(f)/moe/add" source_line=3}
  ROOT call.2 = bf16[4] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_type="x" op_name="jit(f)/head/call"}
}

ENTRY %main.9 (x.1: bf16[2]) -> bf16[2] {
  %no_metadata = f32[] constant(0)
  %call.3 = bf16[4] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/moe/call"}
}
"""
    found = trace.Operations.of(text)
    assert found.paths == {"fusion.1": "jit(f)/moe/add", "call.2": "jit(f)/head/call", "call.3": "jit(f)/moe/call"}
    assert found.mosaic == {"call.2": "0: body.4", "call.3": "0: main.9"}


def _event(kernel, start, duration, **stats):
    return SimpleNamespace(name=kernel, start_ns=start, duration_ns=duration, stats=list(stats.items()))


def test_kernels_of_a_profile():
    streams = [
        SimpleNamespace(
            name="Stream #1(Compute)",
            events=[_event("a_kernel", 1000, 100, tf_op="jit(f)/moe/x"), _event("b_kernel", 1300, 100, hlo_op="call.7")],
        ),
        SimpleNamespace(name="Stream #2(Compute)", events=[_event("a_kernel", 1050, 150, tf_op="jit(f)/moe/x")]),
        SimpleNamespace(name="XLA Ops", events=[_event("a_kernel", 0, 9999)]),
    ]
    planes = [SimpleNamespace(name="/device:GPU:0", lines=streams), SimpleNamespace(name="/host:CPU", lines=streams)]
    found = trace.from_planes(planes, trace.Operations({"call.7": "jit(f)/head/y"}))
    assert [(k.name, k.part) for k in found.kernels] == [("a_kernel", "moe"), ("a_kernel", "moe"), ("b_kernel", "head")]
    assert found.span == pytest.approx(400e-9)
    assert found.busy == pytest.approx(300e-9)  # 1000..1200 and 1300..1400: what overlaps counts once
    by_part = found.by(lambda kernel: kernel.part)
    assert by_part["moe"] == (2, pytest.approx(250e-9)) and list(by_part) == ["moe", "head"]


def _parts(events, operations):
    plane = SimpleNamespace(name="/device:GPU:0", lines=[SimpleNamespace(name="Stream #1(Compute)", events=events)])
    return [kernel.part for kernel in trace.from_planes([plane], operations).kernels]


_GRAPH = dict(hlo_op="command_buffer_1", tf_op="XlaModule:")


def test_kernels_of_a_cuda_graph():
    """The profile names the graph: parts come from what the graph shares, from a fusion's name, from the one operation left."""
    operations = trace.Operations(
        {"add_fusion.3": "jit(f)/moe/add", "call.1": "jit(f)/moe/m/x", "call.2": "jit(f)/head/m/x", "call.3": "jit(f)/head/m/x"},
        {"call.1": "a", "call.2": "a", "call.3": "b"},
    )
    alone = _event("m_mosaic_gpu_kernel", 0, 1, hlo_op="call.1", tf_op="XlaModule:")
    events = [
        alone,
        _event("m_mosaic_gpu_kernel_0", 1, 1, **_GRAPH),
        _event("add_fusion_3", 2, 1, **_GRAPH),
        _event("m_mosaic_gpu_kernel", 3, 1, name="jit(f)/transpose(jvp(attention))", **_GRAPH),
        _event("sort_4", 4, 1, **_GRAPH),
        _event("n_mosaic_gpu_kernel", 5, 1, **_GRAPH),
    ]
    assert _parts(events, operations) == ["moe", "head", "moe", "attention backward", "other", "other"]
    events.remove(alone)  # then the Mosaic kernel may be one of two parts', in different computations
    assert _parts(events, operations)[0] == "other"


def test_mosaic_kernels_of_a_cuda_graph_come_in_order():
    """As in decoding: a loop's matmuls of attention and head, the first outside of the graph, and others' kernels between."""
    paths = {"a.1": "f/attention/m/x", "a.2": "f/attention/m/x", "a.3": "f/head/m/x", "a.4": "f/moe/grouped_m/x"}
    operations = trace.Operations(paths, dict.fromkeys(paths, "body"))
    turn = [
        _event("m_mosaic_gpu_kernel", 0, 1, hlo_op="a.1"),
        _event("m_mosaic_gpu_kernel", 1, 1, **_GRAPH),
        _event("grouped_m_mosaic_gpu_kernel", 2, 1, **_GRAPH),
        _event("m_mosaic_gpu_kernel", 3, 1, **_GRAPH),
    ]
    later = [SimpleNamespace(**{**vars(each), "start_ns": each.start_ns + 10}) for each in turn]
    assert _parts([*later, *turn], operations) == ["attention", "attention", "moe", "head"] * 2
    # A launch too few, and nothing is known of the order.
    assert _parts([*turn, *later[:-1]], operations) == ["attention", "other", "moe", "other", "attention", "other", "moe"]


@pytest.fixture
def measured():
    kernels = {("moe", "a"): (4, 2e-3), ("moe backward", "a"): (2, 1e-3), ("head", "b"): (1, 5e-4)}
    return step.Step("update, nvfp4", seconds=4e-3, busy=3.5e-3, kernels=kernels, tokens=100)


def test_rows_of_a_step_add_up(measured):
    rows = step.rows(measured)
    assert all(set(row) == {c["key"] for c in step.COLUMNS} for row in rows)
    whole, idle, *rest = rows
    assert whole["time"] == pytest.approx(4000) and "25,000 tokens/s" in whole["part"]
    assert idle["time"] == pytest.approx(500) and idle["share"] == pytest.approx(12.5)
    parts = {row["part"]: row["time"] for row in rest if row["kernel"] == "all"}
    assert parts == pytest.approx({"moe": 2000, "moe backward": 1000, "head": 500})
    assert sum(row["time"] for row in rest if row["kernel"] != "all") == pytest.approx(3500)


def test_the_picture_has_a_bar_for_each_step(measured, tmp_path):
    decode = step.Step("decoded token, batch 4, nvfp4", 1e-3, 1e-3, {("attention", "c"): (1, 1e-3)}, 4)
    path = step.draw([measured, decode], tmp_path / "parts.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
