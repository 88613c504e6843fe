"""Triton kernels: one description of a launch, and the three things that can be done with it.

A kernel module builds a `Launch`; `run` calls it from JAX, `compile_ahead` compiles it for a GPU that is not there, and
`interpret` runs it on the host, slowly, with numpy arrays. So a test sees exactly what production runs.

Only this module knows jax-triton. Triton itself is imported by the kernels' modules (``triton*.py``), and those are imported
when a Triton implementation is chosen, so that the package works where there is no Triton.
"""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from pallas_kernels import dispatch

# The pairs of versions that were run; jax-triton 0.4 wants triton 3.8 (see docs/kernels.md).
_JAX_TRITON, _TRITON = "0.3", "3.6"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
      kernel: a function decorated with `triton.jit`. Its parameters are the inputs, then the outputs, then the constants.
      out_shape: shape and type of each output.
      grid: number of programs along up to three axes.
      constants: compile-time constants by name.
      num_warps: warps per program.
      num_stages: depth of the software pipeline.
      zeroed: which outputs are filled with zeros before the launch.
    """

    kernel: Any
    out_shape: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    zeroed: tuple[int, ...] = ()


# What a program can have of shared memory, on every GPU from Hopper on, and how many of a thread's 255 registers a sum may take.
_SHARED_BYTES, _SUM_REGISTERS = 227 * 1024, 128


def check_tile(kernel: str, tile: Mapping[str, Any], *, sums: int, shared_bytes: int) -> None:
    """Refuses a tile that does not fit before a compiler spends its time on it.

    Args:
      kernel: its name, for the message.
      tile: its parameters, with "num_warps".
      sums: float32 numbers that a program keeps.
      shared_bytes: of the tiles that it holds at once.

    Raises:
      ValueError: more shared memory than there is, or registers would spill.
    """
    if shared_bytes > _SHARED_BYTES:
        raise ValueError(f"{kernel}: {dict(tile)} takes {shared_bytes} bytes of shared memory; there are {_SHARED_BYTES}")
    each = sums // (32 * tile["num_warps"])
    if each > _SUM_REGISTERS:
        raise ValueError(f"{kernel}: {dict(tile)} takes {each} registers a thread for its sum; more than {_SUM_REGISTERS} spill")


def _check_versions() -> None:
    for name, wanted in (("jax-triton", _JAX_TRITON), ("triton", _TRITON)):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"Triton kernels need {name} {wanted}: pip install 'minite_jax[gpu]'") from None
        if not found.startswith(wanted + "."):
            raise ImportError(f"Triton kernels were built for {name} {wanted}, found {found}: pip install '{name}=={wanted}.*'")


def capability() -> int:
    """Compute capability of the GPU at hand, or of the one that is planned for: 90, 100, 103."""
    if (planned := dispatch.planned_capability()) is not None:
        return planned
    major, minor = jax.devices("gpu")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def on_hopper() -> bool:
    """Whether the device is one for which the Mosaic kernels are written."""
    return dispatch.platform() == "gpu" and capability() == 90


def multiplies_codes() -> bool:
    """Whether the device's matmul reads NVFP4 activations best as codes: not on a GPU without FP4 units, which expands them."""
    return dispatch.platform() != "gpu" or capability() >= 100


# A kernel in a program that is planned and not run: arrays in, arrays out. It has no implementation.
launch_p = Primitive("launch")
launch_p.multiple_results = True
launch_p.def_abstract_eval(
    lambda *_, out_shape, **__: [jax.core.ShapedArray(shape, dtype) for shape, dtype in out_shape]
)


def plan(name: str, out_shape: Sequence[jax.ShapeDtypeStruct], *inputs: jax.Array | int) -> list[jax.Array]:
    """A kernel in a program that is traced within `dispatch.planned`: what it reads and writes, and no more."""
    shapes = tuple((each.shape, np.dtype(each.dtype)) for each in out_shape)
    return launch_p.bind(*(x for x in inputs if not isinstance(x, int)), out_shape=shapes, name=name)


