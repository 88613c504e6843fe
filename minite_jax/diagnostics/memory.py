"""The memory that a program will need, read off its jaxpr: no compiler, no device, no arrays.

    with dispatch.planned(90):                        # traced as a Hopper GPU would run it
            found = footprint(update.trace(*abstract_arguments))

What is alive when is a property of the program: an array takes memory from the operation that makes it to the last one that reads
it. XLA changes four things, and the model follows it in each:

* What is computed twice from the same operands is computed once, and kept in between. Not across `jax.checkpoint`.
* Element-wise operations are fused into whoever reads them. Their results take no memory, unless a kernel, a matmul, a sort or
  the like reads them, or they are results of the program; what they read stays alive until then.
* What a reduction and something else read, of several arrays of its size, is stored once (the new weights, which are searched for
  NaN before they are taken).
* Reshapes share their operand's memory. Element-wise operations, scatters and loops write over an operand of the same size that
  nobody reads any more.
* Arguments are there from the beginning to the end, results that reuse no donated argument too.

Not in it: fragmentation, the code itself, scratch memory of sorts, and what the allocator rounds up.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Their results share the operand's memory.
_VIEWS = {"reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy", "optimization_barrier", "stop_gradient", "copy_p"}
# Fused into whoever reads the result.
_FUSED = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copysign", "cos",
    "div", "dynamic_slice", "eq", "exp", "exp2", "expm1", "floor", "gather", "ge", "gt", "integer_pow", "iota", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pad", "pow", "real",
    "reduce_precision", "rem", "rev", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "slice", "split", "sqrt", "square", "sub", "tanh", "transpose", "xor",
}  # fmt: skip
# Read element-wise operations without their results being stored; have a result of their own.
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"}
# Write over an operand that nobody reads any more.
_IN_PLACE = _FUSED | {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "while", "scan", "cond"}
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr",
          "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
          "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "jaxpr"}  # fmt: skip
_REMAT, _BARRIER = {"remat", "remat2", "checkpoint"}, "optimization_barrier"
_MERGED = (_FUSED | _VIEWS | _REDUCTIONS | {"sort", "dot_general"}) - {_BARRIER}
_LARGE_CONSTANT = 2**24  # bytes
_SMALL = 2**16  # bytes; what is smaller is not named


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in memory.

    Attributes:
      nbytes: its size.
      shape, dtype: its form.
      made_by: name of the operation, or of the kernel.
      scope: the part of the model, as `jax.named_scope` names it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a program needs, in bytes.

    Attributes:
      arguments: its arguments.
      results: its results, without those that take the place of donated arguments.
      alive: what is alive beside these when most is, the largest first, without what is smaller than 64 KiB.
      profile: [operations] float64, what is alive beside arguments and results while each operation runs. Operations that were
        merged with others have their place too: programs of one structure have profiles of one length.
      moments: name and scope of each operation.
    """

    arguments: int
    results: int
    alive: tuple[Buffer, ...]
    profile: np.ndarray
    moments: tuple[tuple[str, str], ...]

    @property
    def temporaries(self) -> int:
        """The most that is alive at once beside arguments and results."""
        return int(self.profile.max(initial=0))

    @property
    def peak(self) -> int:
        return self.arguments + self.results + self.temporaries


def nbytes(tree: Any) -> int:
    """Bytes of a tree's arrays, real or abstract (`jax.eval_shape`). Codes of FP4 pairs are bytes already."""
    return sum(_size(leaf) for leaf in jax.tree.leaves(tree))


def footprint(traced: jax.stages.Traced) -> Footprint:
    """Estimates a traced program's memory.

    Args:
      traced: ``jitted.trace(*arguments)``; of what runs on a GPU, within `pallas_kernels.dispatch.planned`.
    """
    closed = traced.jaxpr
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    # Constants that are closed over are arguments to XLA, or part of the program.
    arguments = sum(_size(v.aval) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars))
    if len(donated) != len(closed.jaxpr.invars):
        donated = [False] * len(closed.jaxpr.invars)  # arguments that are not used were dropped
    free = _count((v.aval.shape, v.aval.dtype) for v, gone in zip(closed.jaxpr.invars, donated, strict=True) if gone)
    results = 0
    for v in closed.jaxpr.outvars:
        key = (v.aval.shape, v.aval.dtype)
        if free.get(key, 0):
            free[key] -= 1
        else:
            results += _size(v.aval)
    liveness = _Liveness(closed.jaxpr)
    profile, alive = liveness.run()
    return Footprint(arguments, results, tuple(sorted(alive, key=lambda each: -each.nbytes)), profile, liveness.moments)


