"""Does `experiments.diagnose` point at the right place? Random faults in a small model, and pairs without a fault.

    python -m experiments.fault_study --faults=200 --fault_seed=4 --out=docs/benchmarks/fault_study.json

One engine runs the forward. The other runs the same forward with one fault, drawn at random: which operation of which layer,
for which expert, of which kind, how large. Each fault is looked for twice: between engines of otherwise equal bits, and between
engines that round differently everywhere (each tensor of one engine gets noise of about one bfloat16 rounding). Pairs without a
fault are of both sorts too: other neighbours in the batch, and rounding noise alone. Ten minutes on two cores.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from minite_jax.diagnostics.compare import compare
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, new_header
from minite_jax.metrics.results import write_results
from minite_jax.model import Taps, hidden_states, tensor_names, tiny_moe

_FAULTS = flags.DEFINE_integer("faults", 200, "How many random faults.", lower_bound=1)
_CLEAN = flags.DEFINE_integer("clean", 100, "How many pairs without a fault.", lower_bound=1)
_SEED = flags.DEFINE_integer("fault_seed", 1, "Of faults, tokens and noise.")
_OUT = cli.out_flag()
cli.revision_flag()

CONFIG = tiny_moe(num_hidden_layers=3)
OPERATIONS = (
    "input", "attention/norm", "attention/qkv", "attention/q", "attention/k", "attention/heads", "attention/o",
    "attention/stream", "moe/norm", "moe/router/experts", "moe/router/weights", "moe/experts/gate_up", "moe/experts/gated",
    "moe/experts/down", "moe/out",
)  # fmt: skip
KINDS = ("scale", "noise", "channel", "one token", "layout", "bias")
MAGNITUDES = (2.0**-10, 2.0**1)  # of a fault, relative to the tensor; log-uniform between
SHAPE = (3, 12)  # sequences, tokens


def corrupt(x, fault, noise):
    """A tensor with a fault: "kind" numbers `KINDS`, "size" is relative to the tensor's own numbers."""
    rows, size, is_kind = x.reshape(x.shape[0], -1).astype(jnp.float32), fault["size"], lambda k: fault["kind"] == KINDS.index(k)
    rms = jnp.sqrt(jnp.mean(rows * rows))
    channel = (jnp.arange(rows.shape[1]) == fault["where"] % rows.shape[1])[None, :]
    token = (jnp.arange(rows.shape[0]) == fault["where"] % rows.shape[0])[:, None]
    scale = is_kind("scale") | (is_kind("channel") & channel) | (is_kind("one token") & token)
    shift = is_kind("bias") | (is_kind("channel") & channel)
    added = jnp.where(scale, rows, 0.0) + jnp.where(shift, rms, 0.0)
    added += jnp.where(is_kind("noise"), rms * noise.reshape(rows.shape), 0.0)
    added += jnp.where(is_kind("layout"), jnp.roll(rows, 1, axis=1) - rows, 0.0)
    return (rows + size * added).reshape(x.shape)


def moved_experts(experts, fault):
    """Some tokens' experts, each one further on: every n-th token, the more the larger the fault is."""
    every = jnp.maximum(1, (1 / jnp.maximum(fault["size"], 1 / experts.shape[0])).astype(jnp.int32))
    chosen = (jnp.arange(experts.shape[0]) + fault["where"]) % every == 0
    return jnp.where(chosen[:, None], (experts + 1) % CONFIG.num_experts, experts)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def run(policy, tokens, fault, noise, bank):
    """All tensors of a forward with a fault {"place", "kind", "size", "where", "expert"} (place -1: none) and rounding noise of a
    size `noise`, out of the bank of random numbers.
    """
    experts = {}

    def edit(place, layer, name, x):
        if name == "moe/router/experts":
            experts[layer] = jnp.where(fault["place"] == place, moved_experts(x, fault), x)
            return experts[layer]
        first = 7919 * place % (bank.size - x.size)
        random = bank[first : first + x.size].reshape(x.shape)
        value = x.astype(jnp.float32)
        bad = corrupt(x, fault, jnp.flip(random))
        if name.startswith("moe/experts"):
            bad = jnp.where(((fault["expert"] < 0) | (experts[layer] == fault["expert"]))[..., None], bad, value)
        value = jnp.where(fault["place"] == place, bad, value)
        return jnp.where(noise > 0, value * (1 + noise * 2.0**-9 * random), value).astype(x.dtype)

    edits = {
        f"layer.{layer}/{name}": functools.partial(edit, layer * len(OPERATIONS) + i, layer, name)
        for layer in range(CONFIG.num_hidden_layers)
        for i, name in enumerate(OPERATIONS)
    }
    taps = Taps(["*"], edits)
    hidden_states(policy, tokens, taps=taps)
    return taps.tensors


