"""Outer scales of activations for engines that keep one for each matrix, from the largest activation of given sequences.

Our own matmuls do without: they find an outer scale for each row as it comes. An engine with a static scale quantises the same
activations to other numbers, and clips what is larger than what calibration saw.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from minite_jax.diagnostics.record import matmul_names, recording
from minite_jax.model.forward import hidden_states
from minite_jax.model.policy import Policy
from minite_jax.precision.recipe import MatmulFormat
from pallas_kernels.nvfp4 import Nvfp4Array
from pallas_kernels.operands import values

_LARGEST = 6 * 448  # of a code times a block scale


def calibrate(policy: Policy, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Runs the policy's weights over sequences, with activations as they are before quantisation.

    Every sequence runs alone; those of one length share a program, which is compiled anew for each call (seconds to minutes).

    Args:
      policy: see `minite_jax.prepare`.
      sequences: token ids, each sequence at least one.

    Returns:
      For each matrix in NVFP4, by its path, float32 [E] or [1]: the smallest power of two s with amax <= 6 * 448 * s. An expert
      that no token reached has the largest of its layer.

    Raises:
      ValueError: no sequences, an empty one, or a token that is none of the vocabulary.
    """
    config = policy.config
    if not sequences or not all(len(each) for each in sequences):
        raise ValueError("calibration needs sequences of at least one token each")
    lowest, highest = min(map(min, sequences)), max(map(max, sequences))
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(f"token {lowest if lowest < 0 else highest} is none of the vocabulary's {config.vocab_size}")
    # The stored weights with plain activations: what an engine's quantiser will be handed.
    plain = policy.replace(recipe=dataclasses.replace(policy.recipe, matmuls=(), quantized=MatmulFormat()))
    run = jax.jit(functools.partial(_run, config=config, recipe=plain.recipe))
    amax: list[np.ndarray] | None = None
    with recording(_amax) as calls:
        for sequence in sequences:
            jax.block_until_ready(run(plain.weights, jnp.asarray(sequence, jnp.int32)[None]))
            jax.effects_barrier()
            seen = [np.asarray(each).reshape(-1) for each in calls]
            amax = seen if amax is None else [np.maximum(a, b) for a, b in zip(amax, seen, strict=True)]
            calls.clear()
    names = matmul_names(config)[:-1]  # the output embedding is no matter of hidden states
    if len(amax) != len(names):
        raise RuntimeError(f"the forward called {len(amax)} matmuls where {len(names)} were expected: mend matmul_names")
    scales = {}
    for name, largest in zip(names, amax, strict=True):
        layer, _, matrix = name.replace("/", ".").split(".")[1:]
        if isinstance(policy.weights["layers"][int(layer)][matrix], Nvfp4Array):
            scales[f"layers.{layer}.{matrix}"] = _scales(f"layers.{layer}.{matrix}", largest)
    return scales


def _run(weights, tokens, *, config, recipe):
    return hidden_states(Policy(weights=weights, config=config, recipe=recipe), tokens, scan_layers=False)[0]


def _amax(x, w, group_sizes):
    """Largest magnitude of the rows, of each group's where there are groups."""
    del w
    amax_M = jnp.max(jnp.abs(values(x)), axis=-1)
    if group_sizes is None:
        return jnp.max(amax_M)
    group_M = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(amax_M.shape[0]), side="right")
    return jax.ops.segment_max(amax_M, group_M, num_segments=group_sizes.shape[0]).clip(0)  # -inf: an expert without rows


def _scales(name: str, amax: np.ndarray) -> np.ndarray:
    if not np.isfinite(amax).all():
        raise ValueError(f"the activations of {name} are not finite: these weights cannot be calibrated")
    unseen = amax == 0
    if unseen.any():
        if len(amax) > 1:
            logging.warning("%s: no calibration token reached %d of %d experts", name, unseen.sum(), len(amax))
        amax = np.where(unseen, amax.max() or np.float32(_LARGEST), amax)
    significand, exponent = np.frexp(amax.astype(np.float64) / _LARGEST)
    return np.exp2(exponent - (significand == 0.5)).astype(np.float32)
