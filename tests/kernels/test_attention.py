"""The forward kernels of attention in Triton's interpreter against a softmax in float64, and compiled for NVIDIA GPUs."""

import json
import os
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CHUNK_BLOCKS = 2  # in place of the kernels' own, so that short sequences have several chunks
B, H, N, K = 2, 2, 1, 32
LENGTHS = ((70, 40), (140,))  # sequences packed into each of the B rows, at multiples of 64
# B, T, N, and J where there are pages.
COMPILED = {"prefill": (4, 4096, 4), "decode": (8, 1, 4, 512)}


def _expected(q, k, v):
    """[T, H, K], [T, N, K] -> causal attention in float64, and the log-sum-exp in base 2, [H, T]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    score = np.einsum("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    score = np.where(np.tril(np.ones(score.shape[1:], bool)), score, -np.inf)
    maximum = score.max(-1, keepdims=True)
    weight = np.exp(score - maximum)
    total = weight.sum(-1, keepdims=True)
    lse = (maximum + np.log(total))[..., 0] / np.log(2)
    return np.einsum("hts,shk->thk", weight / total, v), lse


def _packed(rng):
    """Random q, k, v of packed sequences, their positions, and (b, start, length) of each sequence."""
    T = max(sum(-(-length // 64) * 64 for length in lengths) for lengths in LENGTHS) - 5  # no multiple of a block
    q, k, v = (rng.standard_normal((B, T, heads, K)).astype(np.float32) for heads in (H, N, N))
    positions, sequences = np.zeros((B, T), np.int32), []
    for b, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            length = min(length, T - start)
            positions[b, start : start + length] = np.arange(length)
            sequences.append((b, start, length))
            start += -(-length // 64) * 64
    return q, k, v, positions, sequences


def _pages(rng, k, v, lengths):
    """Keys and values of the first sequences of each row in shuffled pages with NaN wherever nothing has to be read."""
    J = max(-(-length // 64) for length in lengths) + 1
    order = rng.permutation(B * J)
    tables = np.full((B, J), 10**6, np.int32)  # no such page
    pages = np.full((2, B * J, 64, N, K), np.nan, k.dtype)
    for b, length in enumerate(lengths):
        used = -(-length // 64)
        tables[b, :used] = order[b * J : b * J + used]
        for kind, x in enumerate((k, v)):
            for s in range(length):
                pages[kind, tables[b, s // 64], s % 64] = x[b, s]
    return *pages, tables


def _interpreted() -> dict:
    """Greatest error of each case; for what must have other's bits: how many elements have not."""
    from pallas_kernels import gpu
    from pallas_kernels.attention import triton

    triton.CHUNK_BLOCKS = CHUNK_BLOCKS
    rng = np.random.default_rng(0)
    q, k, v, positions, sequences = _packed(rng)
    T = q.shape[1]
    results = {}

    def prefill(q, k, v, positions):
        launch = triton.attention_launch(B, T, H, N, K, q.dtype)
        return gpu.interpret(launch, q, k, v, positions, positions, B, T, 0)

    out, lse = prefill(q, k, v, positions)
    errors = []
    for b, start, length in sequences:
        rows = slice(start, start + length)
        expected, expected_lse = _expected(q[b, rows], k[b, rows], v[b, rows])
        errors += [np.abs(out[b, rows] - expected).max(), np.abs(lse[b, :, rows] - expected_lse).max()]
    results["packed"] = float(max(errors))

    low = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v)]
    out_low, _ = prefill(*low, positions)
    b, start, length = sequences[1]
    rows = slice(start, start + length)
    expected, _ = _expected(*(x[b, rows].astype(np.float32) for x in low))
    results["bfloat16"] = float(np.abs(out_low[b, rows].astype(np.float32) - expected).max())

    lengths = [length for _, start, length in sequences if start == 0]
    for name, arrays, whole in (("float32", (q, k, v), out), ("bfloat16", low, out_low)):
        q, k, v = arrays
        k_pages, v_pages, tables = _pages(rng, k, v, lengths)
        J = tables.shape[1]
        for tokens in (1, 40) if name == "bfloat16" else (1,):  # the last ones of each sequence
            rows = np.stack([np.arange(length - tokens, length) for length in lengths]).astype(np.int32)
            q_rows, expected = (np.stack([x[b, rows[b]] for b in range(B)]) for x in (q, whole))
            found = []
            for split in (False, True):
                launch = triton.attention_launch(B, tokens, H, N, K, q.dtype, table_length=J, split=split)
                result, stats = gpu.interpret(launch, q_rows, k_pages, v_pages, tables, rows, B, tokens, J)
                if split:
                    merge = triton.merge_launch(result.shape[0], B * tokens * H, H, K, q.dtype)
                    result = gpu.interpret(merge, result, stats, rows, B * tokens * H)[0].reshape(q_rows.shape)
                found.append(result)
            # Near, not the same bits: numpy sums the products of a matrix in an order of its own for each shape.
            error = np.abs(found[0].astype(np.float32) - expected.astype(np.float32)).max()
            results[f"pages {name} {tokens}"] = float(error)
            results[f"split {name} {tokens}"] = int(sum(a.tobytes() != b.tobytes() for a, b in zip(*found, strict=True)))
    rows = np.array([[5, -1], [-1, -1]], np.int32)
    launch = triton.attention_launch(B, 2, H, N, K, q.dtype, table_length=J)
    result, stats = gpu.interpret(launch, q[:, :2], k_pages, v_pages, tables, rows, B, 2, J)
    merge = triton.merge_launch(result.shape[0], B * 2 * H, H, K, q.dtype)
    (merged,) = gpu.interpret(merge, result, stats, rows, B * 2 * H)
    merged = merged.reshape(B, 2, H, K).astype(np.float32)
    results["nothing"] = [bool((merged[rows == -1] == 0).all()), bool((merged[rows == 5] != 0).all())]
    return results


