"""Writes a trace of a PyTorch model: copy this one file beside it. Needs torch and safetensors, nothing else.

Hugging Face transformers (Qwen3, Qwen3-MoE, Llama):

    from torch_hooks import TraceHooks
    with TraceHooks(model, "trace", engine={"name": "transformers"}) as trace:
        trace.rows(input_ids, attention_mask)          # [B, T] each
        model(input_ids, attention_mask=attention_mask)

vLLM, on one GPU, without CUDA graphs and prefix caching, with all prompts in one batch (VLLM_ALLOW_INSECURE_SERIALIZATION=1 in
the environment lets functions go to its worker):

    llm = LLM(..., enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=8192)    # prompts together: fewer
    llm.apply_model(lambda model: setattr(model, "trace", TraceHooks(model, "trace", names=VLLM, engine={"name": "vllm"})))
    llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))                          # logits of every prompt token
    llm.apply_model(lambda model: model.trace.close())

SGLang likewise, with `names=SGLANG`, CUDA graphs and the radix cache off; its log-probs come from its answers. Engines that call
the model with flat `input_ids` and `positions` tell the rows by that; where one does not, `flat_rows` does.

Every module of `names` that the model has gives tensors; `only` chooses some of them by pattern. The folder has its name when it
is complete. Layout: docs/trace_format.md of minite_jax, version 1.
"""

import fnmatch
import hashlib
import json
import os
import re
import shutil

import safetensors
import torch
from safetensors.torch import save_file

# Module behind "layers.<i>." -> tensors: which side of the call, which of several values, name.
_BLOCKS = {
    "": [("in", 0, "input")],
    "input_layernorm": [("out", 0, "attention/norm")],
    "self_attn.q_proj": [("out", 0, "attention/q_proj")],
    "self_attn.k_proj": [("out", 0, "attention/k_proj")],
    "self_attn.v_proj": [("out", 0, "attention/v_proj")],
    "self_attn.q_norm": [("out", 0, "attention/q_norm")],
    "self_attn.k_norm": [("out", 0, "attention/k_norm")],
    "self_attn.o_proj": [("in", 0, "attention/heads"), ("out", 0, "attention/o")],
    "post_attention_layernorm": [("in", 0, "attention/stream"), ("out", 0, "{mlp}/norm")],
    "mlp.gate_proj": [("out", 0, "mlp/gate")],
    "mlp.up_proj": [("out", 0, "mlp/up")],
    "mlp.down_proj": [("in", 0, "mlp/gated"), ("out", 0, "mlp/down")],
    "mlp.gate": [("out", 0, "moe/router/logits"), ("out", 1, "moe/router/weights"), ("out", 2, "moe/router/experts")],
}
HUGGINGFACE = {
    **{f"layers.#.{module}".rstrip("."): tensors for module, tensors in _BLOCKS.items()},
    "layers.#.mlp": [("out", 0, "moe/out")],  # of a dense layer it is mlp/down, which is there already
    "embed_tokens": [("out", 0, "embed")],
    "norm": [("in", 0, "final/stream"), ("out", 0, "final/norm")],
    "lm_head": [("out", 0, "final/logits")],
}
# vLLM and SGLang fuse projections. Their norms are called with what is to be added and the stream, and return (norm, new stream);
# the first norm is called with the embedding alone. Nobody calls `lm_head`: the logits' module reads its weight.
_FUSED = {
    "layers.#.input_layernorm": [("alone", 0, "input"), ("out", 0, "attention/norm"), ("out", 1, "input")],
    "layers.#.self_attn.qkv_proj": [("out", 0, "attention/qkv")],
    "layers.#.self_attn.q_norm": [("out", 0, "attention/q_norm")],
    "layers.#.self_attn.k_norm": [("out", 0, "attention/k_norm")],
    "layers.#.self_attn.attn": [("in", 0, "attention/q"), ("in", 1, "attention/k"), ("out", 0, "attention/heads")],
    "layers.#.self_attn.o_proj": [("out", 0, "attention/o")],
    "layers.#.post_attention_layernorm": [("out", 1, "attention/stream"), ("out", 0, "{mlp}/norm")],
    "layers.#.mlp.gate_up_proj": [("out", 0, "mlp/gate_up")],
    "layers.#.mlp.down_proj": [("in", 0, "mlp/gated"), ("out", 0, "mlp/down")],
    "layers.#.mlp.gate": [("out", 0, "moe/router/logits")],
    "layers.#.mlp.experts": [("out", 0, "moe/out")],
    "embed_tokens": [("out", 0, "embed")],
    "norm": [("out", 1, "final/stream"), ("out", 0, "final/norm")],
}
# Where the experts call the router themselves, it may be known as theirs.
VLLM = {
    **_FUSED,
    "layers.#.mlp.experts.gate": _FUSED["layers.#.mlp.gate"],
    "logits_processor": [("out", 0, "final/logits")],
}
SGLANG = {**_FUSED, "layers.#.mlp.topk": [("out", 0, "moe/router/weights"), ("out", 1, "moe/router/experts")]}
_ORDER = (
    "input", "attention/norm", "attention/qkv", "attention/q_proj", "attention/k_proj", "attention/v_proj", "attention/q_norm",
    "attention/k_norm", "attention/q", "attention/k", "attention/heads", "attention/o", "attention/stream", "moe/norm",
    "moe/router/logits", "moe/router/experts", "moe/router/weights", "moe/out", "mlp/norm", "mlp/gate", "mlp/up", "mlp/gate_up",
    "mlp/gated", "mlp/down",
)  # fmt: skip
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


