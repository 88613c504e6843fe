"""What a case of the kernel benchmark is, at which scale cases are made, and their random inputs; `suites.py` has the cases."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.peers import Peer
from pallas_kernels import gpu, nvfp4, shapes

ROW_RULE = nvfp4.ScaleRule.fp8_exact(outer="row")
MATRIX_RULE = nvfp4.ScaleRule.fp8_exact(outer="matrix")
# Block scales whose products with the codes are no E4M3 numbers: GPUs without FP4 units multiply them in bfloat16.
OTHER_ROW_RULE, OTHER_MATRIX_RULE = nvfp4.ScaleRule.te(outer="row"), nvfp4.ScaleRule.te(outer="matrix")

# What bounds a case from below; `ceilings.py` measures each.
FP8, BF16, COPY, READ = "fp8 matmul", "bf16 matmul", "copy", "read"
# Keys of the ratios, in the order of the table.
VS_BF16, VS_FP8 = "vs_cublas_bf16", "vs_cublas_fp8"
VS_GROUPED, VS_GROUPED_FP8 = "vs_grouped_bf16", "vs_grouped_fp8"
VS_RAGGED, VS_UNFUSED = "vs_ragged_dot", "vs_unfused"
VS_CUDNN, VS_SDPA = "vs_cudnn_attention", "vs_sdpa"
RATIOS = (VS_BF16, VS_FP8, VS_GROUPED, VS_GROUPED_FP8, VS_RAGGED, VS_UNFUSED, VS_CUDNN, VS_SDPA)
SHARE = "share"


def held_by(key: str) -> str:
    """The column of what a comparison holds in memory."""
    return f"{key}_held"


@dataclasses.dataclass(frozen=True)
class Other:
    """A comparison that is itself JAX code: named once, timed once.

    Attributes:
      name: unique; equal names are timed once.
      function: of the arrays of one set.
      make: key -> one set of inputs.
      repeats: at most so many measurements (what takes long gets few).
      calls: calls in one measurement; None: by `timing.enough_calls`.
    """

    name: str
    function: Callable
    make: Callable
    repeats: int = 20
    calls: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
      suite: one of `SUITES`.
      name: what is computed.
      operands: in which formats.
      shape: in words.
      function: of the arrays of one set; made of kernels.
      make: key -> one set of inputs.
      flops: multiplications and additions, 0 where they do not count.
      nbytes: fewest bytes moved: every input read once, every output written once.
      ceiling: which ceiling the share refers to.
      ratios: key -> what is compared: another library's operation, or JAX code.
      goals: key of a ratio, or `SHARE` -> the value wanted at least.
      native: whether a native kernel for the B300 was compiled (it has not been run).
      held: whether the memory that it and what it is compared with in JAX hold beside inputs and results is asked for (one
        more compilation of each; on a GPU).
    """

    suite: str
    name: str
    operands: str
    shape: str
    function: Callable
    make: Callable
    flops: float
    nbytes: float
    ceiling: str
    ratios: dict[str, Peer | Other] = dataclasses.field(default_factory=dict)
    goals: dict[str, float] = dataclasses.field(default_factory=dict)
    native: bool = False
    held: bool = False


