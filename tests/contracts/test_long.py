"""The same contracts where they take minutes: the real depth, many seeds, many repeats, another process."""

import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
GAP = "train_rollout_logprob_abs_diff"


@pytest.mark.worlds("deep_experts")
def test_eight_layers_of_which_two_quantise_their_experts(world, assert_same_bits):
    """`nvfp4_experts` as it is: the first 2 and the last 4 layers stay bfloat16."""
    tokens, mask, log_probs = world.sequences
    assert_same_bits(world.score(tokens)[mask], log_probs[mask])
    update, state, policy = world.update(micro_batches=2, remat=True), world.fresh_state(), world.policy
    for step in range(10):
        state, policy, metrics = update(state, policy, world.batch(world.sample(policy, seed=step)))
        assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1


@pytest.mark.worlds("moe_nvfp4", "dense_nvfp4", "dense_fp32", "moe_bf16")
def test_fifty_updates_of_fifty_keys(world):
    update, state, policy = world.update(), world.fresh_state(), world.policy
    for step in range(50):
        state, policy, metrics = update(state, policy, world.batch(world.sample(policy, seed=1000 + step)))
        assert metrics[f"{GAP}/max"] == 0 and metrics[f"{GAP}/exact_fraction"] == 1
        assert metrics["update_applied"] == 1


@pytest.mark.worlds("moe_nvfp4")
def test_forty_repeats_give_one_gradient(world):
    """H13."""
    assert len({_digest(world.gradients()[0]) for _ in range(40)}) == 1


def _digest(tree) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


@pytest.mark.worlds("dense_nvfp4")
def test_print_digest(world):
    """What `test_another_process_gives_the_same_bits` runs in a process of its own."""
    print(f"digest {_digest((world.rollouts, world.gradients()))}")
    assert world.gradients()[1][f"{GAP}/max"] == 0


@pytest.mark.worlds("dense_nvfp4")
def test_another_process_gives_the_same_bits(world, request):
    here = f"{__file__}::test_print_digest"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow", "-p", "no:cacheprovider", "-p", "no:xdist", here],
        capture_output=True,
        text=True,
        cwd=request.config.rootpath,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"digest {_digest((world.rollouts, world.gradients()))}" in run.stdout
