"""The profile of a step: which part a kernel belongs to, busy and idle time, the table and the picture."""

import collections
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.kernels import operations as ops
from experiments.kernels import step, trace
from minite_jax.metrics.plots import save_figure


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
    assert ops.part_of(path) == part


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
    assert ops.short_name(name) == short


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
    found = ops.Operations.of(text)
    paths = {"fusion.1": "jit(f)/moe/add", "call.2": "jit(f)/head/call", "call.3": "jit(f)/moe/call", "no_metadata": ""}
    assert found.paths == paths
    assert found.mosaic == {"call.2": "body.4", "call.3": "main.9"}


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
    found = trace.from_planes(planes, ops.Operations({"call.7": "jit(f)/head/y"}))
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
    operations = ops.Operations(
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
    paths = {"a.1": "f/attention/m/x", "a.2": "f/attention/m/x", "a.4": "f/moe/grouped_m/x", "a.3": "f/head/m/x"}
    operations = ops.Operations(paths, dict.fromkeys(paths, "body"))
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


def _stream(letters, *, seen=(), long=(), at_once=False):
    """Launches one after the other, a letter each: of attention ("a"), moe ("m") and head ("h"); all but `moe`'s are kernel "k".
    Those whose numbers are `seen` run outside of graphs."""
    name = {"a": "k", "m": "g", "h": "k"}
    op = {"a": "k.1", "m": "g.2", "h": "k.3"}
    return [
        _event(
            f"{name[each]}_mosaic_gpu_kernel",
            0 if at_once else 10 * i,
            25 if i in long else 5,
            **(dict(hlo_op=op[each]) if i in seen else _GRAPH),
        )
        for i, each in enumerate(letters)
    ]


_LOOP = {"k.1": "f/attention/k/x", "g.2": "f/moe/g/x", "k.3": "f/head/k/x"}
_A_LOOP = ops.Operations(_LOOP, dict.fromkeys(_LOOP, "body"))
_ALIKE = {"k.1": "f/attention/k/x", "k.3": "f/head/k/x"}
_NO_MOE = ops.Operations(_ALIKE, dict.fromkeys(_ALIKE, "body"))
_TWO_LOOPS = ops.Operations(_LOOP | {"k.4": "f/head/k/x"}, dict.fromkeys(_LOOP, "body") | {"k.4": "main"})


# Launches, operations, and the part that each launch is known to be of.
_PROFILES = {
    "whole": (_stream("amh" * 3), _A_LOOP, "amh" * 3),
    "many replays": (_stream("amh" * 1000), _A_LOOP, "amh" * 1000),
    "cut at the end": (_stream("amham"), _A_LOOP, "-m--m"),
    # As many launches as in three turns, of which none begins with attention's.
    "cut at both ends": (_stream("hamhamham"), _A_LOOP, "--m--m--m"),
    "cut at the start, where a turn could begin anywhere": (_stream("hahaha"), _NO_MOE, "------"),
    "the same, with one of each turn outside of graphs": (_stream("ahahah", seen=(0, 2, 4)), _NO_MOE, "ahahah"),
    "one of them lost on the way": (_stream("amhmhaamh"), _A_LOOP, "-m-m---m-"),
    # attention ran outside of graphs at first and inside afterwards: what is inside is not all head's.
    "inside and outside": (_stream("ahahah", seen=(0,)), _NO_MOE, "a-----"),
    "inside and outside, two programs": (_stream("amhamh", seen=(0,)), _TWO_LOOPS, "am--m-"),
    "at the same time": (_stream("amhamh", long=(0,)), _A_LOOP, "-m--m-"),
    "all at once": (_stream("amh", at_once=True), _A_LOOP, "-m-"),
    "another's launches between": (_stream("amhaamh"), _A_LOOP, "-m---m-"),
    "nothing known": (_stream("amh"), ops.Operations(), "---"),
    "no launch": ([], _A_LOOP, ""),
}


@pytest.mark.parametrize("name", _PROFILES)
def test_a_graphs_mosaic_kernels_are_in_the_right_part_or_in_none(name):
    events, operations, expected = _PROFILES[name]
    letters = {"attention": "a", "moe": "m", "head": "h", "other": "-"}
    assert "".join(letters[part] for part in _parts(events, operations)) == expected


def _update(*, seen):
    """A real update's operations, and launches of it in order: its head's loops 86 and 75 times. Those that are not `seen` (a
    function of path and computation, "main" or "loop") run in graphs. Each launch comes with its part."""
    text = (Path(__file__).parent.parent / "data/hlo/update_bf16_h200.txt").read_text()
    operations = ops.Operations.of(text)
    by_computation = {}
    for name, computation in operations.mosaic.items():
        by_computation.setdefault(computation, []).append(name)
    _, backward, main = by_computation.values()
    first = next(i for i, name in enumerate(main) if "transpose" in operations.paths[name])
    events, parts = [], []
    # The head's forward reads a slice of its rows: XLA puts slice and kernel into one fusion, which is what the profile names.
    for name in [*main[:first], *["dynamic_slice_fusion"] * 86, *backward * 75, *main[first:]]:
        path = operations.paths[name]
        kernel = f"{path.split('/')[-2]}_mosaic_gpu_kernel"
        graph = dict(hlo_op=name) if seen(path, "main" if name in main else "loop") else _GRAPH
        events.append(_event(kernel, 10 * len(events), 5, **graph))
        parts.append(ops.part_of(path))
    return events, operations, parts


def test_gradients_of_weights_belong_to_their_parts():
    """Kernels of an update that ran in CUDA graphs, where a dense matmul's gradients may be attention's or the head's."""
    events, operations, parts = _update(seen=lambda path, where: where != "main")
    assert collections.Counter(parts) == {
        "attention": 6, "moe": 4, "head": 86, "head backward": 225, "attention backward": 12, "moe backward": 8,
    }  # fmt: skip
    assert _parts(events, operations) == parts
    # The same where attention's forward ran outside of graphs, and only the gradients inside.
    events, operations, parts = _update(seen=lambda path, where: "transpose" not in path or where != "main")
    assert _parts(events, operations) == parts


def test_gradients_that_could_be_of_two_parts_are_of_none():
    """All in graphs: what the experts and attention alone have is theirs; the dense kernels are attention's or the head's."""
    events, operations, parts = _update(seen=lambda path, where: False)
    found = _parts(events, operations)
    dense = [event.name.removesuffix("_mosaic_gpu_kernel") in ("matmul", "matmul_dgrad", "matmul_wgrad") for event in events]
    assert found == ["other" if unsure else part for part, unsure in zip(parts, dense, strict=True)]


def _sampler(*, seen, turns=16, prefill=()):
    """A real sampler's operations, and launches of its prefill and of so many decoded tokens, with their parts. `seen` are the
    numbers of a turn's matmuls that run outside of graphs, `prefill` those of the prefill's."""
    operations = ops.Operations.of((Path(__file__).parent.parent / "data/hlo/sample_bf16_h200.txt").read_text())
    main = [name for name, where in operations.mosaic.items() if where.startswith("main")]
    loop = [name for name in operations.mosaic if name not in main]
    events, parts = [], []
    for number, names in enumerate([main, *[loop] * turns]):
        for i, name in enumerate(names):
            graph = _GRAPH if i not in (seen if number else prefill) else dict(hlo_op=name)
            path = operations.paths[name]
            events.append(_event(f"{path.split('/')[-2]}_mosaic_gpu_kernel", 10 * len(events), 5, **graph))
            parts.append(ops.part_of(path))
    return events, operations, parts


def test_a_decoded_tokens_matmuls_in_graphs_follow_the_prefills():
    """The head's matmul has the kernel of attention's, in the loop of tokens and, attention's alone, in the prefill before it."""
    events, operations, parts = _sampler(seen=(2, 4, 6), prefill=(1, 5))
    assert collections.Counter(parts) == {"attention": 4 + 4 * 16, "moe": 4 + 4 * 16, "head": 16}
    assert _parts(events, operations) == parts
    # All of the prefill's outside.
    events, operations, parts = _sampler(seen=(2, 4, 6), prefill=range(8))
    assert _parts(events, operations) == parts


@pytest.mark.parametrize("spoil", ["one lost", "one more", "no number of turns"])
def test_a_decoded_tokens_matmuls_are_of_no_part_where_the_program_does_not_fit(spoil):
    events, operations, parts = _sampler(seen=() if spoil == "no number of turns" else (2, 4, 6), prefill=(1, 5))
    head = parts.index("head")
    if spoil == "one lost":
        del events[head], parts[head]
    elif spoil == "one more":
        events.append(_event("matmul_mosaic_gpu_kernel", 10 * len(events), 5, **_GRAPH))
        parts.append("head")
    assert "head" not in _parts(events, operations)


@pytest.mark.parametrize(("letters", "expected"), [("ahah", "----"), ("aahh", "----"), ("ah", "ah")])
def test_loops_that_take_turns_have_no_known_order(letters, expected):
    """Two loops inside of a third, where each turn has a launch outside of graphs: turns may alternate, or not."""
    paths = {"k.1": "f/attention/k/x", "a.1": "f/attention/a/x", "k.2": "f/head/k/x", "h.1": "f/head/h/x"}
    operations = ops.Operations(paths, {"k.1": "A", "a.1": "A", "k.2": "B", "h.1": "B"}, order=list(paths))
    events = []
    for i, each in enumerate(letters):
        events.append(_event(f"{each}_mosaic_gpu_kernel", 20 * i, 5, hlo_op=f"{each}.1"))
        events.append(_event("k_mosaic_gpu_kernel", 20 * i + 10, 5, **_GRAPH))
    letters = {"attention": "a", "moe": "m", "head": "h", "other": "-"}
    assert "".join(letters[part] for part in _parts(events, operations)[1::2]) == expected


def test_each_gpu_has_its_own_turns():
    """Those of two, launch by launch, are as many as of one that ran twice as often."""
    line = SimpleNamespace(name="Stream #1(Compute)", events=_stream("ahah", seen=(0, 2)))
    planes = [SimpleNamespace(name=f"/device:GPU:{i}", lines=[line]) for i in range(2)]
    parts = [kernel.part for kernel in trace.from_planes(planes, _NO_MOE).kernels]
    assert parts == ["attention", "attention", "head", "head"] * 2
    line.events = _stream("amhamh")
    parts = [kernel.part for kernel in trace.from_planes(planes, _A_LOOP).kernels]
    assert parts == ["attention", "attention", "moe", "moe", "head", "head"] * 2


def _text(first, second):
    """A program of two fusions of the same code but for its names, and one of another code."""
    body = """
%{name} (p.{i}: f32[2]) -> f32[2] {{
  %p.{i} = f32[2]{{0}} parameter(0)
  ROOT %{op}.{i} = f32[2]{{0}} {op}(%p.{i}), metadata={{op_name="jit(f)/{part}/{op}" stack_frame_id={i}}}
}}
"""
    fusion = '  %loop_fusion.{i} = f32[2]{{0}} fusion(%x), kind=kLoop, calls=%{name}, metadata={{op_name="jit(f)/{part}/{op}"}}\n'
    of = enumerate([("sine", first), ("sine", second), ("cosine", "embed")])
    each = [dict(i=i, name=f"body.{i}", op=op, part=part) for i, (op, part) in of]
    main = "".join(fusion.format(**x) for x in each)
    bodies = "".join(body.format(**x) for x in each)
    return f"HloModule jit_f, is_scheduled=true\n{bodies}\nENTRY %main (x: f32[2]) -> f32[2] {{\n{main}}}\n"


def test_fusions_of_the_same_code_may_share_a_kernel():
    alone = _event("loop_fusion_0", 0, 1, hlo_op="loop_fusion.0")
    in_graph = [_event("loop_fusion_0", 1, 1, **_GRAPH), _event("loop_fusion_2", 2, 1, **_GRAPH)]
    assert _parts(in_graph, ops.Operations.of(_text("moe", "moe"))) == ["moe", "embed"]
    two = ops.Operations.of(_text("moe", "head"))
    assert _parts(in_graph, two) == ["other", "embed"]
    assert _parts([alone, *in_graph], two) == ["moe", "other", "embed"]  # head's, under the name of moe's


def test_an_instruction_without_a_path_is_not_the_one_its_kernel_is_named_after():
    operations = ops.Operations({"copy.1": "jit(f)/moe/copy", "copy.2": ""})
    assert _parts([_event("copy_1", 0, 1, hlo_op="copy.2"), _event("copy_1", 1, 1, **_GRAPH)], operations) == ["other", "moe"]


def test_instructions_of_another_program():
    operations = ops.Operations({"add.1": "jit(f)/moe/add", "k.1": "f/head/k/x"}, {"k.1": "main"}, module="jit_f")
    events = [
        _event("add_1", 0, 1, hlo_op="add.1", hlo_module="jit_g"),
        _event("k_mosaic_gpu_kernel", 1, 1, hlo_module="jit_g", **_GRAPH),
        _event("add_1", 2, 1, hlo_op="add.1", hlo_module="jit_f"),
        _event("k_mosaic_gpu_kernel", 3, 1, hlo_module="jit_f", **_GRAPH),
    ]
    assert _parts(events, operations) == ["other", "other", "moe", "head"]


def test_what_a_longer_run_has_more():
    def run(*kernels):
        return trace.Trace(tuple(trace.Kernel(name, part, 0.0, 1.0) for part, name in kernels))

    kernels = ("head", "k"), ("moe", "k"), ("moe", "g")
    one, two = run(*kernels), run(*kernels, *kernels)
    assert step.difference(one, two) == {("head", "k"): (1, 1.0), ("moe", "k"): (1, 1.0), ("moe", "g"): (1, 1.0)}
    # A run in which a kernel's part could not be told does not make it another's.
    untold = run(("other", "k"), ("other", "k"), ("moe", "g"))
    assert step.difference(untold, two) == {("other", "k"): (2, 2.0), ("moe", "g"): (1, 1.0)}


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


def test_the_picture_has_a_bar_for_each_step(measured, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(step, "save_figure", lambda figure, path: figures.append(figure) or save_figure(figure, path))
    decode = step.Step("decoded token, batch 4, nvfp4", 1e-3, 1e-3, {("attention", "c"): (1, 1e-3)}, 4)
    rows = [row for each in (measured, decode) for row in step.rows(each)]
    table = dict(title=f"One NVIDIA H200 ({step.in_words(step.TINY)})", rows=rows, provenance=dict(revision="0123456789abcdef"))
    path = step.draw(table, tmp_path / "parts.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    title = "One NVIDIA H200 (updates of 2 x 16 tokens, decoded tokens behind 9 to 11 others), revision 0123456789ab"
    assert figure.get_suptitle().replace("\n", " ") == title
    update, token = figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in update.patches[:5]]  # head, backward, ... and the time without a kernel
    assert max(ends) == pytest.approx(4.0) and update.get_title(loc="left") == "One update of the learner"
    assert max(bar.get_x() + bar.get_width() for bar in token.patches) == pytest.approx(1.0)
    # The legend shows a backward as the bars do: white lines.
    hatched = [patch for patch in figure.legends[0].get_patches() if patch.get_hatch()]
    assert len(hatched) == 1 and hatched[0].get_edgecolor() == (1.0, 1.0, 1.0, 1.0)
