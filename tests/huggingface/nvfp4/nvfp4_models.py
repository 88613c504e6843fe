"""The small model of these tests, and what they compare with."""

import filecmp
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import minite_jax as mt
from minite_jax.checkpoint import nvfp4_files
from minite_jax.checkpoint.nvfp4_files.blocks import quantized_matrices
from minite_jax.model import tiny_moe
from minite_jax.model.params import abstract_params, abstract_specs
from pallas_kernels import nvfp4

LAYOUTS = tuple(nvfp4_files.LAYOUTS)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_same_files(one, other):
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for name in os.listdir(one):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


# A dense layer and a MoE one, biases, more than ten experts; and matrices of two shapes only, for the compiler's sake.
CONFIG = tiny_moe(
    hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32, moe_intermediate_size=32, num_experts=12,
    mlp_only_layers=(0,), attention_bias=True, vocab_size=48,
)  # fmt: skip


def random_params(config):
    """Numbers of bfloat16, of which a few are far out."""
    rng = np.random.default_rng(3)

    def values(spec):
        x = rng.standard_t(3, spec.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        return jnp.asarray(x)

    return jax.tree.map(values, abstract_params(config))


def as_others_have_it(policy):
    """Block scales from all of E4M3 that are no NaN, outer scales that are no powers of two."""
    rng = np.random.default_rng(5)

    def other(leaf):
        scales = rng.integers(0, 0x7F, leaf.block_scale.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        outer = rng.uniform(1e-4, 1e-3, leaf.outer_scale.shape).astype(np.float32)
        return leaf.replace(block_scale=jnp.asarray(scales), outer_scale=jnp.asarray(outer), fp8_exact=False)

    is_leaf = lambda x: isinstance(x, nvfp4.Nvfp4Array)  # noqa: E731
    weights = jax.tree.map(lambda x: other(x) if is_leaf(x) else x, policy.weights, is_leaf=is_leaf)
    return policy.replace(weights=weights, recipe=mt.recipe("nvfp4_te"))


def scales_of(policy):
    """Some outer scales of activations."""
    names = quantized_matrices(policy.config, policy.recipe)
    specs = abstract_specs(policy.config)
    sizes = {name: specs[name].shape[:-2] or (1,) for name in sorted(names)}
    return {name: np.exp2(-np.arange(np.prod(size)) % 7, dtype=np.float32) / 64 for name, size in sizes.items()}