def _loops(ptx: str) -> list[str]:
    """The innermost loops with products: only loops branch to a label that has stood before."""
    branches = ((ptx.find(f"\n{branch[1]}:"), branch.start()) for branch in re.finditer(r"\bbra[\w.]*\s+(\$L\w+);", ptx))
    spans = [(label, end) for label, end in branches if label < end]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [ptx[a:b] for a, b in inner if "wgmma.mma_async" in ptx[a:b]]


def _stack_bytes(cubin: bytes, triton) -> int:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


def _compiled() -> dict:
    import triton as triton_package

    from pallas_kernels import gpu
    from pallas_kernels.attention import triton

    def compiled(capability, B, T, N, J=None, H=32, K=128):
        array = jax.ShapeDtypeStruct
        launch = triton.attention_launch(B, T, H, N, K, jnp.bfloat16, table_length=J)
        q, kv, integers = array((B, T, H, K), jnp.bfloat16), array((B, T, N, K), jnp.bfloat16), array((B, T), jnp.int32)
        return gpu.compile_ahead(launch, q, kv, kv, integers, integers, B, T, J or 0, capability=capability)

    def instructions(kernel) -> dict[str, int]:
        patterns = dict(wgmma=r"wgmma\.mma_async\.", tcgen05=r"tcgen05\.mma\.", mma=r"mma\.sync", atomics=r"(?:atom|red)\.")
        return {name: len(re.findall(rf"(?<![\w.]){pattern}", kernel.asm["ptx"])) for name, pattern in patterns.items()}

    found = {}
    for name, shape in COMPILED.items():
        kernel = compiled(90, *shape)
        found[name] = dict(
            **instructions(kernel),
            copies_in_loops=[len(re.findall(r"\bcp\.async\.c[ag]\.", body)) for body in _loops(kernel.asm["ptx"])],
            warps=re.findall(r"warpsPerCTA = \[(\d+), (\d+)\], instrShape", kernel.asm["ttgir"]),
            reductions=re.findall(r"\(tensor<\d+x\d+xf32, #(\w+)>\) -> tensor<\d+xf32", kernel.asm["ttgir"]),
            stack=_stack_bytes(kernel.asm["cubin"], triton_package),
            shared=kernel.metadata.shared,
        )
    found["blackwell"] = instructions(compiled(100, *COMPILED["decode"]))
    return found


def test_packed_sequences_with_a_tail(child):
    assert child("interpret")["packed"] < 2e-6


def test_weights_are_rounded_to_bfloat16(child):
    # Outputs are below 4: the final rounding is 2^-7 at most, that of the weights less.
    assert 1e-4 < child("interpret")["bfloat16"] < 2.0**-6


@pytest.mark.parametrize("dtype, tokens, bound", [("float32", 1, 2e-6), ("bfloat16", 1, 2.0**-7), ("bfloat16", 40, 2.0**-7)])
def test_pages_in_any_order_and_nan_behind_the_position(child, dtype, bound, tokens):
    assert child("interpret")[f"pages {dtype} {tokens}"] < bound


@pytest.mark.parametrize("dtype, tokens", [("float32", 1), ("bfloat16", 1), ("bfloat16", 40)])
def test_chunks_in_programs_of_their_own_give_the_same_bits(child, dtype, tokens):
    assert child("interpret")[f"split {dtype} {tokens}"] == 0


def test_a_position_of_minus_one_attends_nothing(child):
    assert child("interpret")["nothing"] == [True, True]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_for_hopper(child, name):
    found = child("compile")[name]
    assert found["wgmma"] > 0 and found["mma"] == 0 and found["atomics"] == 0
    # Each loop over blocks (with masks, and without) reads ahead.
    assert len(found["copies_in_loops"]) == (2 if name == "prefill" else 1) and all(found["copies_in_loops"])
    # Rows are spread over warps and keys are not: a row's sum has one order whatever the tile.
    assert found["warps"] and all(keys == "1" for _, keys in found["warps"])
    assert set(found["reductions"]) == {"mma"}
    # The merged state, which waits outside of the loops over blocks, may leave the registers there.
    assert found["stack"] <= 16


def test_two_decoding_programs_fit_a_multiprocessor(child):
    assert 2 * (child("compile")["decode"]["shared"] + 1024) <= 228 * 1024  # 1024: what the system takes of each


def test_compiled_for_blackwell(child):
    found = child("compile")["blackwell"]
    assert found["tcgen05"] > 0 and found["mma"] == 0 and found["atomics"] == 0


if __name__ == "__main__":
    print(json.dumps(_interpreted() if sys.argv[1] == "interpret" else _compiled()))