def _count(keys: Iterable) -> dict:
    found: dict = {}
    for key in keys:
        found[key] = found.get(key, 0) + 1
    return found


def _size(aval: Any) -> int:
    dtype = aval.dtype
    itemsize = 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize
    return math.prod(aval.shape) * itemsize


@dataclasses.dataclass
class _Operation:
    name: str
    inputs: list
    outputs: list
    inner: int = 0  # bytes that a loop's body needs beside its inputs and outputs
    inner_alive: tuple[Buffer, ...] = ()
    made_by: str = ""
    scope: str = ""
    place: int = 0
    key: Any = None  # equal for operations that compute the same


def _flat(jaxpr: core.Jaxpr, rename: Callable, scope: str) -> Iterator[_Operation]:
    """The operations of a jaxpr in order, with the bodies of calls in their places."""
    for eqn in jaxpr.eqns:
        name, where = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
        inputs = [rename(v) for v in eqn.invars]
        if name in _CALLS:
            body = eqn.params[_CALLS[name]]
            body = body.jaxpr if isinstance(body, core.ClosedJaxpr) else body
            names: dict = dict(zip(body.invars, inputs, strict=True))
            if name in _REMAT:
                names = {v: v if isinstance(v, core.Literal) else _Key(v.aval) for v in body.invars}
                yield from (_Operation(_BARRIER, [x], [names[v]]) for v, x in zip(body.invars, inputs, strict=True))
            # A fresh key for each variable: a body that is called twice has its variables twice.
            inside = lambda v, names=names: v if isinstance(v, core.Literal) else names.setdefault(v, _Key(v.aval))  # noqa: E731
            yield from _flat(body, inside, where)
            for outer, inner in zip(eqn.outvars, body.outvars, strict=True):
                result = inside(inner)
                yield _Operation("copy", [result], [rename(outer)], key=_merge_key("copy", [result], {}))
            continue
        outputs = [rename(v) for v in eqn.outvars]
        if name == "broadcast_in_dim" and isinstance(inputs[0], _Key) and _size(inputs[0].aval) == _size(outputs[0].aval):
            name = "reshape"  # axes of length 1
        operation = _Operation(name, inputs, outputs, made_by=eqn.params.get("name", name), scope=where)
        # A large constant is cheaper made again than kept.
        if name in _MERGED and (any(isinstance(x, _Key) for x in inputs) or _size(outputs[0].aval) < _LARGE_CONSTANT):
            operation.key = _merge_key(name, inputs, eqn.params)
        bodies = [each.jaxpr for each in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_body) if _is_body(each)]
        if bodies and name not in _REDUCTIONS:
            found = [_Liveness(body).run() for body in bodies]
            inner, alive = max(found, key=lambda each: each[0].max(initial=0))
            operation.inner, operation.inner_alive = int(inner.max(initial=0)), tuple(alive)
        yield operation


def _merge_key(name: str, inputs: list, params: dict) -> tuple:
    operands = tuple(x if isinstance(x, _Key) else repr(x) for x in inputs)
    return name, operands, repr(sorted(params.items(), key=lambda item: item[0]))


def _is_body(x: Any) -> bool:
    return isinstance(x, core.ClosedJaxpr)


class _Key:
    """A variable of the flat program."""

    def __init__(self, aval):
        self.aval = aval


