"""Traces of our own engine: the learner's forward over whole sequences, and the sampler's, through the paged cache.

    trace = trace_learner(policy, tokens, patterns=["layer.*/moe/router/*", "final/*"])
    other = trace_sampler(policy, tokens, prompt_lengths, patterns=["*"], sink=writer_to("runs/trace"))

Both run the one forward with `minite_jax.model.Taps`; nothing is computed a second time. What is wanted may be more than fits
a device beside the model: then the forward runs several times, and gives some of the tensors each time (`max_bytes`).
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from minite_jax.checkpoint.config import to_plain
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, Trace, TraceError, TraceWriter, add_row_set, new_header
from minite_jax.metrics.provenance import provenance
from minite_jax.model.cache import init_cache
from minite_jax.model.forward import hidden_states, logits_of, scored_tokens
from minite_jax.model.params import path_name
from minite_jax.model.policy import Policy
from minite_jax.model.taps import Taps, tensor_names
from minite_jax.sampler.requests import SamplingParams, pad_prompts
from minite_jax.sampler.sampling import Rollouts, next_token, start_sampling
from pallas_kernels.log_prob import Truncation, kept_tokens, log_prob_of_logits

SCORED = "scored"  # rows whose next token has a log-prob
_HEAD = ("final/logits", "final/log_prob", "final/entropy")
_UNTRUNCATED = Truncation()

Sink = Callable[[dict[str, Any]], MemoryTrace | TraceWriter]


def writer_to(path: str | Path) -> Sink:
    """A sink that writes the trace into a new folder."""
    return lambda header: TraceWriter(Path(path), header)


def select(policy: Policy, patterns: Iterable[str]) -> list[str]:
    """The names that patterns choose, in execution order.

    Raises:
      TraceError: no pattern, or one that no tensor of this model matches.
    """
    names, patterns = tensor_names(policy), tuple(patterns)
    if not patterns:
        raise TraceError(f"no tensor is chosen: give patterns, such as * or {names[1]}")
    for pattern in patterns:
        if not any(map(Taps([pattern]).wants, names)):
            raise TraceError(f"no tensor is called {pattern!r}; names look like {names[1]}, {names[-8]}, {names[-1]}")
    return [name for name in names if Taps(patterns).wants(name)]


def trace_learner(
    policy: Policy,
    tokens: Int[np.ndarray, "B T"],
    *,
    patterns: Iterable[str] = ("*",),
    mask: Bool[np.ndarray, "B T"] | None = None,
    positions: Int[np.ndarray, "B T"] | None = None,
    truncation: Truncation = _UNTRUNCATED,
    remat: bool = False,
    max_bytes: int | None = None,
    sink: Sink = MemoryTrace,
    hash_weights: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Trace:
    """The forward as the learner runs it (`scored_tokens`).

    Args:
      policy: see `minite_jax.prepare`.
      tokens: [B, T] int32, T >= 2.
      patterns: which tensors, see `minite_jax.model.Taps`.
      mask: [B, T] bool, the tokens that are no padding; None: all. Other rows are left out of the trace.
      positions: [B, T] int32 of packed sequences, see `hidden_states`; each position 0 begins a sequence.
      truncation: of the log-probs.
      remat: as in the update.
      max_bytes: the most bytes of tensors that are on the device at once, by running the forward several times; None: no limit.
      sink: where the trace goes: memory, or `writer_to(folder)`.
      hash_weights: whether the header says the weights' fingerprints (they are fetched for that).
      compiler_options: of `jax.jit`, for an engine that is compiled otherwise.

    Returns:
      The trace.

    Raises:
      TraceError: a pattern matches nothing, or the shapes of the arguments do not agree.
    """
    tokens, names = np.asarray(tokens, np.int32), select(policy, patterns)
    mask_BT = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    position_BT = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else np.asarray(positions)
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not tokens.shape == mask_BT.shape == position_BT.shape:
        raise TraceError(
            f"tokens {tokens.shape}, mask {mask_BT.shape} and positions {position_BT.shape}: all are [B, T] with T of at least 2"
        )
    if not mask_BT.any():
        raise TraceError("the mask leaves no token to trace")
    sequence_BT = np.cumsum((position_BT == 0).reshape(-1)).reshape(tokens.shape) - 1
    rows = Rows(tokens[mask_BT], position_BT[mask_BT], np.unique(sequence_BT[mask_BT], return_inverse=True)[1])
    header = new_header(rows, **_origin(policy, "learner", truncation, hash_weights))
    scored_BT = mask_BT[:, :-1] & mask_BT[:, 1:] & (sequence_BT[:, :-1] == sequence_BT[:, 1:])
    numbers_BT = np.cumsum(mask_BT.reshape(-1)).reshape(mask_BT.shape) - 1
    add_row_set(header, SCORED, numbers_BT[:, :-1][scored_BT])

    trace = sink(header)
    places = None if positions is None else jnp.asarray(position_BT, jnp.int32)
    program = _learner_program(tuple((compiler_options or {}).items()))
    run = functools.partial(program, policy, jnp.asarray(tokens), places, truncation=truncation, remat=remat)
    for group in _passes(run, names, max_bytes):
        tensors = run(names=group)
        for name in group:
            array = np.asarray(tensors.pop(name))
            keep = scored_BT if name in _HEAD else mask_BT
            trace.add(name, array[keep.reshape(-1)], SCORED if name in _HEAD else None)
    return trace.close()


@functools.cache
def _learner_program(compiler_options):
    return jax.jit(_learner, static_argnames=("names", "truncation", "remat"), compiler_options=dict(compiler_options) or None)


def _learner(policy, tokens, positions, *, names, truncation, remat):
    taps = Taps(names)
    log_prob_BT, _ = scored_tokens(policy, tokens, truncation, positions=positions, remat=remat, taps=taps)
    # The log-probs go out in any case: a program whose result nobody reads could be left out by the compiler.
    return {"final/log_prob": log_prob_BT.reshape(-1), **taps.tensors}


def _passes(run: Callable[..., Any], names: list[str], max_bytes: int | None) -> Iterator[tuple[str, ...]]:
    """Cuts the names into runs whose tensors have at most `max_bytes`, at least one name each."""
    if max_bytes is None:
        yield tuple(names)
        return
    shapes = jax.eval_shape(functools.partial(run, names=tuple(names)))
    group, held = [], 0
    for name in names:
        size = shapes[name].size * shapes[name].dtype.itemsize
        if group and held + size > max_bytes:
            yield tuple(group)
            group, held = [], 0
        group, held = [*group, name], held + size
    yield tuple(group)


class _Pieces:
    """Tensors that come in pieces of rows, put together by sequence and position."""

    def __init__(self):
        self._pieces: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def add(self, tensors: dict[str, jax.Array], keys_M2: np.ndarray, keep_M: np.ndarray) -> None:
        """Takes rows `keep_M` of tensors whose rows are (sequence, position) `keys_M2`."""
        for name, array in tensors.items():
            self._pieces.setdefault(name, []).append((keys_M2[keep_M], np.asarray(array)[keep_M]))

    def write(self, trace: MemoryTrace | TraceWriter, header: dict[str, Any], names: list[str], rows: Rows) -> None:
        number = {key: i for i, key in enumerate(zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True))}
        sets: dict[tuple[int, ...], str | None] = {tuple(range(len(rows))): None}
        for name in names:
            pieces = self._pieces.pop(name, [])
            if not pieces:
                continue
            numbers = np.array([number[tuple(key)] for keys, _ in pieces for key in keys.tolist()], np.int64)
            array = np.concatenate([each for _, each in pieces])
            order = np.argsort(numbers, kind="stable")
            key = tuple(numbers[order].tolist())
            if key not in sets:
                sets[key] = SCORED if name in _HEAD else f"rows{len(sets)}"
                add_row_set(header, sets[key], key)
            trace.add(name, array[order], sets[key])


def trace_sampler(
    policy: Policy,
    tokens: Int[np.ndarray, "B T"],
    prompt_lengths: Int[np.ndarray, "B"],
    *,
    lengths: Int[np.ndarray, "B"] | None = None,
    patterns: Iterable[str] = ("*",),
    truncation: Truncation = _UNTRUNCATED,
    sink: Sink = MemoryTrace,
    hash_weights: bool = True,
) -> Trace:
    """Given sequences as a sampler runs them: prompts prefilled into a paged cache, then a token at a time.

    Args:
      policy: see `minite_jax.prepare`.
      tokens: [B, T] int32, padded behind each sequence.
      prompt_lengths: [B] int32, at least 1.
      lengths: [B] int32 of whole sequences; None: T.
      patterns, truncation, sink, hash_weights: see `trace_learner`.

    Returns:
      The trace. Logits and log-probs are there where a sampler computes them: from each prompt's last token on.

    Raises:
      TraceError: a pattern matches nothing, or lengths that do not fit the tokens.
    """
    tokens, names = np.asarray(tokens, np.int32), select(policy, patterns)
    batch, slots = tokens.shape
    length_B = np.full(batch, slots) if lengths is None else np.asarray(lengths)
    prompt_B = np.asarray(prompt_lengths)
    if prompt_B.shape != (batch,) or length_B.shape != (batch,) or (prompt_B < 1).any() or (prompt_B > length_B).any():
        raise TraceError(f"prompt lengths {prompt_B.tolist()} and lengths {length_B.tolist()} do not fit tokens {tokens.shape}")
    mask_BT = np.arange(slots) < length_B[:, None]
    sequence_BT, position_BT = np.indices(tokens.shape)
    rows = Rows(tokens[mask_BT], position_BT[mask_BT], sequence_BT[mask_BT])
    header = new_header(rows, **_origin(policy, "sampler", truncation, hash_weights))
    trace, pieces = sink(header), _Pieces()

    pieces_of = functools.partial(_replay, policy, names=tuple(names), truncation=truncation)
    prefill = int(prompt_B.max())
    cache = init_cache(policy.config, policy.recipe, batch, slots)
    start_B, width = np.zeros(batch, np.int64), prefill
    while (start_B < length_B).any():
        new_B = np.minimum(prompt_B if not start_B.any() else 1, length_B - start_B)
        column_BT = np.minimum(start_B[:, None] + np.arange(width), slots - 1)
        fed_BT = np.take_along_axis(tokens, column_BT, axis=1)
        last_B = np.maximum(start_B + new_B - 1, 0)
        next_B = np.take_along_axis(tokens, np.minimum(last_B + 1, slots - 1)[:, None], axis=1)[:, 0]
        cache, tensors, head = pieces_of(cache, jnp.asarray(fed_BT), jnp.asarray(new_B, jnp.int32), jnp.asarray(next_B))
        keys = np.stack([np.repeat(np.arange(batch), width), (start_B[:, None] + np.arange(width)).reshape(-1)], axis=1)
        pieces.add(tensors, keys, (np.arange(width) < new_B[:, None]).reshape(-1))
        pieces.add(head, np.stack([np.arange(batch), last_B], axis=1), (new_B > 0) & (last_B + 1 < length_B))
        start_B, width = start_B + new_B, 1
    pieces.write(trace, header, names, rows)
    return trace.close()


@functools.partial(jax.jit, static_argnames=("names", "truncation"))
def _replay(policy, cache, tokens_BT, num_new_B, next_B, *, names, truncation):
    """Runs new tokens through the cache. Returns it, their tensors, and those of the head for each row's last new token."""
    taps, head = Taps(names), Taps(names)
    hidden_BTD, cache = hidden_states(policy, tokens_BT, cache, num_new=num_new_B, taps=taps)
    last_BD = hidden_BTD[jnp.arange(tokens_BT.shape[0]), jnp.maximum(num_new_B - 1, 0)]
    logits_BV = head("final/logits", logits_of(policy, last_BD))
    log_prob_B, entropy_B = log_prob_of_logits(logits_BV, next_B, truncation, kept_tokens(logits_BV, truncation))
    head("final/log_prob", log_prob_B)
    head("final/entropy", entropy_B)
    return cache, taps.tensors, head.tensors


