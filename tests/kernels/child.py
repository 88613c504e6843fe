"""What the kernel tests of this folder run in a process of their own: Triton reads TRITON_INTERPRET when a kernel is defined.

A test file is its own child program: started as a script it prints one JSON object, which the fixture `child` hands to its tests.
"""

import json
import re
import sys

import numpy as np

from pallas_kernels import gpu

# What was run and what is aimed at. B200 (100) differs from B300 in nothing that these kernels use; native FP4 has both.
CAPABILITIES = (90, 103)


def _differing(actual, expected) -> int:
    """How many elements have other bits; -1: another shape or type."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return -1
    integer = f"uint{8 * actual.dtype.itemsize}"
    return int((actual.view(integer) != expected.view(integer)).sum())


def _interpret(launch: gpu.Launch, inputs, expected) -> list[int]:
    outputs = gpu.interpret(launch, *(x if isinstance(x, int) else np.asarray(x) for x in inputs))
    return [_differing(a, b) for a, b in zip(outputs, expected, strict=True)]


def _compile(launch: gpu.Launch, inputs, capabilities=CAPABILITIES) -> dict:
    found = {}
    for capability in capabilities:
        ptx = gpu.compile_ahead(launch, *inputs, capability=capability).asm["ptx"]
        found[str(capability)] = dict(
            atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
            multiply_adds=len(re.findall(r"\bfma\.", ptx)),
            wide_loads=len(re.findall(r"ld\.global\S*\.v4", ptx)),
            mma=len(re.findall(r"\b(?:mma|wgmma|tcgen05\.mma)\.", ptx)),
        )
    return found


def main(interpreted, compiled) -> None:
    """Prints the results of one mode: ``python test_file.py interpret`` or ``compile``.

    Args:
      interpreted: function that yields (name, launch, inputs, expected outputs), small.
      compiled: function that yields (name, launch, shapes of the inputs), as large as a model's, and what to compile for where
        that is not all of `CAPABILITIES`.
    """
    if sys.argv[1] == "interpret":
        results = {name: _interpret(*rest) for name, *rest in interpreted()}
    else:
        results = {name: _compile(*rest) for name, *rest in compiled()}
    print(json.dumps(results))
