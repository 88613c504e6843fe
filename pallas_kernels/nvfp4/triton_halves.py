"""Arithmetic on words of two float16, which a GPU does at twice the speed of float32. A word is an int32.

The interpreter knows no assembly: there, the same in float32 and rounded. Every result that the callers use is the same.
"""

import triton
import triton.language as tl

# Whether assembly is understood.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _low(word):
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(word):
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack(low, high):
    """Two float32 as a word of two float16, to nearest even."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def low_twice(word):
    """The first half of words in both halves."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l}; }", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (word & 0xFFFF) | (word << 16)


@triton.jit
def high_twice(word):
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h}; }", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((word >> 16) & 0xFFFF) | (word & -65536)


@triton.jit
def swapped(word):
    """The halves in each other's place."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x1032;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return ((word >> 16) & 0xFFFF) | (word << 16)


@triton.jit
def larger_integers(a, b):
    """Larger of each of the two halves as unsigned integers."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (tl.maximum((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def from_bfloat16(size, offset):
    """Magnitudes of two bfloat16 as two float16, their exponents changed by `offset` (2^7 times the change, in both halves; the
    bias's -112 included). What becomes smaller than 2^-14 becomes something smaller than 2^-14."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, z; mov.b32 z, 0; add.s16x2 t, $1, $2; max.s16x2 t, t, z; shl.b32 $0, t, 3; }",
            "=r,r,r", [size, offset], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = tl.maximum((size & 0xFFFF) + ((offset << 16) >> 16), 0)
        return (low << 3) | (tl.maximum((size >> 16) + (offset >> 16), 0) << 19)


@triton.jit
def scales_of_largest(largest):
    """Scales (nearest to largest / 6, nearest to largest / 4) of a number in both halves, in [2^15, 2^16); see the reference.
    Below 2^15 those for 2^15."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, p;
            mov.b32 t, 0x78807820; set.ge.f16x2.f16x2 p, $1, t;
            mov.b32 t, 0x68006400; fma.rn.f16x2 t, p, t, $2;
            mov.b32 $0, 0x79807940; set.ge.f16x2.f16x2 p, $1, $0;
            mov.b32 $0, 0x68006800; fma.rn.f16x2 t, p, $0, t;
            mov.b32 $0, 0x7B007AC0; set.ge.f16x2.f16x2 p, $1, $0;
            mov.b32 $0, 0x6C006800; fma.rn.f16x2 $0, p, $0, t;
            }""",
            "=&r,r,r", [largest, 0x70006D00], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = _low(largest)
        six = 5120.0 + tl.where(x >= 33792.0, 1024.0, 0.0) + tl.where(x >= 43008.0, 2048.0, 0.0)
        four = 8192.0 + tl.where(x >= 36864.0, 2048.0, 0.0) + tl.where(x >= 45056.0, 2048.0, 0.0)
        return pack(six + tl.where(x >= 55296.0, 2048.0, 0.0), four + tl.where(x >= 57344.0, 4096.0, 0.0))


@triton.jit
def larger(a, b):
    if ASSEMBLY:
        return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return pack(tl.maximum(_low(a), _low(b)), tl.maximum(_high(a), _high(b)))


@triton.jit
def inverses(scales):
    """1 / each, to nearest; for significands 1, 1.25 and 1.5, which are far from ties."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h; .reg .f32 x, y;
            mov.b32 {l, h}, $1;
            cvt.f32.f16 x, l; cvt.f32.f16 y, h;
            rcp.approx.ftz.f32 x, x; rcp.approx.ftz.f32 y, y;
            cvt.rn.f16x2.f32 $0, y, x;
            }""",
            "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack(1.0 / _low(scales), 1.0 / _high(scales))


@triton.jit
def round_to_e2m1(y, inverse):
    """The E2M1 magnitudes nearest to y x inverse, ties to even."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, m, c;
            mul.rn.f16x2 t, $1, $2;
            mov.b32 c, 0x3C003C00; max.f16x2 m, t, c;
            mov.b32 c, 0x60006000; fma.rn.f16x2 t, m, c, t;
            mov.b32 c, 0xE000E000; fma.rn.f16x2 $0, m, c, t;
            }""",
            "=r,r,r", [y, inverse], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        t = pack(_low(y) * _low(inverse), _high(y) * _high(inverse))
        low = tl.maximum(_low(t), 1.0) * 512.0
        high = tl.maximum(_high(t), 1.0) * 512.0
        t = pack(_low(t) + low, _high(t) + high)
        return pack(_low(t) - low, _high(t) - high)


@triton.jit
def difference_of_errors(y, value4, scale4, value6, scale6):
    """|y - value4 x scale4| - |y - value6 x scale6|."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            neg.f16x2 a, $3; fma.rn.f16x2 a, $2, a, $1; abs.f16x2 a, a;
            neg.f16x2 b, $5; fma.rn.f16x2 b, $4, b, $1; abs.f16x2 b, b;
            sub.rn.f16x2 $0, a, b;
            }""",
            "=r,r,r,r,r,r", [y, value4, scale4, value6, scale6], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = tl.abs(_low(y) - _low(value4) * _low(scale4)) - tl.abs(_low(y) - _low(value6) * _low(scale6))
        high = tl.abs(_high(y) - _high(value4) * _high(scale4)) - tl.abs(_high(y) - _high(value6) * _high(scale6))
        return pack(low, high)


@triton.jit
def _four_words(words, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    even, odd = tl.split(tl.reshape(words, (ROWS, BLOCKS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def sums(a, b, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums [ROWS, BLOCKS] in float32 of the 16 numbers of words a and b [ROWS, BLOCKS, 4]; the sums are exact in any order.

    On a GPU the matrix unit adds: a thread's words are its part of a matrix, whose other factor picks, for column 2 j, what
    lies with the j-th thread of a row's four. So every thread gets the sum of its own. Float16 product are exact there, and sums
    are kept with at least float32's precision.
    """
    if ASSEMBLY:
        a0, a1, a2, a3 = _four_words(a, ROWS, BLOCKS)
        b0, b1, b2, b3 = _four_words(b, ROWS, BLOCKS)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 lane, column, one; .reg .f32 z, c0, c1, c2, c3; .reg .pred own;
            mov.u32 lane, %laneid;
            and.b32 column, lane, 3; shl.b32 column, column, 1; shr.u32 lane, lane, 2;
            setp.eq.u32 own, lane, column;
            selp.b32 one, 0x3C003C00, 0, own;
            mov.f32 z, 0f00000000;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {$1, $2, $3, $4}, {one, one}, {z, z, z, z};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {$5, $6, $7, $8}, {one, one}, {c0, c1, c2, c3};
            add.f32 $0, c0, c2;
            }""",
            "=f,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, b2, b3], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.sum(_low(a) + _high(a) + _low(b) + _high(b), axis=2)


@triton.jit
def product(a, b):
    if ASSEMBLY:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return pack(_low(a) * _low(b), _high(a) * _high(b))


@triton.jit
def times_smallest(word):
    """Times the smallest normal number, 2^-14."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0x04000400; mul.rn.f16x2 $0, $1, c; }",
            "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack(_low(word) * 0.00006103515625, _high(word) * 0.00006103515625)