class TraceHooks:
    """Records one forward of a model.

    Args:
      model: any torch.nn.Module whose modules are called as `names` says.
      path: folder to write; must not exist.
      names: `HUGGINGFACE`, `VLLM`, `SGLANG`, or your own: module name from "layers.#." or behind the last "model." -> tensors.
      only: patterns of tensors, as in file names.
      engine: for the header; "name" at least.
      temperature: of the log-probs that are computed from the logits.
      log_probs: whether to compute them.
      hash_weights: whether the header holds a hash of every weight.
      part_bytes: about so many bytes are held in memory before they are written.
    """

    def __init__(
        self, model, path, *, names=None, only=("*",), engine=None, temperature=1.0, log_probs=True, hash_weights=True,
        part_bytes=1 << 30,
    ):  # fmt: skip
        if os.path.exists(path):
            raise ValueError(f"{path} exists: give the name of a new folder, or remove it")
        self._path, self._unfinished = str(path), f"{path}.tmp"
        shutil.rmtree(self._unfinished, ignore_errors=True)
        os.makedirs(self._unfinished)
        self._model, self._only, self._part_bytes = model, only, part_bytes
        self._temperature, self._log_probs = temperature, log_probs
        self._held, self._entries, self._files, self._keep, self._rows = {}, {}, {}, None, None
        self._sets = {}
        self._logits, self._normed = {}, None  # by row, where an engine computes them a few rows at a time
        self._engine = {"versions": {"torch": torch.__version__, "safetensors": safetensors.__version__}, **(engine or {})}
        self._weights = _fingerprints(model) if hash_weights else None
        self._handles = []
        found = 0
        for name, module in model.named_modules():
            layer, tensors = _tensors_of(name, names or HUGGINGFACE)
            if tensors:
                found += 1
                self._watch(module, layer, tensors, has_experts=_has_experts(model, name, layer))
            if name in ("", "model"):  # an engine calls one of the two
                self._handles.append(module.register_forward_pre_hook(self._read_rows, with_kwargs=True))
        if not found:
            raise ValueError("no module has a name that is known: print(model) and give names={...}")

    def rows(self, input_ids, attention_mask=None, position_ids=None):
        """Says what the next forward reads: [B, T] each. Rows of padding (mask 0) are left out."""
        batch, length = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        mask = mask.bool()
        if position_ids is None:
            position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)  # from 0, whichever side the padding is on
        sequences = torch.arange(batch, device=input_ids.device)[:, None].expand(batch, length)
        keep = mask.reshape(-1)
        position_ids = position_ids.to(input_ids.device).expand(batch, length)
        self._set(*(x.reshape(-1)[keep] for x in (input_ids, position_ids, sequences)), keep.cpu())

    def flat_rows(self, token_ids, positions, sequences):
        """The same for an engine that reads tokens [R] of several sequences one after another."""
        rows = [torch.as_tensor(x).reshape(-1) for x in (token_ids, positions, sequences)]
        self._set(*rows, torch.ones(len(rows[0]), dtype=torch.bool))

    def _read_rows(self, module, arguments, keywords):
        """The rows out of a call `model(input_ids, positions, ...)` of flat tensors: every position 0 begins a sequence."""
        given = dict(zip(("input_ids", "positions"), arguments, strict=False)) | keywords
        token_ids, positions = given.get("input_ids"), given.get("positions")
        if self._rows is not None or not (torch.is_tensor(token_ids) and torch.is_tensor(positions)) or token_ids.ndim != 1:
            return
        if positions.shape != token_ids.shape:
            raise ValueError(f"{len(token_ids)} input_ids and positions {tuple(positions.shape)}: say the rows with flat_rows()")
        sequences, place = (positions == 0).cumsum(0) - 1, torch.arange(len(positions), device=positions.device)
        starts = torch.cummax(torch.where(positions == 0, place, torch.zeros_like(place)), 0).values
        wrong = (positions != place - starts).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"token {first} of the batch has position {int(positions[first])}: not whole prompts from their first token on; "
                "switch prefix caching and chunked prefill off"
            )
        self.flat_rows(token_ids, positions, sequences)

    def _set(self, token_ids, positions, sequences, keep):
        if self._rows is not None:
            raise ValueError("a trace holds one forward: make another TraceHooks for the next")
        self._keep = keep
        rows = {"token_ids": token_ids, "positions": positions, "sequences": sequences}
        self._rows = {name: x.cpu().tolist() for name, x in rows.items()}

    def _watch(self, module, layer, tensors, has_experts):
        def offer(side, values):
            values = values if isinstance(values, (tuple, list)) else (values,)
            for which, index, name in tensors:
                if which == side and index < len(values) and torch.is_tensor(values[index]):
                    name = name.format(mlp="moe" if has_experts else "mlp")
                    if name == "moe/out" and not has_experts:
                        continue
                    self._take(name if layer is None else f"layer.{layer}/{name}", values[index], read)

        read = ()  # what the call that is under way was given

        def before(module, arguments, keywords):
            nonlocal read
            read = tuple(x for x in (*arguments, *keywords.values()) if torch.is_tensor(x))
            offer("in", arguments or read)
            if len(read) == 1:
                offer("alone", read)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(lambda module, arguments, result: offer("out", result)))

    def _take(self, name, value, read):
        wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._only)
        if not wanted and name != "final/norm":
            return
        if self._rows is None:
            raise ValueError("call rows(input_ids, attention_mask) before the model")
        value, count = value.detach().cpu(), len(self._keep)
        if name == "final/logits" and value.ndim == 2 and self._normed is not None and read:
            self._take_some_logits(value, read[-1].detach().cpu())
            return
        if name in self._entries:
            raise ValueError(f"{name} came twice: a trace holds one forward; make another TraceHooks for the next (max_tokens=1)")
        if name.endswith(("/q_norm", "/k_norm")) and value.ndim == 2 and value.shape[0] > count and value.shape[0] % count == 0:
            value = value.reshape(count, -1)  # a row for each head
        axes = 1 if value.shape[0] == count else 2
        if value.shape[:axes].numel() != count:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, which are not the {count} tokens of rows()")
        value = value.reshape(count, *value.shape[axes:])
        if name == "final/norm":
            self._normed = value if value.ndim == 2 and bool(self._keep.all()) else None
            if not wanted:
                return
        value = value[self._keep]
        if value.dtype not in _DTYPES:
            value = value.float()
        self._hold(name, value)
        if name == "final/logits" and self._log_probs:
            self._hold_log_probs(value, range(len(value)))
        if sum(x.numel() * x.element_size() for x in self._held.values()) >= self._part_bytes:
            self._write_part()

    def _hold(self, name, value, rows=None):
        part = f"part-{len(self._files):05d}.safetensors"
        self._held[name] = value.contiguous().clone()
        self._entries[name] = {"file": part, "dtype": _DTYPES[value.dtype], "shape": list(value.shape)}
        if rows is not None:
            self._entries[name]["rows"] = rows

    def _take_some_logits(self, logits, hidden):
        """Logits of a few rows, which are found again by their bits in the last norm's output."""
        bits = lambda x: [row.numpy().tobytes() for row in x.contiguous().view(torch.uint8)]  # noqa: E731
        places = {}
        for row, key in enumerate(bits(self._normed)):
            places.setdefault(key, []).append(row)
        for key, value in zip(bits(hidden), logits, strict=True):
            if key not in places:
                raise ValueError("logits of a row that the last norm did not give: a trace holds one forward (max_tokens=1)")
            row = next((row for row in places[key] if row not in self._logits), None)
            if row is not None:  # else an engine computes them again, for the log-probs of a prompt
                self._logits[row] = value.clone()

    def _hold_log_probs(self, logits, rows):
        keys = list(zip(self._rows["sequences"], self._rows["positions"], strict=True))
        next_id = {(s, p - 1): token for (s, p), token in zip(keys, self._rows["token_ids"], strict=True)}
        known = [(place, row) for place, row in enumerate(rows) if keys[row] in next_id]
        self._sets["scored"] = [row for _, row in known]
        token = torch.tensor([next_id[keys[row]] for _, row in known], dtype=torch.long)
        scores = torch.log_softmax(logits[[place for place, _ in known]].float() / self._temperature, dim=-1)
        self._hold("final/log_prob", scores[torch.arange(len(token)), token], rows="scored")

    def _write_part(self):
        part = f"part-{len(self._files):05d}.safetensors"
        file = os.path.join(self._unfinished, part)
        save_file(self._held, file)
        self._files[part], self._held = os.path.getsize(file), {}

    def close(self):
        """Removes the hooks and gives the folder its name."""
        for handle in self._handles:
            handle.remove()
        if self._logits:
            self._sets["logits"] = sorted(self._logits)
            logits = torch.stack([self._logits.pop(row) for row in self._sets["logits"]])
            self._hold("final/logits", logits, rows="logits")
            if self._log_probs:
                self._hold_log_probs(logits, self._sets["logits"])
        if self._held:
            self._write_part()
        config = getattr(self._model, "config", None)
        model = {"config": config.to_dict() if hasattr(config, "to_dict") else {}}
        if self._weights is not None:
            digest = hashlib.sha256(repr(sorted(self._weights.items())).encode()).hexdigest()[:16]
            model.update(weights=self._weights, weights_of="torch", hash=digest)
        header = {
            "format": "minite_jax trace", "version": 1, "engine": self._engine, "model": model,
            "sampling": {"temperature": self._temperature, "top_k": 0, "top_p": 1.0, "log_probs": "processed"},
            "rows": self._rows or {"token_ids": [], "positions": [], "sequences": []},
            "row_sets": self._sets,
            "tensors": dict(sorted(self._entries.items(), key=lambda item: _place(item[0]))), "files": self._files,
        }  # fmt: skip
        with open(os.path.join(self._unfinished, "trace.json"), "w") as file:
            json.dump(header, file, default=str)
        os.rename(self._unfinished, self._path)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            for handle in self._handles:
                handle.remove()


def _tensors_of(name, names):
    """Layer and tensors of a module, (None, None) if it is not known."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.(.*))?$", name)
    if match:
        return int(match[1]), names.get(f"layers.#.{match[2] or ''}".rstrip("."))
    return None, names.get(re.sub(r"^(.*\.)?model\.", "", name))


def _has_experts(model, name, layer):
    if layer is None:
        return False
    prefix = name[: re.search(r"(?:^|\.)layers\.\d+", name).end()]
    return any(each.startswith(f"{prefix}.mlp.experts") for each, _ in model.named_modules())


def _place(name):
    """Execution order."""
    match = re.match(r"layer\.(\d+)/(.*)$", name)
    if not match:
        outside = ("embed", "final/stream", "final/norm", "final/logits", "final/log_prob")
        return (-1 if name == "embed" else 1 << 30, outside.index(name) if name in outside else len(outside))
    return (int(match[1]), _ORDER.index(match[2]) if match[2] in _ORDER else len(_ORDER))


def _fingerprints(model):
    result = {}
    for name, weight in model.state_dict().items():
        raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        result[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]
    return result