@dataclasses.dataclass(frozen=True)
class Attending:
    """What one model's heads attend to.

    Attributes:
      model: whose heads.
      passes: (sequences, tokens of each) of a causal pass.
      caches: (sequences, tokens behind each) of decoding.
    """

    model: shapes.Model
    passes: tuple[tuple[int, int], ...]
    caches: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Which shapes are measured: `FULL` on a GPU, `QUICK` where only the script itself is tried.

    Attributes:
      rows: M of the dense matmuls.
      tokens: tokens of the expert MLP; each gives k rows.
      decode_rows: tokens decoded at once.
      dense: (projection, goal with quantising included) of the dense suite.
      moe: model of the grouped matmuls and the expert MLP.
      decode: dense projections that are decoded.
      backward: dense projections of the backward suite.
      wide: model whose SwiGLU is the widest measured, or None.
      attention: whose heads attend, and over what.
      router_rows: tokens that are routed at once.
    """

    rows: int
    tokens: int
    decode_rows: tuple[int, ...]
    dense: tuple[tuple[shapes.Dense, float], ...]
    moe: shapes.Model
    decode: tuple[shapes.Dense, ...]
    backward: tuple[shapes.Dense, ...]
    wide: shapes.Model | None
    attention: tuple[Attending, ...]
    router_rows: tuple[int, ...]


_LARGE, _MOE = shapes.QWEN3_8B, shapes.QWEN3_30B_A3B
_PASSES, _CACHES = ((4, 4096), (1, 32768)), ((64, 4096), (64, 8192), (8, 32768))
FULL = Scale(
    rows=8192,
    tokens=8192,
    decode_rows=shapes.DECODE_ROWS,
    dense=(
        *((_LARGE.projection(name), 1.5) for name in ("qkv", "o", "gate_up", "down")),
        *((_MOE.projection(name), 1.35) for name in ("qkv", "o")),
    ),
    moe=_MOE,
    decode=(_MOE.projection("qkv"), _LARGE.projection("gate_up"), _LARGE.projection("down")),
    backward=(_LARGE.projection("gate_up"), _LARGE.projection("down"), _MOE.projection("qkv")),
    wide=_LARGE,
    attention=(
        Attending(shapes.LLAMA_3_2_1B, ((4, 4096),), ((64, 8192),)),  # heads of 64
        Attending(_MOE, _PASSES, _CACHES),
        Attending(_LARGE, _PASSES, _CACHES),
    ),
    router_rows=(1, 64, 512, 513, 16384),  # above 512 the kernel is another
)
_TINY = shapes.QUICKSTART
QUICK = Scale(
    rows=32,
    tokens=16,
    decode_rows=(1,),
    dense=((_TINY.projection("qkv"), 1.35),),
    moe=_TINY,
    decode=(_TINY.projection("o"),),
    backward=(_TINY.projection("o"),),
    wide=None,
    attention=(Attending(_TINY, ((1, 32),), ((2, 32),)),),
    router_rows=(1, 32),
)


# Inputs are made by few compiled programs, which cases of equal shapes share.
def normal(key: jax.Array, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    """Gaussian numbers."""
    return _normal(key, shape, scale, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape, scale, dtype):
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def activations(key: jax.Array, M: int, K: int) -> nvfp4.Nvfp4Array | nvfp4.ExpandedArray:
    """A quantised [M, K] batch as the device's matmul reads it: E4M3 numbers on Hopper, codes where there are FP4 units."""
    return _quantize_operand(normal(key, M, K))


def packed(key: jax.Array, *shape: int) -> nvfp4.Nvfp4Array:
    """Packed NVFP4 weights [.., N, K], one outer scale per matrix."""
    return _quantize(normal(key, *shape, scale=0.02))


def expanded(key: jax.Array, *shape: int) -> nvfp4.Nvfp4Array | nvfp4.ExpandedArray:
    """The same weights as the device's tensor cores read them: E4M3 numbers on Hopper, codes where there are FP4 units."""
    q = packed(key, *shape)
    has_fp4_units = jax.default_backend() == "gpu" and gpu.multiplies_codes()
    return q if has_fp4_units else _expand(q)


def with_other_scales(key: jax.Array, *shape: int, rule: nvfp4.ScaleRule) -> nvfp4.Nvfp4Array:
    """Packed NVFP4 numbers by a rule such as `OTHER_MATRIX_RULE`."""
    return _quantize_by(normal(key, *shape, scale=0.02), rule)


def other_rows(key: jax.Array, M: int, K: int) -> nvfp4.Nvfp4Array:
    """Packed activations with scales that fp8 cannot hold."""
    return with_other_scales(key, M, K, rule=OTHER_ROW_RULE)


def other_weights(key: jax.Array, *shape: int) -> nvfp4.Nvfp4Array:
    """Packed weights with scales that fp8 cannot hold."""
    return with_other_scales(key, *shape, rule=OTHER_MATRIX_RULE)


def int32s(numbers: tuple[int, ...]) -> jax.Array:
    """Numbers such as the rows of each expert, [E] int32."""
    return jnp.asarray(np.asarray(numbers, np.int32))


_quantize_by = jax.jit(nvfp4.quantize, static_argnums=1)
_quantize = jax.jit(lambda x: nvfp4.quantize(x, MATRIX_RULE))
_quantize_operand = jax.jit(lambda x: nvfp4.quantize_operand(x, ROW_RULE))
_expand = jax.jit(lambda q: nvfp4.expand(q, jnp.float8_e4m3fn))


def unfused_quantize_dequantize(x: jax.Array) -> jax.Array:
    """The textbook in jnp, as libraries without kernels write it: scale per row and per 16, round, multiply out; bfloat16."""
    x32 = x.astype(jnp.float32)
    outer = jnp.max(jnp.abs(x32), axis=-1, keepdims=True) / (6 * 448)
    blocks = (x32 / outer).reshape(*x.shape[:-1], -1, 16)
    block_scale = (jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 6).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    magnitude = jnp.abs(blocks / jnp.maximum(block_scale, 2.0**-9))
    grid = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
    code = jnp.searchsorted((grid[1:] + grid[:-1]) / 2, magnitude, method="compare_all")
    rounded = jnp.sign(blocks) * grid[code] * block_scale
    return (rounded.reshape(x.shape) * outer).astype(jnp.bfloat16)