def trace_sampling(
    policy: Policy,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    key: Array,
    patterns: Iterable[str] = ("*",),
    sink: Sink = MemoryTrace,
    hash_weights: bool = True,
) -> tuple[Trace, Rollouts]:
    """Samples as `minite_jax.sample` does, bit for bit, and traces what the sampler computes.

    Args:
      policy, prompts, params, key: see `minite_jax.sample`; one sample a prompt.
      patterns, sink, hash_weights: see `trace_learner`.

    Returns:
      The trace, and what was sampled. The last token of a sequence is a row without tensors: nobody needs to run it.

    Raises:
      TraceError: a pattern matches nothing, or more than one sample a prompt.
    """
    if params.n != 1:
        raise TraceError(f"n={params.n}: a trace holds one sample a prompt; repeat the prompts instead")
    names, (tokens_PL, length_P) = tuple(select(policy, patterns)), pad_prompts(prompts, policy.config.vocab_size)
    ids_P, batch, pieces = jnp.arange(len(prompts), dtype=jnp.uint32), len(prompts), _Pieces()
    key_B, state, tensors = _start(policy, tokens_PL, jnp.asarray(length_P), ids_P, key, params=params, names=names)
    keys = np.stack([a.reshape(-1) for a in np.indices(tokens_PL.shape)], axis=1)
    pieces.add(tensors, keys, keys[:, 1] < length_P[keys[:, 0]])
    done_B, step = np.zeros(batch, bool), 0
    while step < params.max_tokens and not done_B.all():
        state, tensors = _next(policy, key_B, state, params=params, names=names)
        alive_B, done_B = ~done_B, np.asarray(state.done)
        head = {name: tensors.pop(name) for name in _HEAD if name in tensors}
        pieces.add(head, np.stack([np.arange(batch), length_P + step - 1], axis=1), alive_B)
        # The last token is run too, since the loop does so; but its row may have lost its pages.
        runs_on = ~done_B & (step + 1 < params.max_tokens)
        pieces.add(tensors, np.stack([np.arange(batch), length_P + step], axis=1), runs_on)
        step += 1
    mask_BC = np.asarray(state.mask)
    new_BC = np.asarray(state.tokens)
    ids, positions, sequences = [], [], []
    for b in range(batch):
        row = [*tokens_PL[b, : length_P[b]].tolist(), *new_BC[b][mask_BC[b]].tolist()]
        ids, positions, sequences = ids + row, positions + list(range(len(row))), sequences + [b] * len(row)
    rows = Rows(ids, positions, sequences)
    header = new_header(rows, **_origin(policy, "sampler", params.truncation, hash_weights))
    trace = sink(header)
    pieces.write(trace, header, list(names), rows)
    rollouts = Rollouts(
        tokens=state.tokens,
        log_probs=state.log_probs,
        mask=state.mask,
        finish_reason=jnp.where(state.done, 1, 0).astype(jnp.int32),
        prompt_tokens=jnp.asarray(tokens_PL),
        prompt_length=jnp.asarray(length_P),
    )
    return trace.close(), rollouts