# What CUDA has, on every GPU.
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


def run(launch: Launch, *inputs: jax.Array | int) -> list[jax.Array]:
    """Launches from JAX, inside or outside of jit, on the GPU that the computation is on.

    Inputs are arrays and integers. A size that is an input, not a constant, does not make another kernel to compile.

    Multiply-adds are contracted only where a kernel says so, since a sum's bits must not depend on the compiler's mood.

    Returns:
      The outputs, in order. A grid of no programs is no launch: outputs are empty, or zeros where there is a sum of nothing.

    Raises:
      ImportError: jax-triton or triton is missing or of a version that was not tried.
      NotImplementedError: more programs along an axis than a GPU can count.
    """
    if 0 in launch.grid:
        return [jnp.zeros(each.shape, each.dtype) for each in launch.out_shape]
    if any(size > most for size, most in zip(launch.grid, _MOST_PROGRAMS, strict=False)):
        raise NotImplementedError(
            f"{launch.kernel.__name__}: {' x '.join(map(str, launch.grid))} programs; a GPU has at most "
            f"{' x '.join(map(str, _MOST_PROGRAMS))}: cut the batch or the rows"
        )
    if dispatch.planned_capability() is not None:
        return plan(launch.kernel.__name__, launch.out_shape, *inputs)
    _check_versions()
    import jax_triton  # raises on a machine without a GPU, hence here

    return jax_triton.triton_call(
        *inputs,
        kernel=launch.kernel,
        out_shape=list(launch.out_shape),
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        zeroed_outputs=launch.zeroed,
        enable_fp_fusion=False,
        **launch.constants,
    )


_TYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int8": "i8",
    "int32": "i32",
}


def compile_ahead(launch: Launch, *inputs: jax.ShapeDtypeStruct | jax.Array | int, capability: int):
    """Compiles for a GPU of a compute capability (90, 100, 103), with no GPU needed.

    Returns:
      Triton's compiled kernel; its `asm` holds "ptx", "cubin" and the steps before.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = (*inputs, *launch.out_shape)
    is_integer = [isinstance(each, int) for each in arguments]
    types = ["i32" if isinstance(each, int) else "*" + _TYPE_NAMES[np.dtype(each.dtype).name] for each in arguments]
    signature = dict(zip(launch.kernel.arg_names, types, strict=False))
    signature |= {name: "constexpr" for name in launch.constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i, integer in enumerate(is_integer) if not integer}
    return triton.compile(
        ASTSource(launch.kernel, signature, dict(launch.constants), attributes),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False),
    )


class _HostArray:
    """A numpy array with as much of a tensor's interface as Triton's interpreter asks for."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _TYPE_NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _HostArray(self.array)

    def set_(self, *_):
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, _):
        return self


def interpret(launch: Launch, *inputs: np.ndarray | int) -> list[np.ndarray]:
    """Runs a launch in Triton's interpreter on the host: for tests of a kernel's arithmetic and indexing.

    Outputs start as bytes of 0xFF (NaN for floating point), so that what a kernel does not write shows.

    Raises:
      RuntimeError: the environment variable TRITON_INTERPRET was not 1 when the kernel's module was imported.
    """
    if not type(launch.kernel).__name__ == "InterpretedFunction":
        raise RuntimeError("set TRITON_INTERPRET=1 before the kernels are imported")
    outputs = []
    for i, shape in enumerate(launch.out_shape):
        fill = 0 if i in launch.zeroed else 0xFF
        size = int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize
        outputs.append(np.full(size, fill, np.uint8).view(shape.dtype).reshape(shape.shape))
    arguments = [x if isinstance(x, int) else _HostArray(np.ascontiguousarray(x)) for x in inputs]
    launch.kernel[launch.grid](*arguments, *(_HostArray(x) for x in outputs), **launch.constants)
    return outputs


def outputs(*shapes_and_types: tuple[Sequence[int], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of a launch's outputs: ``outputs(((m, n), jnp.bfloat16), ...)``."""
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in shapes_and_types)
