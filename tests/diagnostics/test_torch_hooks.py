"""The writer for PyTorch, on modules that are named, called and shaped as those of vLLM and SGLang: norms take what is to be
added and the stream and return both, rows are flat, projections are fused, and logits are computed for a few rows at a time.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from minite_jax.diagnostics import compare
from minite_jax.diagnostics import trace_file as files

torch = pytest.importorskip("torch")
nn = torch.nn
_PATH = Path(files.__file__).parent / "writers/torch_hooks.py"
_D, _HEADS, _KV_HEADS, _K, _F, _V, _E, _TOP = 8, 2, 1, 4, 6, 11, 4, 2
_PROMPTS = [[1, 2, 3, 4], [5, 6], [1, 2, 3]]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("torch_hooks", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Norm(nn.Module):
    """Adds in place, as the fused kernel does, so that a hook which keeps no copy would see later values."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x, residual=None):
        if residual is not None:
            residual += x
        total = x if residual is None else residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (x.copy_(normed), residual)


class _Linear(nn.Linear):
    """Returns (output, bias), as parallel layers do."""

    def forward(self, x):
        return super().forward(x), None


class _Rotary(nn.Module):
    def forward(self, positions, q, k):
        angle = positions[:, None].float()
        q.mul_(torch.cos(angle)), k.mul_(torch.cos(angle))  # in place, as the kernel
        return q, k


class _Attn(nn.Module):
    def forward(self, q, k, v, *batch):
        return q + (k + v).repeat(1, _HEADS)


class _Attention(nn.Module):
    def __init__(self, flat_heads, qk_norm):
        super().__init__()
        self.qkv_proj = _Linear(_D, (_HEADS + 2 * _KV_HEADS) * _K)
        self.o_proj = _Linear(_HEADS * _K, _D, bias=False)
        self.rotary_emb, self.attn, self.flat_heads = _Rotary(), _Attn(), flat_heads
        if qk_norm:
            self.q_norm, self.k_norm = _Norm(_K), _Norm(_K)

    def forward(self, positions, hidden_states):
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([_HEADS * _K, _KV_HEADS * _K, _KV_HEADS * _K], dim=-1)
        if hasattr(self, "q_norm"):
            by_head = (-1, _K) if self.flat_heads else (*q.shape[:-1], -1, _K)
            q, k = self.q_norm(q.reshape(by_head)).view(q.shape), self.k_norm(k.reshape(by_head)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class _Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = _Linear(_D, 2 * _F, bias=False), _Linear(_F, _D, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)[0]


class _Experts(nn.Module):
    """All experts in one module; keywords, as vLLM calls it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(_E, _D, _D) / 4)

    def forward(self, hidden_states, router_logits):
        if isinstance(router_logits, tuple):
            weights, chosen = router_logits
        else:
            weights, chosen = torch.softmax(router_logits, -1).topk(_TOP)
        return torch.einsum("tk,tkde,te->td", weights, self.w[chosen], hidden_states)


class _TopK(nn.Module):
    def forward(self, hidden_states, router_logits):
        return tuple(torch.softmax(router_logits, -1).topk(_TOP))


class _Moe(nn.Module):
    def __init__(self, topk):
        super().__init__()
        self.gate, self.experts = _Linear(_D, _E, bias=False), _Experts()
        if topk:
            self.topk = _TopK()

    def forward(self, x):
        logits, _ = self.gate(x)
        return self.experts(hidden_states=x, router_logits=self.topk(x, logits) if hasattr(self, "topk") else logits)


class _Layer(nn.Module):
    def __init__(self, moe, sglang, qk_norm):
        super().__init__()
        self.self_attn, self.mlp = _Attention(sglang, qk_norm), _Moe(sglang) if moe else _Mlp()
        self.input_layernorm, self.post_attention_layernorm = _Norm(_D), _Norm(_D)

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden.clone(), self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class _Model(nn.Module):
    def __init__(self, sglang, qk_norm):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(_V, _D), _Norm(_D)
        self.layers = nn.ModuleList([_Layer(moe, sglang, qk_norm) for moe in (False, True)])

    def forward(self, input_ids, positions):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class _LogitsProcessor(nn.Module):
    def forward(self, lm_head, hidden_states, embedding_bias=None):
        return hidden_states @ lm_head.weight.T


class _Engine(nn.Module):
    def __init__(self, sglang=False, qk_norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = _Model(sglang, qk_norm), nn.Linear(_D, _V, bias=False)
        self.logits_processor = _LogitsProcessor()
        self.requires_grad_(False)

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)

    def generate(self, prompts, starts=None):
        """A batch as vLLM runs it: one forward, logits of each prompt's last token, then of the prompts, one by one."""
        starts = starts or [0] * len(prompts)
        positions = [start + i for start, prompt in zip(starts, prompts, strict=True) for i in range(len(prompt))]
        hidden = self(input_ids=torch.tensor(sum(prompts, [])), positions=torch.tensor(positions))
        ends = np.cumsum([len(prompt) for prompt in prompts])
        self.compute_logits(hidden[torch.tensor(ends) - 1])
        for prompt, end in zip(prompts, ends, strict=True):
            self.compute_logits(hidden[end - len(prompt) : end - 1])
        return hidden


def _names(layer, moe, *, qk_norm=True, topk=False):
    norms = ["q_norm", "k_norm"] * qk_norm
    names = ["input", *(f"attention/{x}" for x in ("norm", "qkv", *norms, "q", "k", "heads", "o", "stream"))]
    chosen = ["moe/router/experts", "moe/router/weights"] * topk
    dense = [f"mlp/{x}" for x in ("norm", "gate_up", "gated", "down")]
    names += ["moe/norm", "moe/router/logits", *chosen, "moe/out"] if moe else dense
    return [f"layer.{layer}/{name}" for name in names]


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_modules_of_vllm(tmp_path, hooks, qk_norm):
    engine = _Engine(qk_norm=qk_norm)
    with hooks.TraceHooks(engine, tmp_path / "t", names=hooks.VLLM, engine={"name": "vllm"}):
        hidden = engine.generate(_PROMPTS)
    trace = files.open_trace(tmp_path / "t")
    inside = _names(0, False, qk_norm=qk_norm) + _names(1, True, qk_norm=qk_norm)
    assert trace.names == ["embed", *inside, "final/stream", "final/norm", "final/logits", "final/log_prob"]
    assert trace.rows.token_ids.tolist() == sum(_PROMPTS, [])
    assert trace.rows.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert trace.rows.sequences.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]

    # Row by row: those of equal bits (two prompts begin alike) must have gone to rows of their own.
    expected = engine.compute_logits(hidden)
    logits, rows = trace.read("final/logits")
    assert rows.tolist() == list(range(9))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)  # a product of another number of rows
    log_prob, rows = trace.read("final/log_prob")
    assert rows.tolist() == [0, 1, 2, 4, 6, 7]
    next_ids = [2, 3, 4, 6, 2, 3]
    wanted = torch.log_softmax(expected, -1)[rows.tolist(), next_ids]
    np.testing.assert_allclose(log_prob, wanted, rtol=1e-5, atol=1e-6)

    # What later kernels write over was kept as it was.
    read = lambda name: torch.tensor(np.array(trace.read(name)[0]))  # noqa: E731
    stream, added = read("layer.0/input"), read("layer.0/attention/o")
    assert torch.equal(stream, read("embed")) and torch.equal(stream + added, read("layer.0/attention/stream"))
    assert torch.equal(read("layer.1/input"), read("layer.0/attention/stream") + read("layer.0/mlp/down"))
    qkv = engine.model.layers[0].self_attn.qkv_proj(read("layer.0/attention/norm"))[0]
    np.testing.assert_allclose(read("layer.0/attention/qkv"), qkv, rtol=1e-5, atol=1e-6)
    assert not torch.equal(read("layer.0/attention/q"), read("layer.0/attention/qkv")[:, : _HEADS * _K])