class _Liveness:
    """When the arrays of a jaxpr are alive."""

    def __init__(self, jaxpr: core.Jaxpr):
        names: dict = {}
        rename = lambda v: v if isinstance(v, core.Literal) else names.setdefault(v, _Key(v.aval))  # noqa: E731
        self.fixed = {rename(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
        self.operations = list(_flat(jaxpr, rename, ""))
        self.moments = tuple((operation.name, operation.scope) for operation in self.operations)
        for place, operation in enumerate(self.operations):
            operation.place = place
        self.results = {rename(v) for v in jaxpr.outvars if not isinstance(v, core.Literal)}
        self._merge_equal()
        self._resolve_views()
        self._choose_stored()

    def _merge_equal(self) -> None:
        """Drops operations that compute what another one has computed."""
        same: dict[_Key, _Key] = {}
        first: dict[Any, _Operation] = {}
        kept = []
        for operation in self.operations:
            operation.inputs = [same.get(v, v) if isinstance(v, _Key) else v for v in operation.inputs]
            if operation.key is not None:
                name, operands, params = operation.key
                key = (name, tuple(same.get(x, x) if isinstance(x, _Key) else x for x in operands), params)
                before = first.setdefault(key, operation)
                if before is not operation and not self.results.intersection(operation.outputs):
                    same.update(zip(operation.outputs, before.outputs, strict=True))
                    continue
            kept.append(operation)
        self.operations = kept

    def _resolve_views(self) -> None:
        """Replaces every view by what it is a view of."""
        self.source: dict[_Key, Any] = {}
        self.kept = []
        for operation in self.operations:
            operation.inputs = [self.source.get(v, v) if isinstance(v, _Key) else v for v in operation.inputs]
            if operation.name in _VIEWS:
                for outer, inner in zip(operation.outputs, operation.inputs, strict=True):
                    self.source[outer] = inner
            else:
                self.kept.append(operation)
        self.results = {self.source.get(v, v) for v in self.results}

    def _choose_stored(self) -> None:
        """Which results of fused operations are stored all the same: those that something else than a fusion reads."""
        self.stored = set(self.results)
        for operation in self.kept:
            if operation.name not in _FUSED:
                self.stored.update(operation.outputs)
                if operation.name not in _REDUCTIONS:
                    self.stored.update(v for v in operation.inputs if isinstance(v, _Key))
        self._store_reduced()

    def _store_reduced(self) -> None:
        """Adds the fused results that both a reduction and another fusion read. Such a fusion writes its operand as well."""
        reads: dict[_Key, frozenset] = {}  # stored arrays that a variable comes from
        for operation in self.kept:
            sources = frozenset().union(*(reads.get(v, frozenset((v,))) for v in operation.inputs if isinstance(v, _Key)))
            for v in operation.outputs:
                if v not in self.stored:
                    reads[v] = sources
        into_reduction: dict[_Key, set] = {}  # whether its readers are reductions, alone or behind element-wise operations
        for operation in reversed(self.kept):
            kinds = {operation.name in _REDUCTIONS} if self.stored.intersection(operation.outputs) else set()
            for v in operation.outputs:
                kinds |= into_reduction.get(v, set()) if v not in self.stored else set()
            if kinds == {True, False}:
                kinds = {False}
            for v in operation.inputs:
                if isinstance(v, _Key) and v not in self.stored and v not in self.fixed:
                    into_reduction.setdefault(v, set()).update(kinds)
        for v, kinds in into_reduction.items():
            if kinds == {True, False} and sum(_size(each.aval) >= _size(v.aval) for each in reads.get(v, ())) > 1:
                self.stored.add(v)

    def run(self) -> tuple[np.ndarray, list[Buffer]]:
        """Bytes that are alive beside arguments and results while each operation runs, and the buffers where that is most."""
        reads: dict[_Key, frozenset] = {}  # what a variable that is not stored is made of

        def roots(v):
            if not isinstance(v, _Key):
                return frozenset()
            return frozenset((v,)) if v in self.stored or v in self.fixed else reads.get(v, frozenset())

        read_by, last = [], {}
        for index, operation in enumerate(self.kept):
            needed = frozenset().union(*(roots(v) for v in operation.inputs))
            for v in operation.outputs:
                if v not in self.stored:
                    reads[v] = needed
            stores = any(v in self.stored for v in operation.outputs)
            read_by.append(needed if stores else frozenset())
            for v in read_by[-1]:
                last[v] = index
        alive: dict[_Key, Buffer] = {}
        now, most, found, profile, place = 0, 0, [], np.zeros(len(self.moments)), 0
        for index, operation in enumerate(self.kept):
            dying = [v for v in read_by[index] if last[v] == index and v in alive]
            for v in operation.outputs:
                if v not in self.stored or v in self.results or v in self.fixed:
                    continue
                size = _size(v.aval)
                if operation.name in _IN_PLACE:
                    reused = next((old for old in dying if alive[old].nbytes == size), None)
                    if reused is not None:
                        dying.remove(reused)
                        now -= alive.pop(reused).nbytes
                alive[v] = Buffer(size, tuple(v.aval.shape), str(v.aval.dtype), operation.made_by, operation.scope)
                now += size
            profile[place : operation.place] = profile[place - 1] if place else 0
            place = operation.place + 1
            profile[operation.place] = now + operation.inner
            if profile[operation.place] > most:
                most = profile[operation.place]
                found = [each for each in (*alive.values(), *operation.inner_alive) if each.nbytes >= _SMALL]
            for v in (*dying, *(v for v in operation.outputs if v in alive and v not in last)):
                now -= alive.pop(v).nbytes
        return profile, found
