"""How many of a model's matmul sums are exact in float32, whatever the order of additions?

    python -m experiments.exactness --config=configs/quickstart.py --checkpoint=runs/quickstart --results_dir=docs/benchmarks

Takes the weights of a finished run, lets them answer held-out problems, records the operands of every matmul of the forward over
those answers under each recipe, and certifies every output (`minite_jax.diagnostics.certify`). Beside them, made-up operands with
a longer sum (K = 2048) and with outlier channels: there it fails. Writes exactness_model.json and exactness_synthetic.json, from
which `experiments.tables` makes the tables, and a picture. Three minutes on two cores, most of it compiling.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.build import sample_prompts
from experiments.evaluation import held_out_prompts
from experiments.training import finished_run
from minite_jax.diagnostics.certify import FLOAT32_SIGNIFICAND_BITS, certify, order_dependence
from minite_jax.diagnostics.record import MatmulOperands, record_matmuls
from minite_jax.metrics.plots import new_figure, save_figure
from minite_jax.metrics.provenance import provenance
from minite_jax.metrics.results import write_results
from pallas_kernels import nvfp4

_CONFIG = cli.config_flag()
_CHECKPOINT = cli.checkpoint_flag()  # the workdir of a finished run
_PROMPTS = cli.prompts_flag()  # held-out problems, each answered config.sampler.samples times; 16
_RESULTS = cli.results_dir_flag()
_IMAGE = flags.DEFINE_string("image", "docs/images/exact_sums.png", "The picture to write.")

RECIPES = ("nvfp4", "nvfp4_46", "nvfp4_te", "bf16")
OUTLIERS, SPREAD = "0.5 % of channels x ", "blocks x 2^-7 .. 2^7"
SYNTHETIC = ("Gaussian", "Student t, 3 degrees", *(f"{OUTLIERS}{factor}" for factor in (30, 60, 1000)), SPREAD)
SYNTHETIC_SHAPE = (64, 64, 2048)  # rows, features, summed axis
COLUMNS = [
    {"key": "operands", "label": "operands", "unit": ""},
    {"key": "recipe", "label": "recipe", "unit": ""},
    {"key": "summed", "label": "products in a sum", "unit": ""},
    {"key": "outputs", "label": "outputs", "unit": ""},
    {"key": "proven", "label": "proven exact", "unit": "%"},
    {"key": "bits_median", "label": "bits needed, median", "unit": "bits"},
    {"key": "bits_max", "label": "bits needed, largest", "unit": "bits"},
    {"key": "order_matters", "label": "changed by one of 8 random orders", "unit": "%"},
]


def held_out_tokens(setup, policy, params, num_prompts: int, seed: int) -> tuple[np.ndarray, int]:
    """Problems with sampled answers, [B, T], and how many were sampled. Only those of the commonest length, so that nothing is
    padding.
    """
    prompts = held_out_prompts(setup, num_prompts)
    rollouts = sample_prompts(policy, params, prompts, jax.random.key(seed), setup.sampling, "aligned")
    tokens_BT, _, _ = rollouts.sequences()
    length_B = np.asarray(rollouts.prompt_length) + np.asarray(rollouts.mask).sum(axis=1)
    length = int(np.bincount(length_B).argmax())
    return np.asarray(tokens_BT)[length_B == length, :length], len(length_B)


def synthetic_operands(kind: str, recipe: mt.precision.Recipe, seed: int = 0) -> MatmulOperands:
    """Made-up activations of one kind and Gaussian weights, in the formats of a recipe."""
    rows, features, summed = SYNTHETIC_SHAPE
    rng = np.random.default_rng(seed)
    w_NK = rng.standard_normal((features, summed)) * 0.02
    x_MK = rng.standard_t(3, (rows, summed)) if kind.startswith("Student") else rng.standard_normal((rows, summed))
    if kind.startswith(OUTLIERS):
        outliers = rng.choice(summed, round(0.005 * summed), replace=False)
        x_MK[:, outliers] *= float(kind.removeprefix(OUTLIERS))
    if kind == SPREAD:
        x_MK *= np.repeat(2.0 ** rng.integers(-7, 8, (rows, summed // 16)), 16, axis=1)
    x_MK, w_NK = jnp.asarray(x_MK, jnp.bfloat16), jnp.asarray(w_NK, jnp.float32)
    if not recipe.quantized.quantized:
        return MatmulOperands(x_MK, w_NK.astype(jnp.bfloat16))
    return MatmulOperands(_quantize(x_MK, recipe.quantized.activation), _quantize(w_NK, recipe.quantized.weight))


_quantize = jax.jit(nvfp4.quantize, static_argnums=1)


def measure(name: str, recipe: str, operands: MatmulOperands) -> tuple[dict, np.ndarray]:
    """One row of a table, and the bits that each output needs."""
    arguments = (operands.x, operands.w, operands.group_sizes)
    certificate = certify(*arguments)
    row = {
        "operands": name,
        "recipe": recipe,
        "summed": int(operands.x.shape[-1]),
        "outputs": int(certificate.bits.size),
        "proven": 100 * certificate.fraction_proven,
        "bits_median": float(np.median(certificate.bits)),
        "bits_max": int(certificate.bits.max()),
        "order_matters": 100 * float(order_dependence(*arguments, orders=8).mean()),
    }
    return row, certificate.bits.reshape(-1)


def draw(path: Path, model_bits: dict, synthetic_bits: dict) -> None:
    """Three histograms of the bits that sums need, with the line that float32 draws."""
    panels = (
        ("The trained model's own operands, sums of 64", model_bits),
        ("Made-up operands, sums of 2048, recipe nvfp4 (our scales)", synthetic_bits["nvfp4"]),
        ("Made-up operands, sums of 2048, recipe nvfp4_te (all E4M3 scales)", synthetic_bits["nvfp4_te"]),
    )
    colours = ("#1f6fb4", "#5b8e5a", "#e0a030", "#d1495b", "#7a5ba8", "#5f6b73")
    last = max(int(bits.max()) for _, series in panels for bits in series.values()) + 1
    with new_figure(figure_figsize=(10.5, 8.6)) as figure:
        figure.suptitle(
            "How many bits does a sum need to be exact in every order?\n"
            "Black line: float32 holds 24 bits. Right of it the order of additions may change the result.",
            fontsize=11.5, x=0.01, ha="left",
        )  # fmt: skip
        for axes, (title, series) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
            axes.set_title(title, fontsize=10.5)
            for (label, bits), colour in zip(series.items(), colours, strict=False):
                share = 100 * np.bincount(bits, minlength=last + 1) / bits.size
                within = 100 * float((bits <= FLOAT32_SIGNIFICAND_BITS).mean())
                edges = np.arange(last + 2) - 0.5
                axes.stairs(share, edges, fill=True, color=colour, alpha=0.15)
                axes.stairs(share, edges, color=colour, linewidth=1.8, label=f"{label}:\n{within:.4g} % within 24 bits")
            axes.axvline(FLOAT32_SIGNIFICAND_BITS + 0.5, color="#111111", linewidth=1.4)
            axes.set_ylabel("share of outputs (%)")
            axes.set_xlim(8, last + 1)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
        axes.set_xlabel("bits needed: log2 of (sum of magnitudes / largest power of two that divides every product)")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, path)


def main(argv):
    del argv
    config, folder, results = _CONFIG.value, Path(_CHECKPOINT.value), Path(_RESULTS.value or "docs/benchmarks")
    run = finished_run(folder, config)
    setup, params = run.setup, run.state.train.params
    policy = mt.prepare(params, setup.model, setup.recipe)
    tokens_BT, sampled = held_out_tokens(setup, policy, params, _PROMPTS.value or 16, config.seed)
    print(f"{len(tokens_BT)} of {sampled} sequences have the commonest length, {tokens_BT.shape[1]} tokens: those are used")

    model_rows, synthetic_rows, model_bits, synthetic_bits = [], [], {}, {}
    for name in RECIPES:
        recipe = mt.recipe(name)
        recorded, _ = record_matmuls(mt.prepare(params, setup.model, recipe), jnp.asarray(tokens_BT))
        measured = {key: measure(key, name, operands) for key, operands in recorded.items()}
        model_rows += [row for row, _ in measured.values()]
        # The head is bfloat16 in every recipe: it says nothing about a recipe.
        model_bits[name] = np.concatenate([bits for key, (_, bits) in measured.items() if key != "head"])
        made_up = {kind: measure(kind, name, synthetic_operands(kind, recipe)) for kind in SYNTHETIC}
        synthetic_rows += [row for row, _ in made_up.values()]
        synthetic_bits[name] = {kind: bits for kind, (_, bits) in made_up.items()}
        inside = 100 * float((model_bits[name] <= FLOAT32_SIGNIFICAND_BITS).mean())
        print(f"{name}: {inside:.4g} % of {model_bits[name].size:,} outputs inside the layers need at most 24 bits")

    origin = provenance()
    notes = (
        "Proven: the certificate of `minite_jax.diagnostics.certify`. Changed: a measurement on the same operands, float32 "
        "additions one after the other in 8 random orders against the given order. "
    )
    write_results(
        results / "exactness_model.json", name="exactness_model", columns=COLUMNS, rows=model_rows, provenance=origin,
        title="Exact sums: the trained quick-start model on its own answers to held-out problems",
        notes=notes + f"{len(tokens_BT)} sequences of {tokens_BT.shape[1]} tokens ({sampled} were sampled; other lengths are "
        f"left out). Trained with recipe {setup.recipe.name}; the other recipes quantise the same weights. "
        "The head is bfloat16 in all of them.",
    )  # fmt: skip
    write_results(
        results / "exactness_synthetic.json", name="exactness_synthetic", columns=COLUMNS, rows=synthetic_rows, provenance=origin,
        title="Exact sums: made-up activations, sums of 2048 products",
        notes=notes + "Gaussian weights; no model has these activations.",
    )  # fmt: skip
    draw(Path(_IMAGE.value), model_bits, synthetic_bits)
    print(f"written: {results}/exactness_model.json, {results}/exactness_synthetic.json, {_IMAGE.value}")


if __name__ == "__main__":
    cli.run(main, config="configs/quickstart.py", required=("checkpoint",))
