"""The gap can be seen: each small damage to one side gives a gap above 0 in the update's own metrics."""

import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels
from minite_jax.sampler import sampling
from minite_jax.sampler.requests import pad_prompts
from pallas_kernels.rows import map_row_tiles

GAP = "train_rollout_logprob_abs_diff"


def _flip_sign_of_one_code(q, bits):
    """The sign of the largest code of the first matrix."""
    magnitudes = np.asarray(q.codes) & 0x7
    place = np.unravel_index(np.argmax(magnitudes), magnitudes.shape)
    return dataclasses.replace(q, codes=q.codes.at[place].set(q.codes[place] ^ 0x8))


def _double_one_block_scale(q, bits):
    return dataclasses.replace(q, block_scale=_scales_plus_one_octave(q.block_scale, (*[0] * (q.ndim - 1), 0)))


def _double_block_scales_of_one_row(q, bits):
    return dataclasses.replace(q, block_scale=_scales_plus_one_octave(q.block_scale, (0,) * (q.ndim - 1)))


def _scales_plus_one_octave(scales, index):
    """E4M3 times 2, in the exponent bits."""
    as_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    return lax.bitcast_convert_type(as_bytes.at[index].add(8), jnp.float8_e4m3fn)


def _double_one_outer_scale(q, bits):
    index = (0,) * q.outer_scale.ndim
    return dataclasses.replace(q, outer_scale=q.outer_scale.at[index].multiply(2))


DAMAGES = (_flip_sign_of_one_code, _double_one_block_scale, _double_block_scales_of_one_row, _double_one_outer_scale)


@pytest.mark.parametrize("name", ["qkv", "down"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.worlds("moe_nvfp4", slow=("dense_nvfp4",))
def test_damaged_weights_show(world, damage, name, bits):
    """The learner's packed weights are damaged after sampling."""
    layers = list(world.policy.weights["layers"])
    whole = layers[0][name]
    damaged = damage(whole, bits)
    changed = sum((bits(a) != bits(b)).sum() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(damaged), strict=True))
    assert changed == (whole.block_scale.shape[-1] if damage is _double_block_scales_of_one_row else 1)
    layers[0] = layers[0] | {name: damaged}
    policy = world.policy.replace(weights=world.policy.weights | {"layers": tuple(layers)})
    _, _, metrics = world.update()(world.fresh_state(), policy, world.batch())
    assert metrics[f"{GAP}/max"] > 0
    assert metrics[f"{GAP}/exact_fraction"] < 1
    assert metrics["gen_kl_error"] > 0


def _modules_with_row_tiles():
    for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
        if module.name.endswith(".reference"):
            module = importlib.import_module(module.name)
            if getattr(module, "map_row_tiles", None) is map_row_tiles:
                yield module


@pytest.mark.parametrize("in_tiles", [True, False])
@pytest.mark.worlds(slow=("dense_fp32", "moe_bf16"))
def test_a_sampler_without_fixed_reductions_shows(world, in_tiles, monkeypatch):
    """The same operations on the same weights, but with XLA's own sums (and each on all rows at once), in the sampler only."""
    if jax.default_backend() != "cpu":
        pytest.skip("what is replaced are the sums of the reference; a GPU's sums are inside of its kernels")
    replaced = []
    for module in _modules_with_row_tiles():
        if not in_tiles:
            monkeypatch.setattr(module, "map_row_tiles", lambda body, rows: body(rows))
        for name in ("ordered_sum", "blocked_sum"):
            if hasattr(module, name):
                own_sum = lambda x, axis=-1: replaced.append(x) or jnp.sum(x.astype(jnp.float32), axis=axis)  # noqa: E731
                monkeypatch.setattr(module, name, own_sum)
    tokens, lengths = pad_prompts(world.prompts, world.config.vocab_size)
    ids = jnp.arange(len(tokens), dtype=jnp.uint32)
    # A function of its own, traced here: JAX would take the trace of one that it knows.
    free = jax.jit(lambda *arguments: sampling.generate.__wrapped__(*arguments, world.sampling))
    rollouts = free(world.policy, jnp.asarray(tokens), jnp.asarray(lengths), ids, jax.random.key(0))
    monkeypatch.undo()
    assert len(replaced) >= 16  # five norms and the three sums of attention in both passes; and those of the log-probs

    batch = world.batch(rollouts)
    _, metrics = world.gradients(batch)
    assert 0 < metrics[f"{GAP}/max"] < 0.1  # the same function, but for rounding
    assert metrics[f"{GAP}/exact_fraction"] < 1
    # And the learner itself is as it was.
    _, metrics = world.gradients(batch.replace(sampler_log_probs=jnp.asarray(world.score(batch.tokens))))
    assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1


@pytest.mark.worlds("dense_te")
def test_one_scale_for_the_whole_activation_tensor_shows(world):
    """`nvfp4_te`: the batch contract breaks with other neighbours."""
    tokens = np.random.default_rng(0).integers(0, world.config.vocab_size, (20, 32))
    kept = np.arange(len(tokens)) % 3 == 0
    others = np.where(kept[:, None], tokens, 1).astype(np.int32)
    assert (world.score(others)[kept] != world.score(tokens)[kept]).mean() > 0.5


@pytest.mark.worlds("dense_nvfp4")
def test_nan_is_reported_never_skipped(world):
    batch = world.batch()
    row = int(np.argmax(np.asarray(batch.mask).any(1)))
    column = int(np.argmax(np.asarray(batch.mask)[row]))
    batch = batch.replace(sampler_log_probs=batch.sampler_log_probs.at[row, column].set(jnp.nan))
    _, metrics = world.gradients(batch, micro_batches=2, remat=True)
    assert all(np.isnan(metrics[name]) for name in (f"{GAP}/mean", f"{GAP}/max", "gen_kl_error"))
    assert metrics[f"{GAP}/exact_fraction"] == pytest.approx(1 - 1 / metrics["tokens_compared"])
    assert metrics["update_applied"] == 0