NO_FAULT = {"place": -1, "kind": 0, "size": 0.0, "where": 0, "expert": -1}


def traced(policy, tokens, order, fault=NO_FAULT, noise=0.0, seed=0):
    """A trace of the sequences `order` of the tokens."""
    bank = jnp.asarray(np.random.default_rng(seed).standard_normal(40_000), jnp.float32)
    arguments = {name: jnp.float32(v) if name == "size" else jnp.int32(v) for name, v in fault.items()}
    tensors = run(policy, jnp.asarray(tokens[order]), arguments, jnp.float32(noise), bank)
    positions = np.tile(np.arange(tokens.shape[1]), len(order))
    header = new_header(Rows(tokens[order].reshape(-1), positions, np.repeat(order, tokens.shape[1])), engine={"name": "study"})
    trace = MemoryTrace(header)
    for name in tensor_names(policy):
        if name in tensors:
            trace.add(name, np.asarray(tensors[name]))
    return trace.close()


def draw_fault(rng):
    """A random fault."""
    layer, i = int(rng.integers(CONFIG.num_hidden_layers)), int(rng.integers(len(OPERATIONS)))
    name = OPERATIONS[i]
    low, high = np.log(MAGNITUDES)
    expert = int(rng.integers(CONFIG.num_experts)) if name.startswith("moe/experts") and rng.random() < 0.75 else -1
    size = float(np.exp(rng.uniform(low, high)))
    kind, where = int(rng.integers(len(KINDS))), int(rng.integers(2**20))
    return {"place": layer * len(OPERATIONS) + i, "kind": kind, "size": size, "where": where, "expert": expert}


def place_name(fault):
    """The tensor where a fault is."""
    layer, i = divmod(fault["place"], len(OPERATIONS))
    return f"layer.{layer}/{OPERATIONS[i]}"


def small_policy(seed):
    """Random weights, with norms that are not all ones."""
    params = mt.init_params(CONFIG, jax.random.key(seed))
    gains = iter(jax.random.split(jax.random.key(seed + 1), 1000))
    params = jax.tree.map(lambda x: x * jnp.exp(0.3 * jax.random.normal(next(gains), x.shape)) if x.ndim == 1 else x, params)
    return mt.prepare(params, CONFIG, mt.recipe("nvfp4"))


def one_fault(policy, rng):
    """Draws a fault and looks for it. None if it changes no bit: lost in rounding, or its expert has no token."""
    fault, tokens, number = draw_fault(rng), draw_tokens(rng), int(rng.integers(2**31))
    order, name = np.arange(SHAPE[0]), place_name(fault)
    reference, faulty = traced(policy, tokens, order), traced(policy, tokens, order, fault, seed=number)
    before, after = (trace.read(name)[0].astype(np.float64) for trace in (reference, faulty))
    if np.array_equal(before, after):
        return None
    same = compare(reference, faulty)
    noisy = compare(reference, traced(policy, tokens, order, fault, noise=1.0, seed=number)).location
    right = noisy is not None and noisy.name == name
    return {
        "place": name, "kind": KINDS[fault["kind"]], "size": fault["size"],
        "relative": float(np.linalg.norm(after - before) / np.linalg.norm(before)),
        "exact": same.first is not None and same.first.name == name, "noisy": right,
        "named": noisy.name if noisy else "", "excess": noisy.excess if noisy else None,
        "has_expert": fault["expert"] >= 0, "expert": right and noisy.experts == (fault["expert"],),
    }  # fmt: skip