@functools.partial(jax.jit, static_argnames=("params", "names"))
def _start(policy, tokens_PL, length_P, ids_P, key, *, params, names):
    taps = Taps(names)
    key_B, state = start_sampling(policy, tokens_PL, length_P, ids_P, key, params, None, taps)
    return key_B, state, taps.tensors


@functools.partial(jax.jit, static_argnames=("params", "names"), donate_argnames=("state",))
def _next(policy, key_B, state, *, params, names):
    taps = Taps(names)
    return next_token(policy, key_B, state, params, taps), taps.tensors


def weight_fingerprints(policy: Policy) -> dict[str, str]:
    """A hash of each stored weight: ``{"layers.3.qkv": "9f86d081884c7d65", ...}``."""
    found = {}
    is_leaf = lambda x: hasattr(x, "codes")  # noqa: E731
    for path, leaf in jax.tree_util.tree_flatten_with_path(policy.weights, is_leaf=is_leaf)[0]:
        digest = hashlib.sha256()
        for part in jax.tree.leaves(leaf):
            digest.update(np.ascontiguousarray(jax.device_get(part)).reshape(-1).view(np.uint8).data)
        found[path_name(path)] = digest.hexdigest()[:16]
    return found


def _origin(policy: Policy, point: str, truncation: Truncation, hash_weights: bool) -> dict[str, Any]:
    """Engine, model and sampling of a header."""
    origin = provenance()
    engine = {"name": "minite_jax", "point": point, "recipe": policy.recipe.name, "dtype": policy.recipe.dtype}
    engine |= {key: origin[key] for key in ("versions", "revision", "device", "date")}
    model: dict[str, Any] = {"config": to_plain(policy.config)}
    if hash_weights:
        prints = weight_fingerprints(policy)
        model |= {
            "weights_of": f"minite_jax {policy.recipe.name}",
            "weights": prints,
            "hash": hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest()[:16],
        }
    sampling = {"temperature": truncation.temperature, "top_k": truncation.top_k, "top_p": truncation.top_p}
    return {"engine": engine, "model": model, "sampling": {**sampling, "log_probs": "processed"}}
