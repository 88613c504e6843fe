"""Packed weights: look-up tables and assembler bit for bit, the kernel in Triton's interpreter, and what it compiles to.

The native instruction runs on no machine at hand, and the interpreter does not know it. So here it is a model of what it is
documented to do, in numpy: that tests which nibble and which scale the kernel hands to it for which element.
"""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
EXACT_SCALES = np.float32([m * 2.0**e for e in range(-5, 6) for m in (1, 1.25, 1.5)] + [64, 80, 96])
OTHER_SCALES = np.float32([0.875, 1, 1.125, 1.75])

# name: group sizes, rows, N, K. Rows behind the last group, empty groups, one hot group, unaligned everything.
SHAPES = {
    "dense": ([17], 17, 70, 80),
    "one_row": ([1], 1, 64, 16),
    "deep": ([3], 3, 33, 768),
    "grouped": ([0, 17, 1, 0, 16], 40, 70, 144),
    "hot": ([0, 35, 0], 35, 130, 144),
    "no_rows_used": ([0, 0], 18, 65, 32),
}


def _e4m3(x):
    return np.asarray(x, ml_dtypes.float8_e4m3fn)


def _random(seed, shape, scales):
    """Codes [..., K] and scales [..., K / 16]. With few scales float32 sums the products exactly, in any order."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 16, shape).astype(np.uint8), rng.choice(scales, (*shape[:-1], shape[-1] // 16))


def _pack(codes):
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _values(codes, scales):
    return E2M1[codes] * np.repeat(scales, 16, axis=-1)


def _x_inputs(codes, scales, inner):
    if inner == "native":
        return _pack(codes), _e4m3(scales)
    values = _values(codes, scales).astype(ml_dtypes.float8_e4m3fn if inner == "fp8" else ml_dtypes.bfloat16)
    return values, np.zeros(len(codes), np.float32)


def _case(inner, name, tiles):
    from pallas_kernels import nvfp4
    from pallas_kernels.grouped_matmul import reference, triton_packed

    sizes, M, N, K = SHAPES[name]
    E = len(sizes)
    scales = OTHER_SCALES if inner == "bf16" else np.float32([0.5, 0.625, 1, 1.25, 1.5])
    x_codes, x_scales = _random(1, (M, K), scales)
    w_codes, w_scales = _random(2, (E, N, K), scales)
    rng = np.random.default_rng(3)
    x_outer, w_outer = (rng.uniform(0.5, 2, n).astype(np.float32) for n in (M, E))  # not powers of two: their order shows
    # What must not be read is NaN.
    used = sum(sizes)
    x_outer[used:] = np.nan
    w_outer[np.array(sizes) == 0] = np.nan
    out_dtype = jnp.float32 if name in ("grouped", "one_row") else jnp.bfloat16
    group = np.repeat(np.arange(E), sizes)
    expected = np.zeros((M, N), np.float32)
    x, w = _values(x_codes, x_scales), _values(w_codes, w_scales)
    for row, e in enumerate(group):
        expected[row] = (w[e] @ x[row]) * x_outer[row] * w_outer[e]
    packed_w = _pack(w_codes), _e4m3(w_scales), w_outer
    if name == "grouped":  # the loop above is the specification
        packed_x = nvfp4.Nvfp4Array(*map(jnp.asarray, (_pack(x_codes), _e4m3(x_scales), x_outer)))
        compiled = jax.jit(reference.grouped_matmul, static_argnames="out_dtype")
        y = compiled(packed_x, nvfp4.Nvfp4Array(*map(jnp.asarray, packed_w)), np.int32(sizes), out_dtype=out_dtype)
        np.testing.assert_array_equal(y, expected)
    launch = triton_packed.packed_launch(M, N, K, E, inner=inner, out_dtype=out_dtype, tiles=tiles, plain=True)
    inputs = *_x_inputs(x_codes, x_scales, inner), x_outer, *packed_w, np.int32(sizes), M
    return f"{inner}-{name}", launch, inputs, expected.astype(out_dtype)


def _every_scale_and_code():
    """The weights themselves, as the product with the identity: all codes at all places of a block, for each scale."""
    from pallas_kernels.grouped_matmul import triton_packed

    K, N = 32, 16 * len(EXACT_SCALES)
    codes = ((np.arange(N)[:, None] + np.arange(K)[None, :] * 3) % 16).astype(np.uint8)
    scales = np.stack([np.repeat(EXACT_SCALES, 16), np.tile(EXACT_SCALES, 16)], axis=1)
    codes = np.where((np.repeat(scales, 16, axis=1) > 64) & ((codes & 7) == 7), codes - 1, codes).astype(np.uint8)
    tiles = triton_packed.Tiles(BLOCK_TOKENS=32, UNROLL=1)
    launch = triton_packed.packed_launch(K, N, K, 1, inner="fp8", out_dtype=jnp.float32, tiles=tiles, plain=True)
    ones = np.ones(K, np.float32)
    inputs = _e4m3(np.eye(K)), ones, ones, _pack(codes)[None], _e4m3(scales)[None], ones[:1], np.int32([K]), K
    return "fp8-every_scale_and_code", launch, inputs, _values(codes, scales).T + np.float32(0)


def _model_the_native_instruction():
    """`tl.dot_scaled` for the interpreter: E2M1 operands packed along K, low nibble first; E4M3 scales of 16, rows first."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def numbers(codes, scales):
        assert codes.dtype == scales.dtype == np.uint8
        unpacked = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        return _values(unpacked, scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32))

    def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc, fast_math, lhs_k_pack, rhs_k_pack, dtype):
        assert lhs_format == rhs_format == "e2m1" and lhs_k_pack and rhs_k_pack
        assert lhs_scale.dtype == rhs_scale.dtype == tl.float8e4nv
        lhs, lhs_scale, rhs, rhs_scale, total = (each.handle.data for each in (lhs, lhs_scale, rhs, rhs_scale, acc))
        product = numbers(lhs, lhs_scale) @ numbers(rhs.T, rhs_scale).T
        return tl.tensor(interpreter.TensorHandle(total + product, tl.float32), acc.type)

    TritonSemantic.dot_scaled = dot_scaled