def draw_tokens(rng):
    return rng.integers(0, CONFIG.vocab_size, SHAPE).astype(np.int32)


def study(faults: int, clean: int, seed: int):
    """Runs everything. Returns rows about faults, and names of what was wrongly pointed at in pairs without a fault."""
    rng, policy = np.random.default_rng(seed), small_policy(seed)
    order, rows, alarms = np.arange(SHAPE[0]), [], []
    while len(rows) < faults:
        row = one_fault(policy, rng)
        if row is not None:
            rows.append(row)
    for i in range(clean):
        tokens, number = draw_tokens(rng), int(rng.integers(2**31))
        reference = traced(policy, tokens, order)
        if i % 2:
            result = compare(reference, traced(policy, tokens, rng.permutation(SHAPE[0])))
            alarm = result.first or result.location
        else:
            result = compare(reference, traced(policy, tokens, order, noise=float(rng.uniform(0.25, 2.0)), seed=number))
            alarm = result.location
        if alarm is not None:
            alarms.append((alarm.name, alarm.excess))
    return rows, alarms


COLUMNS = [
    {"key": "size", "label": "error that the fault makes there, relative", "unit": ""},
    {"key": "faults", "label": "faults", "unit": ""},
    {"key": "exact", "label": "first difference right, engines otherwise equal", "unit": "%"},
    {"key": "noisy", "label": "location right, engines round differently", "unit": "%"},
    {"key": "silent", "label": "nothing pointed at", "unit": "%"},
    {"key": "wrong", "label": "another place pointed at", "unit": "%"},
]
_EDGES = (0, 2.0**-9, 2.0**-8, 2.0**-7, 2.0**-6, 2.0**-5, 2.0**-4, 2.0**-2, np.inf)


def table(rows):
    """Rows by the size of the error, and all together."""
    share = lambda flags: 100 * float(np.mean(flags))  # noqa: E731

    def line(label, chosen):
        return {
            "size": label, "faults": len(chosen), "exact": share([r["exact"] for r in chosen]),
            "noisy": share([r["noisy"] for r in chosen]), "silent": share([not r["named"] for r in chosen]),
            "wrong": share([not r["noisy"] and bool(r["named"]) for r in chosen]),
        }  # fmt: skip

    lines = []
    for low, high in zip(_EDGES[:-1], _EDGES[1:], strict=True):
        chosen = [r for r in rows if low <= r["relative"] < high]
        if chosen:
            lines.append(line(f"{low:.4f} to {high:.4f}", chosen))
    return [*lines, line("all", rows)]


def main(argv):
    del argv
    rows, alarms = study(_FAULTS.value, _CLEAN.value, _SEED.value)
    for each in rows:
        if not each["noisy"] or not each["exact"]:
            print({k: v if not isinstance(v, float) else round(v, 5) for k, v in each.items()})
    print(f"alarms in {_CLEAN.value} pairs without a fault: {len(alarms)} {alarms}")
    lines = table(rows)
    for line in lines:
        print(line)
    named = [r["expert"] for r in rows if r["has_expert"] and r["noisy"]]
    print(f"expert right in {sum(named)} of {len(named)} located expert faults")
    path = Path(_OUT.value or "docs/benchmarks/fault_study.json")
    write_results(
        path, name=path.stem, title=f"{len(rows)} random faults in a model of {CONFIG.num_hidden_layers} layers",
        columns=COLUMNS, rows=lines, provenance=cli.origin(),
        notes=f"Seed {_SEED.value}. {len(alarms)} alarms in {_CLEAN.value} pairs without a fault (half other neighbours in the "
        f"batch, half rounding noise). Of {len(named)} located faults of one expert, {sum(named)} name that expert and no other. "
        "Noise: every tensor of one engine times 1 + 2^-9 normal.",
    )  # fmt: skip
    print(f"written: {path}")


if __name__ == "__main__":
    cli.run(main)
