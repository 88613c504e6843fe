"""The arithmetic of attention's softmax on the registers of a warpgroup, operation for operation that of the Triton kernel.

Pallas has no say in the order of a sum, and lets the compiler contract a multiply and an add. A row's bits hang on both, so what
they touch is written here with single operations. Pallas's interpreter knows no registers: `interpreted` has the same functions
on arrays, with sums in the same order.

Let R be the 64 rows of a warpgroup's tile, S the 64 keys of a block, K the head dimension. A row of scores lies in four threads
beside each other: thread t has columns 8 i + 2 t and 8 i + 2 t + 1 for i = 0..7. Its sum is each thread's numbers in rising
order, then thread t's plus thread t ^ 2's, then that plus thread t ^ 1's: what Triton emits for this layout. (Mosaic's own sum
keeps two partial sums a thread and shuffles 1 before 2.)
"""

import types

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

ROWS = COLUMNS = 64
_TILE, _ROW, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def _empty():
    return jnp.float32(-jnp.inf)


# --- on registers --------------------------------------------------------------------------------------------------------------


def _constant(value: float) -> ir.Value:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))


def _exp2(x: ir.Value) -> ir.Value:
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)


def _multiply(a: ir.Value, b: ir.Value) -> ir.Value:
    """Rounded by itself: the assembler may not contract what names its rounding."""
    return llvm.inline_asm(ir.F32Type.get(), [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f", has_side_effects=False)


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    return llvm.inline_asm(ir.F32Type.get(), [a, b], "add.rn.f32 $0, $1, $2;", "=f,f,f", has_side_effects=False)


def _finite(maximum: ir.Value) -> ir.Value:
    is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, maximum, _constant(-np.inf))
    return arith.select(is_empty, _constant(0.0), maximum)


def _numbers(array) -> list[list[ir.Value]]:
    """[2][n]: a thread's numbers of its two rows, by rising column."""
    registers = array.registers.reshape(-1, 2)  # [.., 2 rows], each a vector of neighbours in a row
    (width,) = ir.VectorType(registers[0, 0].type).shape
    places = [ir.DenseI64ArrayAttr.get([i]) for i in range(width)]
    return [
        [vector.extract(r, dynamic_position=[], static_position=place) for r in registers[:, row] for place in places]
        for row in range(2)
    ]


def _like(array, rows: list[list[ir.Value]], element: ir.Type | None = None):
    """An array laid out as `array`, of `_numbers`, narrowed to `element`."""
    registers = array.registers.reshape(-1, 2)
    (width,) = ir.VectorType(registers[0, 0].type).shape
    made = np.empty(registers.shape, dtype=object)
    for row in range(2):
        for i in range(registers.shape[0]):
            packed = vector.from_elements(ir.VectorType.get((width,), ir.F32Type.get()), rows[row][i * width : (i + 1) * width])
            made[i, row] = packed if element is None else arith.truncf(ir.VectorType.get((width,), element), packed)
    return mgpu.FragmentedArray(_registers=made.reshape(array.registers.shape), _layout=array.layout, _is_signed=None)


def _across_row(combine, x: ir.Value) -> ir.Value:
    for distance in (2, 1):
        x = combine(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def _in_order(combine, numbers: list[ir.Value]) -> ir.Value:
    total = numbers[0]
    for number in numbers[1:]:
        total = combine(total, number)
    return total


def _row(shape=(ROWS,)):
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_ROW)


def _step(scores_RS, max_R, sum_R, *, scale: float):
    """(weights [R, S], maximum, sum, rescale), float32: a block's part of the online softmax."""

    @plgpu.inline_mgpu(
        arg_types=(_TILE, _ROW, _ROW),
        return_type=(plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=_TILE), _row(), _row(), _row()),
    )
    def step(_, scores, max_, sum_):
        factor = _constant(scale)
        weights, maxima, sums, rescales = [], [], [], []
        for numbers, (old,), (total,) in zip(_numbers(scores), _numbers(max_), _numbers(sum_), strict=True):
            halves = [_in_order(arith.maxnumf, numbers[i::2]) for i in range(2)]  # a maximum has no order
            largest = _across_row(arith.maxnumf, arith.maxnumf(*halves))
            new = arith.maxnumf(old, _multiply(largest, factor))
            subtract = _finite(new)
            negative = arith.negf(subtract)
            row = [_exp2(math.fma(number, factor, negative)) for number in numbers]
            rescale = _exp2(arith.subf(old, subtract))
            weights.append(row)
            maxima.append([new])
            rescales.append([rescale])
            sums.append([_add(_multiply(total, rescale), _across_row(_add, _in_order(_add, row)))])
        return _like(scores, weights), _like(max_, maxima), _like(sum_, sums), _like(max_, rescales)

    return step(scores_RS, max_R, sum_R)


def _narrow(weights_RS):
    """bfloat16, not before the tensor cores were waited for: they still read the last block's from registers that come free."""

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, layout=_TILE))
    def narrow(_, weights):
        weights = mgpu.optimization_barrier(weights)
        return _like(weights, _numbers(weights), ir.BF16Type.get())

    return narrow(weights_RS)


