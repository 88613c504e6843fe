"""Writes a Hugging Face folder of random bfloat16 weights in the shape of Qwen3-30B-A3B, to measure conversions with.

    python -m experiments.synthetic_checkpoint --out=DIR --num_layers=3     # 4.9 GB; full width, 128 experts

It holds the weights in memory once, in bfloat16.
"""

import jax
import ml_dtypes
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from minite_jax.model import qwen3_30b_a3b
from minite_jax.model.params import NORM, abstract_params
from minite_jax.optional import require

_OUT = cli.out_flag()
_LAYERS = flags.DEFINE_integer("num_layers", 3, "Layers of the model.", lower_bound=1)
_SHARD = flags.DEFINE_integer("max_shard_bytes", 2_000_000_000, "Most bytes of tensors in a file.", lower_bound=1)
_NUMBERS = 1 << 22  # drawn at a time


def random_weights(spec, rng) -> np.ndarray:
    """bfloat16 numbers of the size that trained weights have: about 1 for norms, deviation fan_in ** -0.5 for matrices."""
    weights = np.empty(spec.shape, ml_dtypes.bfloat16)
    flat = weights.reshape(-1)
    center, deviation = (1.0, 0.1) if spec.kind == NORM else (0.0, spec.shape[-1] ** -0.5)
    for first in range(0, flat.size, _NUMBERS):
        part = flat[first : first + _NUMBERS]
        part[:] = center + deviation * rng.standard_normal(part.size, np.float32)
    return weights


def main(argv: list[str]) -> None:
    del argv
    config = qwen3_30b_a3b(num_hidden_layers=_LAYERS.value)
    rng = np.random.default_rng(0)
    specs = abstract_params(config)
    params = jax.tree.map(lambda spec: random_weights(spec, rng), specs)
    with require("tqdm", "experiments").tqdm(total=2 * mt.num_params(config), unit="B", unit_scale=True, leave=False) as bar:
        out = mt.save_huggingface(_OUT.value, params, config, max_shard_bytes=_SHARD.value, progress=bar.update)
    print(f"wrote {mt.num_params(config):,} parameters to {out}")


if __name__ == "__main__":
    cli.run(main, required=("out",))