def _interpreted():
    from pallas_kernels.grouped_matmul.triton_packed import Tiles

    small = Tiles(UNROLL=1)
    yield _every_scale_and_code()
    for name in SHAPES:
        yield _case("fp8", name, small)
    swapped = Tiles(BLOCK_FEATURES=16, BLOCK_TOKENS=64, UNROLL=1, SWAPPED=True)
    yield "fp8-swapped", *_case("fp8", "grouped", swapped)[1:]
    for name in ("grouped", "deep"):
        yield _case("bf16", name, Tiles(BLOCK_TOKENS=32, UNROLL=1))
    _model_the_native_instruction()
    for name in ("dense", "grouped", "deep"):
        yield _case("native", name, Tiles(BLOCK_FEATURES=128, BLOCK_K=256, UNROLL=1))


def _interpret(launch, inputs, expected) -> int:
    """How many elements of the output have other bits than expected."""
    from pallas_kernels import gpu

    (output,) = gpu.interpret(launch, *inputs)
    assert output.shape == expected.shape and output.dtype == expected.dtype
    integer = f"uint{8 * output.dtype.itemsize}"
    return int((output.view(integer) != np.asarray(expected).view(integer)).sum())


def _refused_by_hopper() -> list[str]:
    """Pairs of operands, packed or not and of either type, of few rows and of many, that a Hopper GPU's program refuses."""
    from pallas_kernels import dispatch, nvfp4
    from pallas_kernels.grouped_matmul import grouped_matmul
    from pallas_kernels.matmul import matmul

    array, K, refused = jax.ShapeDtypeStruct, 128, []

    def operand(shape, outer, packed, exact):
        outer = array(outer, jnp.float32)
        if not packed:
            return nvfp4.ExpandedArray(array((*shape, K), jnp.float8_e4m3fn if exact else jnp.bfloat16), outer)
        codes, scales = array((*shape, K // 2), jnp.uint8), array((*shape, K // 16), jnp.float8_e4m3fn)
        return nvfp4.Nvfp4Array(codes, scales, outer, fp8_exact=exact)

    sizes = array((2,), jnp.int32)
    by_number = lambda x, w, sizes, rows: grouped_matmul(x, w, sizes, rows=rows)  # noqa: E731
    with dispatch.planned(90):
        for M, *kinds in itertools.product((3, 5000), *[(True, False)] * 4):
            x, w, stack = operand((M,), (M,), *kinds[:2]), operand((64,), (), *kinds[2:]), operand((2, 64), (2,), *kinds[2:])
            for function, inputs in (
                (matmul, (x, w)), (grouped_matmul, (x, stack, sizes)), (by_number, (x, stack, sizes, array((M,), jnp.int32))),
            ):  # fmt: skip
                try:
                    assert jax.eval_shape(function, *inputs).shape == (M, 64)
                except (TypeError, NotImplementedError) as error:
                    refused.append(f"{function.__name__} of {M} rows, {kinds}: {error}")
    return refused


def _compiled():
    """(name, capability, launch, inputs): a decode of Qwen3-30B-A3B, and one dense matmul."""
    from pallas_kernels.grouped_matmul.triton_packed import Tiles, default_tiles, packed_launch

    array = jax.ShapeDtypeStruct
    for inner, capability, M, E, tokens in (
        ("native", 100, 512, 128, 16),
        ("native", 100, 4096, 1, 256),
        ("native", 103, 64, 1, 64),
        ("native", 103, 512, 128, 16),
        ("fp8", 90, 512, 128, 16),
        ("fp8", 90, 64, 1, 64),
        ("bf16", 90, 512, 128, 16),
    ):
        N, K = 1536, 2048
        x = {
            "native": (array((M, K // 2), jnp.uint8), array((M, K // 16), jnp.float8_e4m3fn)),
            "fp8": (array((M, K), jnp.float8_e4m3fn), array((M,), jnp.float32)),
            "bf16": (array((M, K), jnp.bfloat16), array((M,), jnp.float32)),
        }[inner]
        w = array((E, N, K // 2), jnp.uint8), array((E, N, K // 16), jnp.float8_e4m3fn), array((E,), jnp.float32)
        tiles = default_tiles(inner, M, N, K, E)
        assert isinstance(tiles, Tiles) and tiles.BLOCK_TOKENS == tokens
        launch = packed_launch(M, N, K, E, inner=inner)
        inputs = *x, array((M,), jnp.float32), *w, array((E,), jnp.int32), M
        yield f"{inner}-{capability}-{tokens}", capability, launch, inputs
        if inner == "fp8" and tokens == 64:
            swapped = Tiles(BLOCK_FEATURES=32, BLOCK_TOKENS=64, BLOCK_K=256, UNROLL=1, SWAPPED=True)
            yield "fp8-90-swapped", capability, packed_launch(M, N, K, E, inner=inner, tiles=swapped), inputs


def _tool(cubin: bytes, name: str, *options: str) -> str:
    import triton

    program = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, *options, file.name], capture_output=True, text=True, check=True).stdout


def _longest_loop(sass: str) -> list[str]:
    """Instructions from the target of a backward branch to the branch, of the longest such loop."""
    instructions, labels, longest = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(found[1])
            target = re.search(r"BRA.*\((\.L_x_\d+)\)", found[1])
            if target and target[1] in labels and len(instructions) - labels[target[1]] > len(longest):
                longest = instructions[labels[target[1]] :]
    return longest


def _inspect(launch, inputs, capability) -> dict:
    from pallas_kernels import gpu

    compiled = gpu.compile_ahead(launch, *inputs, capability=capability)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    mma = re.findall(r"^\s*(?:@\S+\s+)?((?:wgmma|tcgen05)\.mma\S*|mma\.\S+)", ptx, re.MULTILINE)
    native = [each for each in mma if "kind::mxf4nvf4.block_scale" in each and re.search(r"scale_vec::4X|block16", each)]
    usage = _tool(cubin, "cuobjdump", "-res-usage")
    found = dict(
        native=len(native),
        fp8=sum("wgmma" in each and ".e4m3.e4m3" in each for each in mma),
        bf16=sum("wgmma" in each and ".bf16.bf16" in each for each in mma),
        all=len(mma),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        atomics=len(re.findall(r"\b(?:atom|red)\.global", ptx)),
        multiply_adds=len(re.findall(r"\bfma\.", ptx)),
    )
    if capability != 103:  # the disassembler that comes with Triton 3.6 does not know it
        sass = _tool(cubin, "nvdisasm", "-c")
        constants = launch.constants
        loop = _longest_loop(sass)
        codes = constants["BLOCK_FEATURES"] * constants["BLOCK_K"] * constants["UNROLL"] / (32 * launch.num_warps)
        found |= dict(
            sass_mma=sorted(set(re.findall(r"\b\w*MMA\b", sass))),
            per_code=len(loop) / codes,
            from_zero=sum("QGMMA" in each and "RZ" in each for each in loop),
            additions=sum(each.startswith("FADD") for each in loop),
        )
    return found


# --- the look-up, on any machine -------------------------------------------------------------------------------------------


def _run_assembler(text, inputs):
    """Runs an assembler string on uint32 arrays {"$2": ...}; only the instructions that the kernels use."""
    registers = dict(inputs)

    def value(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def prmt(a, b, selector):
        assert not np.any(selector & np.uint32(0x8888))  # the mode that replicates signs is not used
        a, b, selector = np.broadcast_arrays(a, b, selector)
        table = np.stack([(register >> np.uint32(8 * i)) & np.uint32(0xFF) for register in (a, b) for i in range(4)])
        picks = np.stack([(selector >> np.uint32(4 * i)) & np.uint32(7) for i in range(4)])
        picked = np.take_along_axis(table, picks.astype(np.int64), axis=0)
        return picked[0] | picked[1] << np.uint32(8) | picked[2] << np.uint32(16) | picked[3] << np.uint32(24)

    def lop3(a, b, c, table):
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for i, bits in enumerate(itertools.product([0, 1], repeat=3)):
            if table.item() >> i & 1:
                terms = [r if bit else ~r for r, bit in zip((a, b, c), bits, strict=True)]
                result |= terms[0] & terms[1] & terms[2]
        return result

    def bf16_product(a, b):
        a, b = (np.ascontiguousarray(x).view(ml_dtypes.bfloat16).astype(np.float32) for x in np.broadcast_arrays(a, b))
        product = a * b
        rounded = product.astype(ml_dtypes.bfloat16)
        assert np.array_equal(rounded.astype(np.float32), product)  # exact
        return rounded.view(np.uint32)

    operations = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
        "mul.rn.bf16x2": bf16_product,
    }
    for line in text.strip().strip("{}").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation and not operation.startswith(".reg"):
            target, *sources = (each.strip() for each in operands.split(","))
            arguments = [value(each) for each in sources]
            if operation == "prmt.b32":
                arguments[2] = arguments[2] & np.uint32(0xFFFF)  # all that it reads
            registers[target] = operations[operation](*map(np.ascontiguousarray, arguments))
    return registers


def _words():
    """All 256 pairs of codes at each of the four places of a word, among different others; [4 * 256] and codes [.., 8]."""
    codes = np.random.default_rng(0).integers(0, 16, (4, 256, 8)).astype(np.uint8)
    for place in range(4):
        codes[place, :, 2 * place] = np.arange(256) & 15
        codes[place, :, 2 * place + 1] = np.arange(256) >> 4
    codes = codes.reshape(-1, 8)
    return (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1, dtype=np.uint32), codes


def _assembler(name):
    triton_packed = pytest.importorskip("pallas_kernels.grouped_matmul.triton_packed", reason="triton is not installed")
    return getattr(triton_packed, name).value


def test_table_of_every_scale_holds_every_product():
    for scale in EXACT_SCALES:
        b = int(_e4m3(scale).view(np.uint8))
        odd = b + (4 if scale in 2.0 ** np.arange(-5, 7) else 5)
        table = np.uint8([0, b - 8, b, odd, b + 8, odd + 8, b + 16, min(odd + 16, 255)])
        count = 7 if scale > 64 else 8  # 6 x 80 and 6 x 96 are no E4M3 numbers, and such blocks have no 6
        numbers = table.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(numbers[:count], (E2M1[:8] * scale)[:count])


def test_assembler_for_fp8():
    text = _assembler("LOOK_UP_FP8")
    words, codes = _words()
    for scale in EXACT_SCALES:
        table = _e4m3(np.minimum(E2M1[:8] * scale, 448)).view(np.uint32)
        registers = _run_assembler(text, {"$2": words, "$3": table[:1], "$4": table[1:]})
        found = np.stack([registers["$0"], registers["$1"]], axis=-1).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
        assert found.shape == codes.shape
        expected = _e4m3(np.clip(E2M1[codes] * scale, -448, 448))
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_assembler_for_bf16():
    text = _assembler("LOOK_UP_BF16")
    words, codes = _words()
    for byte in range(0x7F):
        scale = np.uint8(byte).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        pair = np.array([scale, scale]).astype(ml_dtypes.bfloat16).view(np.uint32)
        registers = _run_assembler(text, {"$4": words, "$5": pair})
        found = np.stack([registers[f"${i}"] for i in range(4)], axis=-1).view(np.uint16)
        np.testing.assert_array_equal(found, (E2M1[codes] * scale).astype(ml_dtypes.bfloat16).view(np.uint16))


# --- the kernel ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    ["fp8-every_scale_and_code", *(f"fp8-{name}" for name in SHAPES), "fp8-swapped", "bf16-grouped", "bf16-deep",
     "native-dense", "native-grouped", "native-deep"],
)  # fmt: skip
def test_bits_are_the_references(child, case):
    assert child("interpret")[case] == 0


def test_hopper_multiplies_every_pair_of_operands(child):
    """Foreign weights may not be `fp8_exact` where activations are, and come expanded: few rows read them packed all the same."""
    assert child("interpret")["refused"] == []


@pytest.mark.parametrize("case", ["native-100-16", "native-100-256", "native-103-64", "native-103-16"])
def test_native_is_native_and_nothing_else(child, case):
    found = child("compile")[case]
    assert found["native"] > 0
    assert found["all"] == found["native"]
    assert found.get("sass_mma", ["UTCOMMA"]) == ["UTCOMMA"]
    assert found["stack"] == found["atomics"] == found["multiply_adds"] == 0


@pytest.mark.parametrize("case", ["fp8-90-16", "fp8-90-64", "bf16-90-16"])
def test_hopper(child, case):
    found = child("compile")[case]
    kind = case.split("-")[0]
    assert found[kind] > 0
    assert found["all"] == found[kind]
    assert found["stack"] == found["atomics"] == found["multiply_adds"] == 0
    assert found["per_code"] < {"fp8": 3.5, "bf16": 5.0}[kind]  # everything in the loop; 3.8 is all that HBM leaves time for


def test_fp8_sums_stay_in_the_tensor_core(child):
    """As in the kernel for many rows: a partial sum that left it would give other bits."""
    for case in ("fp8-90-16", "fp8-90-64", "fp8-90-swapped"):
        found = child("compile")[case]
        assert found["fp8"] == found["all"] > 0
        assert found["from_zero"] == found["additions"] == found["stack"] == found["atomics"] == found["multiply_adds"] == 0


@pytest.mark.parametrize(
    "tiles, words",
    [
        (dict(SWAPPED=True, BLOCK_TOKENS=32), "must have 64 BLOCK_TOKENS to be SWAPPED"),
        (dict(BLOCK_FEATURES=32), "must have 64 BLOCK_FEATURES or be SWAPPED"),
        (dict(BLOCK_K=512, num_stages=8), "bytes of shared memory; there are 232448"),
        (dict(BLOCK_FEATURES=256, BLOCK_TOKENS=128, BLOCK_K=64), "256 registers a thread for its sum"),
    ],
)
def test_tiles_that_cannot_be_are_refused_before_compiling(tiles, words):
    triton_packed = pytest.importorskip("pallas_kernels.grouped_matmul.triton_packed")
    with pytest.raises(ValueError, match=words):
        triton_packed.packed_launch(64, 4096, 2048, 1, inner="fp8", tiles=triton_packed.Tiles(**tiles))


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print(json.dumps({name: _inspect(launch, inputs, capability) for name, capability, launch, inputs in _compiled()}))
    else:
        bits = {name: _interpret(*case) for name, *case in _interpreted()}
        print(json.dumps(bits | {"refused": _refused_by_hopper()}))