def _merge_scales(max_a, max_b):
    """(maximum, scale of a, scale of b), each [R]."""

    @plgpu.inline_mgpu(arg_types=(_ROW, _ROW), return_type=(_row(), _row(), _row()))
    def merge(_, max_a, max_b):
        made = [], [], []
        for (a,), (b,) in zip(_numbers(max_a), _numbers(max_b), strict=True):
            maximum = arith.maxnumf(a, b)
            subtract = _finite(maximum)
            for rows, value in zip(
                made, (maximum, _exp2(arith.subf(a, subtract)), _exp2(arith.subf(b, subtract))), strict=True
            ):  # fmt: skip
                rows.append([value])
        return tuple(_like(max_a, rows) for rows in made)

    return merge(max_a, max_b)


def _blend(a, scale_a, b, scale_b):
    """a * scale_a + b * scale_b by row, three roundings: [R, n] or [R]."""
    layout = _ROW if a.ndim == 1 else _TILE

    @plgpu.inline_mgpu(
        arg_types=(layout, _ROW, layout, _ROW), return_type=plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=layout)
    )
    def blend(_, a, scale_a, b, scale_b):
        rows = zip(_numbers(a), _numbers(scale_a), _numbers(b), _numbers(scale_b), strict=True)
        return _like(
            a, [[_add(_multiply(x, p), _multiply(y, q)) for x, y in zip(xs, ys, strict=True)] for xs, (p,), ys, (q,) in rows]
        )

    return blend(a, scale_a, b, scale_b)


def _scaled(a_RK, scale_R, *, plus_zero: bool = False):
    """a * scale by row; `plus_zero`: no zero of it is negative."""

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROW), return_type=plgpu.ShapeDtypeStruct(a_RK.shape, jnp.float32, layout=_TILE))
    def scaled(_, a, scale):
        rows = [[_multiply(x, p) for x in xs] for xs, (p,) in zip(_numbers(a), _numbers(scale), strict=True)]
        if plus_zero:
            rows = [[_add(x, _constant(0.0)) for x in xs] for xs in rows]
        return _like(a, rows)

    return scaled(a_RK, scale_R)


def _inverse(total_R):
    """1 / total, rounded to nearest, which Pallas's division is not; 0 of a row that attends nothing."""

    @plgpu.inline_mgpu(arg_types=(_ROW,), return_type=_row())
    def inverse(_, total):
        f32 = ir.F32Type.get()
        rows = []
        for (x,) in _numbers(total):
            one_over = llvm.inline_asm(f32, [x], "rcp.rn.f32 $0, $1;", "=f,f", has_side_effects=False)
            is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, x, _constant(0.0))
            rows.append([arith.select(is_empty, _constant(0.0), one_over)])
        return _like(total, rows)

    return inverse(total_R)