@triton.jit
def e2m1_codes(words, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes of eight numbers, in words [ROWS, BLOCKS, 4] of E2M1 numbers x 2^-14, as words [ROWS, BLOCKS] of eight codes."""
    # x 2^-14 puts E2M1's exponents on float16's smallest: a magnitude's index are the bits from 9 on.
    w0, w1, w2, w3 = _four_words(words, ROWS, BLOCKS)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, even, odd, s, t;
            prmt.b32 x, $1, $2, 0x7351; prmt.b32 y, $3, $4, 0x7351;
            prmt.b32 even, x, y, 0x5410; prmt.b32 odd, x, y, 0x7632;
            shr.u32 s, even, 1; shr.u32 t, even, 4; lop3.b32 even, s, t, 0x07070707, 0xE4;
            shl.b32 s, odd, 3; lop3.b32 odd, s, odd, 0x70707070, 0xE4;
            lop3.b32 $0, even, odd, 0x0F0F0F0F, 0xE4;
            }""",
            "=r,r,r,r,r", [w0, w1, w2, w3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _code_byte(w0) | (_code_byte(w1) << 8) | (_code_byte(w2) << 16) | (_code_byte(w3) << 24)


@triton.jit
def _code_byte(word):
    return ((word >> 9) & 7) | ((word >> 12) & 8) | ((word >> 21) & 0x70) | ((word >> 24) & 0x80)


@triton.jit
def to_e4m3(word):
    """Two E4M3 bytes, int16."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f16x2 $0, $1;", "=h,r", [word], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        low = _low(word).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        return (low | (_high(word).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8)).to(tl.int16)


@triton.jit
def both(value):
    """A value of 16 bits in both halves; bits beyond are ignored."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x1010;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (value & 0xFFFF) | (value << 16)
