"""Compiled functions that the tests of the format share."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4

ROWS, COLUMNS = 64, 128  # shapes are padded to multiples of these

_quantize = jax.jit(nvfp4.quantize, static_argnums=1)
_draw = jax.jit(lambda x, rule, key: nvfp4.quantize(x, rule, key=key), static_argnums=1)
_dequantize = jax.jit(nvfp4.dequantize)


def _pad(x):
    """Zeros to a shape of one kind, so that there is one compilation. They change neither amaxes nor blocks."""
    *_, m, k = x.shape
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -m % ROWS), (0, -k % COLUMNS)])


def _crop(q, m, k):
    parts = nvfp4.Nvfp4Array(
        codes=q.codes[..., :m, : k // 2],
        block_scale=q.block_scale[..., :m, : k // 16],
        outer_scale=q.outer_scale[..., :m] if q.outer_per_row else q.outer_scale,
    )
    return jax.tree.map(jnp.asarray, parts)


def _shared_quantize(x, rule, key=None):
    x = np.asarray(x)
    padded = jnp.asarray(_pad(x))
    q = _quantize(padded, rule) if key is None else _draw(padded, rule, key)
    return _crop(jax.tree.map(np.asarray, q), *x.shape[-2:])


def _shared_dequantize(q):
    m, k = q.shape[-2:]
    codes = np.zeros((*q.shape[:-2], m + -m % ROWS, (k + -k % COLUMNS) // 2), np.uint8)
    codes[..., :m, : k // 2] = q.codes
    block_scale = np.ones((*codes.shape[:-1], codes.shape[-1] // 8), q.block_scale.dtype)
    block_scale[..., :m, : k // 16] = q.block_scale
    outer_scale = np.asarray(q.outer_scale)
    if q.outer_per_row:
        outer_scale = np.ones(codes.shape[:-1], np.float32)
        outer_scale[..., :m] = q.outer_scale
    whole = nvfp4.Nvfp4Array(*map(jnp.asarray, (codes, block_scale, outer_scale)))
    return np.asarray(_dequantize(whole))[..., :m, :k]


@pytest.fixture(scope="session")
def shared():
    """`shared.quantize(x, rule[, key])` and `shared.dequantize(q)`: jitted, padded to few shapes."""
    return types.SimpleNamespace(quantize=_shared_quantize, dequantize=_shared_dequantize)