def _spread(array, axis: int) -> list[list[ir.Value]]:
    """[2][n], as `_numbers`: an array [R] by row (axis 0) or [S] by column."""
    if axis == 0:
        return [[x] * (COLUMNS // 4) for (x,) in _numbers(array)]
    places = [ir.DenseI64ArrayAttr.get([i]) for i in range(2)]
    columns = [vector.extract(r, dynamic_position=[], static_position=p) for r in array.registers.reshape(-1) for p in places]
    return [columns, columns]


def _seen(scores_RS, distance, *, axis: int):
    """-inf where the key s is behind the query r: s > r + distance. Queries are along `axis`.

    Of a thread's numbers, each has a row and a column that differ from those of its first by constants: one register for all.
    """

    @plgpu.inline_mgpu(
        arg_types=(_TILE, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=_TILE),
    )
    def seen(_, scores, distance):
        i32 = ir.IntegerType.get_signless(32)

        def number(value):
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        thread = arith.remsi(mgpu.utils.thread_idx(), number(128))
        warp, lane = arith.divsi(thread, number(32)), arith.remsi(thread, number(32))
        row = arith.addi(arith.muli(warp, number(16)), arith.divsi(lane, number(4)))
        column = arith.muli(arith.remsi(lane, number(4)), number(2))
        key, query = (column, row) if axis == 0 else (row, column)
        ahead = arith.subi(arith.subi(key, query), distance.registers.item())

        def masked(x, row, column):
            least = number(row - column if axis == 0 else column - row)
            return arith.select(arith.cmpi(arith.CmpIPredicate.sle, ahead, least), x, _constant(-np.inf))

        numbers = _numbers(mgpu.optimization_barrier(scores))
        rows = [[masked(x, 8 * r, 8 * (c // 2) + c % 2) for c, x in enumerate(xs)] for r, xs in enumerate(numbers)]
        return _like(scores, rows)

    return seen(scores_RS, distance)


def _probabilities(scores_RS, lse, *, axis: int, scale: float):
    """exp2(scores * scale - lse), lse by row (axis 0) or column: [R, S] float32, and rounded to bfloat16."""

    @plgpu.inline_mgpu(
        arg_types=(_TILE, (_ROW, _COLUMN)[axis]),
        return_type=tuple(plgpu.ShapeDtypeStruct((ROWS, COLUMNS), t, layout=_TILE) for t in (jnp.float32, jnp.bfloat16)),
    )
    def probabilities(_, scores, lse):
        scores = mgpu.optimization_barrier(scores)  # not before the tensor cores were waited for
        factor = _constant(scale)
        rows = [
            [_exp2(math.fma(x, factor, arith.negf(subtract))) for x, subtract in zip(xs, subtracts, strict=True)]
            for xs, subtracts in zip(_numbers(scores), _spread(lse, axis), strict=True)
        ]
        weights = _like(scores, rows)
        if axis == 0:  # now, and not where they are used, which is behind the next wait
            weights = mgpu.optimization_barrier(weights)
        return weights, _like(scores, rows, ir.BF16Type.get())

    return probabilities(scores_RS, lse)


def _score_gradients(weights_RS, dweights_RS, delta, *, axis: int):
    """weights * (dweights - delta), delta by row (axis 0) or column: bfloat16 [R, S]."""

    @plgpu.inline_mgpu(
        arg_types=(_TILE, _TILE, (_ROW, _COLUMN)[axis]),
        return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, layout=_TILE),
    )
    def gradients(_, weights, dweights, delta):
        dweights = mgpu.optimization_barrier(dweights)  # not before the tensor cores were waited for
        rows = [
            [_multiply(w, arith.subf(d, subtract)) for w, d, subtract in zip(*row, strict=True)]
            for row in zip(_numbers(weights), _numbers(dweights), _spread(delta, axis), strict=True)
        ]
        return _like(weights, rows, ir.BF16Type.get())

    return gradients(weights_RS, dweights_RS, delta)


on_registers = types.SimpleNamespace(
    inverse=_inverse,
    step=_step,
    narrow=_narrow,
    merge_scales=_merge_scales,
    blend=_blend,
    scaled=_scaled,
    seen=_seen,
    probabilities=_probabilities,
    score_gradients=_score_gradients,
)

# --- on arrays -----------------------------------------------------------------------------------------------------------------


def row_sum(weights_RS):
    """[R, S] -> [R] float32 in the order of the registers."""
    rows, columns = weights_RS.shape
    thread_RIT2 = weights_RS.reshape(rows, columns // 8, 4, 2)
    total_RT = thread_RIT2[:, 0, :, 0]
    for i in range(2 * (columns // 8) - 1):
        total_RT = total_RT + thread_RIT2[:, (i + 1) // 2, :, (i + 1) % 2]
    half_RT = total_RT[:, :2] + total_RT[:, 2:]
    return half_RT[:, 0] + half_RT[:, 1]


def _array_finite(maximum):
    return jnp.where(maximum == _empty(), 0.0, maximum)


def _array_step(scores_RS, max_R, sum_R, *, scale: float):
    new_R = jnp.maximum(max_R, jnp.max(scores_RS, axis=1) * scale)
    subtract_R = _array_finite(new_R)
    weights_RS = jnp.exp2(scores_RS * scale - lax.broadcast_in_dim(subtract_R, scores_RS.shape, (0,)))
    rescale_R = jnp.exp2(max_R - subtract_R)
    return weights_RS, new_R, sum_R * rescale_R + row_sum(weights_RS), rescale_R


def _array_merge_scales(max_a, max_b):
    maximum = jnp.maximum(max_a, max_b)
    return maximum, *(jnp.exp2(each - _array_finite(maximum)) for each in (max_a, max_b))


def _array_blend(a, scale_a, b, scale_b):
    return a * lax.broadcast_in_dim(scale_a, a.shape, (0,)) + b * lax.broadcast_in_dim(scale_b, b.shape, (0,))


def _array_scaled(a_RK, scale_R, *, plus_zero: bool = False):
    return a_RK * lax.broadcast_in_dim(scale_R, a_RK.shape, (0,)) + (0.0 if plus_zero else -0.0)


def _array_narrow(weights_RS):
    return weights_RS.astype(jnp.bfloat16)


def _array_inverse(total_R):
    return jnp.where(total_R == 0.0, 0.0, 1.0 / total_R)


def _array_seen(scores_RS, distance, *, axis: int):
    query, key = (lax.broadcasted_iota(jnp.int32, scores_RS.shape, each) for each in (axis, 1 - axis))
    return jnp.where(key <= query + distance, scores_RS, _empty())


def _array_probabilities(scores_RS, lse, *, axis: int, scale: float):
    weights_RS = jnp.exp2(scores_RS * scale - lax.broadcast_in_dim(lse, scores_RS.shape, (axis,)))
    return weights_RS, _array_narrow(weights_RS)


def _array_score_gradients(weights_RS, dweights_RS, delta, *, axis: int):
    return _array_narrow(weights_RS * (dweights_RS - lax.broadcast_in_dim(delta, weights_RS.shape, (axis,))))


interpreted = types.SimpleNamespace(
    inverse=_array_inverse,
    step=_array_step,
    narrow=_array_narrow,
    merge_scales=_array_merge_scales,
    blend=_array_blend,
    scaled=_array_scaled,
    seen=_array_seen,
    probabilities=_array_probabilities,
    score_gradients=_array_score_gradients,
)