def test_modules_of_sglang(tmp_path, hooks):
    """The model's own call tells the rows, norms of heads see a row for each head, and the router's choice is a module."""
    engine = _Engine(sglang=True)
    with hooks.TraceHooks(engine, tmp_path / "t", names=hooks.SGLANG, engine={"name": "sglang"}):
        engine.model(torch.tensor([1, 2, 5]), torch.tensor([0, 1, 0]))
    trace = files.open_trace(tmp_path / "t")
    assert trace.names == ["embed", *_names(0, False), *_names(1, True, topk=True), "final/stream", "final/norm"]
    assert trace.read("layer.0/attention/q_norm")[0].shape == (3, _HEADS * _K)
    weights, _ = trace.read("layer.1/moe/router/weights")
    assert (np.diff(weights, axis=1) <= 0).all() and trace.read("layer.1/moe/router/experts")[0].dtype == np.int64


def test_two_engines_of_one_model_are_compared(tmp_path, hooks):
    """One engine norms heads a row for each; a weight of layer 1 is another's."""
    one, other = _Engine(), _Engine(sglang=True)
    other.load_state_dict(one.state_dict())
    other.model.layers[1].self_attn.o_proj.weight.mul_(2)
    for name, engine, names in (("a", one, hooks.VLLM), ("b", other, hooks.SGLANG)):
        with hooks.TraceHooks(engine, tmp_path / name, names=names, engine={"name": name}):
            engine.generate(_PROMPTS)
    result = compare.compare(files.open_trace(tmp_path / "a"), files.open_trace(tmp_path / "b"))
    assert result.location.name == "layer.1/attention/o"


@pytest.mark.parametrize(
    ("starts", "message"),
    [([0, 3, 0], "token 4 of the batch has position 3: not whole prompts"), (None, "came twice: a trace holds one forward")],
    ids=["cached prefix", "second step"],
)
def test_what_is_no_whole_prompt_is_refused(tmp_path, hooks, starts, message):
    engine = _Engine()
    trace = hooks.TraceHooks(engine, tmp_path / "t", names=hooks.VLLM)
    with pytest.raises(ValueError, match=message), trace:
        for _ in range(2):
            engine.generate(_PROMPTS, starts)
    assert not (tmp_path / "t").exists()
