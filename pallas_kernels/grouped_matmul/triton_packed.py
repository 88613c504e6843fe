"""Matmuls that read packed weights: for few rows, where the weights' bytes are what takes the time, and for FP4 tensor cores.

A program owns BLOCK_TOKENS rows of one group and BLOCK_FEATURES rows of that group's matrix. The weights stand on the M side of
the tensor core instruction, since the native FP4 instruction wants 128 rows there and allows 16 columns. The inner product is the
one thing that differs between GPUs (`multiply`):

* "native": `tl.dot_scaled` on the codes and the block scales as they are stored.
* "fp8": the weights' codes become E4M3 numbers (code x block scale, exact for `fp8_exact` scales) in registers; the activations
  come as E4M3 numbers already, since every program of a row would do the same work again.
* "bf16": the same for any scales, in bfloat16, which holds every code x block scale.

**Bits.** A row's sum runs along K in its natural order, and no other row has a part in it. Zeros fill up the last step. The fp8
sum stays in the tensor core from the first number of a row to the last, as in `triton.py` (which says what that costs). Tiles and
the number of rows therefore cannot change a bit.

**Expansion by table look-up.** The eight products of a block scale b with the magnitudes 0, 0.5, 1, 1.5 | 2, 3, 4, 6 are, as E4M3
bytes, 0, b - 8, b, o | b + 8, o + 8, b + 16, o + 16, where o is the byte of 1.5 x scale: b + 4 for a significand of 1, and b + 5
for 1.25 and 1.5. These are two registers. Four packed codes without their signs are just what `prmt` takes as a selector, in
their order along K, so one instruction looks up four codes. A second one spreads the signs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu, tuning
from pallas_kernels.nvfp4.array import Nvfp4Array
from pallas_kernels.nvfp4.expanded import ExpandedArray
from pallas_kernels.triton_numerics import round_to

INNERS = ("native", "fp8", "bf16")

# $2: eight codes, $3 and $4: the table. $0: E4M3 bytes of codes 0..3, $1: of codes 4..7.
# Shifting by 4 puts the signs of the even codes into bit 7 of their bytes, where those of the odd ones already are.
LOOK_UP_FP8 = tl.constexpr("""{
    .reg .b32 magnitudes, evens, signs;
    and.b32 magnitudes, $2, 0x77777777;
    shl.b32 evens, $2, 4;
    prmt.b32 $0, $3, $4, magnitudes;
    prmt.b32 signs, evens, $2, 0x5140;
    lop3.b32 $0, $0, signs, 0x80808080, 0xF8;
    shr.u32 magnitudes, magnitudes, 16;
    prmt.b32 $1, $3, $4, magnitudes;
    prmt.b32 signs, evens, $2, 0x7362;
    lop3.b32 $1, $1, signs, 0x80808080, 0xF8;
}""")

# The same for bfloat16. $4: eight codes, $5: the block scale, twice. $0 to $3: two numbers each. The upper and the lower bytes of
# the magnitudes (0, 0x3F00, 0x3F80, 0x3FC0 | 0x4000, 0x4040, 0x4080, 0x40C0) are looked up apart, then interleaved and
# multiplied by the scale.
LOOK_UP_BF16 = tl.constexpr("""{
    .reg .b32 magnitudes, evens, signs, upper, lower;
    and.b32 magnitudes, $4, 0x77777777;
    shl.b32 evens, $4, 4;
    prmt.b32 upper, 0x3F3F3F00, 0x40404040, magnitudes;
    prmt.b32 lower, 0xC0800000, 0xC0804000, magnitudes;
    prmt.b32 signs, evens, $4, 0x5140;
    lop3.b32 upper, upper, signs, 0x80808080, 0xF8;
    prmt.b32 $0, lower, upper, 0x5140;
    prmt.b32 $1, lower, upper, 0x7362;
    shr.u32 magnitudes, magnitudes, 16;
    prmt.b32 upper, 0x3F3F3F00, 0x40404040, magnitudes;
    prmt.b32 lower, 0xC0800000, 0xC0804000, magnitudes;
    prmt.b32 signs, evens, $4, 0x7362;
    lop3.b32 upper, upper, signs, 0x80808080, 0xF8;
    prmt.b32 $2, lower, upper, 0x5140;
    prmt.b32 $3, lower, upper, 0x7362;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $5;
    mul.rn.bf16x2 $3, $3, $5;
}""")


@triton.jit
def _per_code(per_block, ROWS: tl.constexpr, BLOCKS: tl.constexpr, LENGTH: tl.constexpr):
    """[ROWS, BLOCKS] to [ROWS, BLOCKS * LENGTH]: each number LENGTH times."""
    return tl.broadcast_to(per_block[:, :, None], (ROWS, BLOCKS, LENGTH)).reshape(ROWS, BLOCKS * LENGTH)


@triton.jit
def _codes(words, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Eight codes a word, to one a number: int32 [ROWS, DEPTH]."""
    shifts = 4 * tl.arange(0, 8)
    return ((words.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & 15).reshape(ROWS, DEPTH)


@triton.jit
def expand_fp8(words, scale_bytes, ROWS: tl.constexpr, DEPTH: tl.constexpr, PLAIN: tl.constexpr):
    """E4M3 numbers [ROWS, DEPTH] of uint32 words [ROWS, DEPTH / 8] and scales' bytes [ROWS, DEPTH / 16].

    Where a code is 0 so is the result, whatever the scale's byte is.

    PLAIN: the same look-up without assembler, as the interpreter needs it.
    """
    BLOCKS: tl.constexpr = DEPTH // 16
    b = scale_bytes.to(tl.int32)
    # The two registers of the table (see the top). Bytes of `high` have room. In `low`, 0xF8 subtracts 8 from byte 1, and
    # the carry out of it, which is certain, is taken back by the 0xFF in byte 2, whose own carry byte 3 expects.
    is_one = (b & 6) == 0
    low = b * 0x01010100 + tl.where(is_one, 0x03FFF800, 0x04FFF800)
    high = b * 0x01010101 + tl.where(is_one, 0x14100C08, 0x15100D08)
    if PLAIN:
        codes = _codes(words, ROWS, DEPTH)
        table = tl.where((codes & 4) == 0, _per_code(low, ROWS, BLOCKS, 16), _per_code(high, ROWS, BLOCKS, 16))
        result = (((table >> (8 * (codes & 3))) & 0x7F) | ((codes & 8) << 4)).to(tl.uint8)
    else:
        low, high = _per_code(low, ROWS, BLOCKS, 2), _per_code(high, ROWS, BLOCKS, 2)
        # One word at a time: right for every layout that the compiler may choose.
        first, second = tl.inline_asm_elementwise(
            LOOK_UP_FP8, "=&r,=&r,r,r,r", [words, low, high], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
        fours = tl.join(first, second).reshape(ROWS, DEPTH // 4)
        # A word is its four bytes already, and the compiler sees it: no instruction comes of this.
        evens = tl.join(fours.to(tl.uint8), (fours >> 16).to(tl.uint8))
        odds = tl.join((fours >> 8).to(tl.uint8), (fours >> 24).to(tl.uint8))
        result = tl.join(evens, odds).reshape(ROWS, DEPTH)
    return result.to(tl.float8e4nv, bitcast=True)


@triton.jit
def expand_bf16(words, scale_bytes, ROWS: tl.constexpr, DEPTH: tl.constexpr, PLAIN: tl.constexpr):
    """Code x block scale [ROWS, DEPTH] of uint32 words [ROWS, DEPTH / 8] and scales' bytes [ROWS, DEPTH / 16], any E4M3.

    PLAIN: the same numbers in float32, as the interpreter needs them. Else bfloat16.
    """
    BLOCKS: tl.constexpr = DEPTH // 16
    scales = scale_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if PLAIN:
        codes = _codes(words, ROWS, DEPTH)
        # The three bits of a magnitude, read as the upper bits of a float16 (a subnormal one for 0.5), are 2^-14 of it.
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        result = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * _per_code(scales, ROWS, BLOCKS, 16)
    else:
        upper = scales.to(tl.int32, bitcast=True)  # an E4M3 number has no bits in the lower half
        pair = _per_code(upper | ((upper >> 16) & 0xFFFF), ROWS, BLOCKS, 2)
        first, second, third, fourth = tl.inline_asm_elementwise(
            LOOK_UP_BF16, "=&r,=&r,=&r,=&r,r,r", [words, pair], dtype=(tl.uint32,) * 4, is_pure=True, pack=1
        )
        twos = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(ROWS, DEPTH // 2)
        result = tl.join(twos.to(tl.uint16), (twos >> 16).to(tl.uint16)).reshape(ROWS, DEPTH).to(tl.bfloat16, bitcast=True)
    return result


@triton.jit
def multiply(
    sum, w, w_scale, w_rows, x, x_scale, x_rows, x_inside, k,
    K: tl.constexpr, INNER: tl.constexpr, PLAIN: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The replaceable inner product: sum [BLOCK_FEATURES, BLOCK_TOKENS] (SWAPPED: [BLOCK_TOKENS, BLOCK_FEATURES]) plus that of
    the numbers k .. k + BLOCK_K of each row.

    w_rows, x_rows: int64 indices of the rows. x_inside: which rows of x are wanted; the others may be anything. K is filled up
    with zeros to a multiple of BLOCK_K.
    """
    in_block = k // 16 + tl.arange(0, BLOCK_K // 16)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    # Scales are loaded as bytes: zeros of float8 are nothing that the interpreter can make.
    w_scale_pointers = w_scale.to(tl.pointer_type(tl.uint8)) + w_rows[:, None] * (K // 16) + in_block[None, :]
    if INNER == "native":
        in_byte = k // 2 + tl.arange(0, BLOCK_K // 2)
        w_pointers = w + w_rows[:, None] * (K // 2) + in_byte[None, :]
        x_pointers = x + x_rows[None, :] * (K // 2) + in_byte[:, None]
        x_scale_pointers = x_scale.to(tl.pointer_type(tl.uint8)) + x_rows[:, None] * (K // 16) + in_block[None, :]
        if EVEN:
            w_codes, w_scales = tl.load(w_pointers), tl.load(w_scale_pointers)
            x_codes, x_scales = tl.load(x_pointers), tl.load(x_scale_pointers)
        else:
            inside, inside_blocks = in_byte < K // 2, in_block < K // 16
            w_codes = tl.load(w_pointers, mask=inside[None, :], other=0)
            x_codes = tl.load(x_pointers, mask=inside[:, None], other=0)
            w_scales = tl.load(w_scale_pointers, mask=inside_blocks[None, :], other=0)
            x_scales = tl.load(x_scale_pointers, mask=inside_blocks[None, :], other=0)
        w_scales = w_scales.to(tl.float8e4nv, bitcast=True)
        x_scales = x_scales.to(tl.float8e4nv, bitcast=True)
        sum = tl.dot_scaled(w_codes, w_scales, "e2m1", x_codes, x_scales, "e2m1", sum)
    else:
        # K is a multiple of 16, so that a row is a whole number of words.
        in_word = k // 8 + tl.arange(0, BLOCK_K // 8)
        in_row = k + tl.arange(0, BLOCK_K)
        word_pointers = w.to(tl.pointer_type(tl.uint32)) + w_rows[:, None] * (K // 8) + in_word[None, :]
        x_pointers = x + x_rows[None, :] * K + in_row[:, None]
        # Most tiles of a decode have few rows, and x is not packed: rows that are not wanted are not loaded.
        if EVEN:
            words, scales = tl.load(word_pointers), tl.load(w_scale_pointers)
            x_values = tl.load(x_pointers, mask=x_inside[None, :], other=0.0)
        else:
            words = tl.load(word_pointers, mask=(in_word < K // 8)[None, :], other=0)
            scales = tl.load(w_scale_pointers, mask=(in_block < K // 16)[None, :], other=0)
            x_values = tl.load(x_pointers, mask=(in_row < K)[:, None] & x_inside[None, :], other=0.0)
        if INNER == "fp8":
            w_values = expand_fp8(words, scales, BLOCK_FEATURES, BLOCK_K, PLAIN)
        else:
            w_values = expand_bf16(words, scales, BLOCK_FEATURES, BLOCK_K, PLAIN)
            if PLAIN:  # the interpreter cannot multiply bfloat16
                x_values = x_values.to(tl.float32)
        if SWAPPED:
            sum = tl.dot(tl.trans(x_values), tl.trans(w_values), sum, input_precision="ieee")
        else:
            sum = tl.dot(w_values, x_values, sum, input_precision="ieee")
    return sum


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def packed_kernel(
    x, x_scale, x_outer, w, w_scale, w_outer, group_sizes, num_rows, out,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    INNER: tl.constexpr, PLAIN: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # Tiles are counted through the groups, and on through the rows behind the last one. Each program finds its own again.
    tile = tl.program_id(1)
    groups = tl.arange(0, E_PADDED)
    sizes = tl.load(group_sizes + groups, mask=groups < E, other=0)
    tiles = (sizes + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    is_before = (tl.cumsum(tiles) <= tile).to(tl.int32)
    # One reduction of three numbers: threads meet once. The group is E_PADDED behind the last one.
    group, rows_before, tiles_before = tl.reduce((is_before, is_before * sizes, is_before * tiles), 0, _add_three)
    first = rows_before + (tile - tiles_before) * BLOCK_TOKENS
    is_behind = group >= E
    end = tl.where(is_behind, num_rows, rows_before + tl.load(group_sizes + group, mask=group < E, other=0))
    if first >= end:
        return

    rows = first + tl.arange(0, BLOCK_TOKENS)
    features = tl.program_id(0) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    out_pointers = out + rows.to(tl.int64)[None, :] * N + features[:, None]
    out_mask = (rows < end)[None, :] & (features < N)[:, None]
    if is_behind:
        tl.store(out_pointers, tl.zeros((BLOCK_FEATURES, BLOCK_TOKENS), out.dtype.element_ty), mask=out_mask)
        return

    # What a tile has too many of are copies of its last row: nothing outside of the group is read.
    x_rows = tl.minimum(rows, end - 1).to(tl.int64)
    x_inside = rows < end
    w_rows = group.to(tl.int64) * N + tl.minimum(features, N - 1)
    # Asked for here, since nothing would hide the wait behind the loop.
    x_factor, w_factor = tl.load(x_outer + x_rows), tl.load(w_outer + group)
    sum = tl.zeros((BLOCK_TOKENS, BLOCK_FEATURES) if SWAPPED else (BLOCK_FEATURES, BLOCK_TOKENS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        sum = multiply(
            sum, w, w_scale, w_rows, x, x_scale, x_rows, x_inside, k,
            K, INNER, PLAIN, SWAPPED, BLOCK_FEATURES, BLOCK_TOKENS, BLOCK_K,
        )  # fmt: skip
    if SWAPPED:
        sum = tl.trans(sum)
    result = sum * x_factor[None, :] * w_factor
    tl.store(out_pointers, round_to(result, out.dtype.element_ty), mask=out_mask)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What may change the speed and never the bits.

    Attributes:
      BLOCK_FEATURES: weight rows of a program: 128 for the native instruction, else 64 or 128.
      BLOCK_TOKENS: activation rows of a program, at least 16.
      BLOCK_K: numbers of a row per step; the instructions run along K in the same order for each.
      UNROLL: steps per trip of the loop.
      SWAPPED: the tokens stand on the M side of the instruction, which wants 64 of them, and the weights on the N side, where 16
        are enough: for so few weights that tiles of 64 leave processors idle. Not for "native".
      num_warps: a multiple of 4.
      num_stages: steps whose loads are under way at once.
    """

    BLOCK_FEATURES: int = 64
    BLOCK_TOKENS: int = 16
    BLOCK_K: int = 128
    UNROLL: int = 2
    SWAPPED: bool = False
    num_warps: int = 4
    num_stages: int = 3


_PROCESSORS = 132  # of an H200
# From here on the loop over K is what a program of so few spends its time on, not its start.
_DEEP = 4096


def default_tiles(inner: str, M: int, N: int, K: int, E: int) -> Tiles:
    """Tiles by the number of rows that a group has if all have the same."""
    tokens = min(max(16, triton.next_power_of_2(-(-M // E))), 256 if inner == "native" else 64)
    if inner == "native":
        num_warps = 8 if tokens == 256 else 4
        return Tiles(BLOCK_FEATURES=128, BLOCK_TOKENS=tokens, BLOCK_K=256, UNROLL=1, num_warps=num_warps)
    if inner == "bf16":
        return Tiles(BLOCK_TOKENS=tokens)
    programs = triton.cdiv(N, 64) * min(E, M)
    if programs < _PROCESSORS and K >= _DEEP:
        return Tiles(BLOCK_FEATURES=16, BLOCK_TOKENS=64, BLOCK_K=512, UNROLL=1, SWAPPED=True)
    # A program that has a processor to itself must have its loads under way early: it waits for little else.
    return Tiles(BLOCK_TOKENS=tokens, BLOCK_K=256, UNROLL=1, num_stages=8 if programs <= 2 * _PROCESSORS else 4)


def packed_launch(
    M: int, N: int, K: int, E: int, *, inner: str, out_dtype=jnp.bfloat16, tiles: Tiles | None = None,
    plain: bool = False,
) -> gpu.Launch:  # fmt: skip
    """The launch for M rows, E matrices [N, K]; K is a multiple of 16.

    Its inputs: x, x_scale, x_outer [M] float32, w uint8 [E, N, K / 2], w_scale float8_e4m3fn [E, N, K / 16], w_outer [E]
    float32, group_sizes [E] int32, M (an integer). For "native", x is uint8 [M, K / 2] and x_scale float8_e4m3fn [M, K / 16];
    else x is [M, K], float8_e4m3fn for "fp8" and bfloat16 for "bf16", and x_scale is not read.

    Args:
      inner: see the top of this file.
      tiles: None for `default_tiles`.
      plain: without what the interpreter does not know (assembler, bfloat16 products). The same bits where the sums are exact.

    Raises:
      ValueError: K is not a multiple of 16, the tiles do not fit, or no such inner product.
    """
    tiles = tiles or default_tiles(inner, M, N, K, E)
    if inner not in INNERS:
        raise ValueError(f"inner product {inner!r}: must be one of {', '.join(INNERS)}")
    if K % 16:
        raise ValueError(f"K = {K} must be a multiple of 16, the length of a block")
    if inner == "native" and tiles.BLOCK_FEATURES != 128:
        raise ValueError(f"{tiles} must have a BLOCK_FEATURES of 128: the native instruction exists for no less")
    if inner != "native":
        if tiles.SWAPPED and tiles.BLOCK_TOKENS < 64:
            raise ValueError(f"{tiles} must have 64 BLOCK_TOKENS to be SWAPPED: fewer are another instruction, with other bits")
        if not tiles.SWAPPED and tiles.BLOCK_FEATURES < 64:
            raise ValueError(f"{tiles} must have 64 BLOCK_FEATURES or be SWAPPED: fewer are another instruction, with other bits")
        x_bytes = 1 if inner == "fp8" else 2
        loaded = (tiles.BLOCK_FEATURES * 9 // 16 + tiles.BLOCK_TOKENS * x_bytes) * tiles.BLOCK_K * tiles.UNROLL * tiles.num_stages
        expanded = tiles.SWAPPED * tiles.BLOCK_FEATURES * tiles.BLOCK_K * x_bytes
        sums = tiles.BLOCK_FEATURES * tiles.BLOCK_TOKENS
        gpu.check_tile("packed matmul", dataclasses.asdict(tiles), sums=sums, shared_bytes=loaded + expanded)
    # A group wastes less than one tile, and so do the rows behind the last one; no more than M of them have a row.
    num_tiles = M // tiles.BLOCK_TOKENS + min(E + 1, M)
    return gpu.Launch(
        kernel=packed_kernel,
        out_shape=gpu.outputs(((M, N), out_dtype)),
        grid=(triton.cdiv(N, tiles.BLOCK_FEATURES), num_tiles),
        constants=dict(
            N=N, K=K, E=E, E_PADDED=triton.next_power_of_2(E),
            INNER=inner, PLAIN=plain, SWAPPED=tiles.SWAPPED,
            BLOCK_FEATURES=tiles.BLOCK_FEATURES, BLOCK_TOKENS=tiles.BLOCK_TOKENS, BLOCK_K=tiles.BLOCK_K, UNROLL=tiles.UNROLL,
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


def grouped_matmul(
    x: Nvfp4Array | ExpandedArray, w: Nvfp4Array, group_sizes: Int[Array, "E"], *, inner: str, out_dtype=jnp.bfloat16,
    tiles: Tiles | None = None,
) -> Float[Array, "M N"]:  # fmt: skip
    """`reference.grouped_matmul` on packed weights.

    Args:
      x: [M, K], rows sorted by group: `Nvfp4Array` for "native", else an `ExpandedArray` of float8_e4m3fn ("fp8") or bfloat16
        ("bf16").
      w: [E, N, K] with outer scales [E]; for "fp8" with block scales of the `fp8_exact` set, which is not checked.
      group_sizes: [E] int32, sum at most M.
      inner: "native", "fp8" or "bf16".
      out_dtype: bfloat16 or float32.
      tiles: None for those of the tuning table.

    Returns:
      [M, N] in `out_dtype`; zeros behind the last group.

    Raises:
      TypeError: x is not of the type that `inner` reads.
      ValueError: see `packed_launch`.
    """
    (M, K), (E, N, _) = x.shape, w.shape
    inputs = _inputs(x, inner)
    if tiles is None:
        default = dataclasses.asdict(default_tiles(inner, M, N, K, E))
        tiles = Tiles(**tuning.config(f"grouped_matmul_packed_{inner}", rows=-(-M // E), features=N, depth=K, default=default))
    launch = packed_launch(M, N, K, E, inner=inner, out_dtype=out_dtype, tiles=tiles)
    return gpu.run(launch, *inputs, w.codes, w.block_scale, w.outer_scale, group_sizes, M)[0]


def matmul(
    x: Nvfp4Array | ExpandedArray, w: Nvfp4Array, *, inner: str, out_dtype=jnp.bfloat16, tiles: Tiles | None = None
) -> Float[Array, "M N"]:
    """`matmul` as one group: w is [N, K], with one outer scale. Everything else as in `grouped_matmul`."""
    stack = jax.tree.map(lambda leaf: leaf[None], w)
    return grouped_matmul(x, stack, jnp.full((1,), x.shape[0], jnp.int32), inner=inner, out_dtype=out_dtype, tiles=tiles)


def _inputs(x: Nvfp4Array | ExpandedArray, inner: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, x_scale, x_outer as the kernel reads them."""
    outer_M = jnp.broadcast_to(x.outer_scale, x.shape[:1])
    if inner == "native":
        if not isinstance(x, Nvfp4Array):
            raise TypeError(f"the inner product 'native' reads x as an Nvfp4Array, not {type(x).__name__}")
        return x.codes, x.block_scale, outer_M
    wanted = jnp.float8_e4m3fn if inner == "fp8" else jnp.bfloat16
    if not isinstance(x, ExpandedArray) or x.values.dtype != wanted:
        found = x.values.dtype if isinstance(x, ExpandedArray) else type(x).__name__
        raise TypeError(f"the inner product {inner!r} reads x as an ExpandedArray of {jnp.dtype(wanted)}, not {found}")
    return x.values, outer_M, outer_M
