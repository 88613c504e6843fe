"""What the kernels are compared with: cuBLAS, PyTorch's grouped matmuls and flash attention, in the same process on the same GPU.

PyTorch is wanted here alone, and may be missing: then a peer is "not run". A peer that fails says why, and never ends the run.
Every peer's time is kept, since several cases are compared with the same one.

Let M be rows, N output features, K the summed axis.
"""

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.timing import Timing, enough_calls, sets_beyond_cache, time_torch
from minite_jax.optional import require


@dataclasses.dataclass(frozen=True)
class Measured:
    """A peer's time, or why there is none.

    Attributes:
      timing: None where it was not run or failed.
      failure: the reason of a failure, "" otherwise.
      held: bytes held beside inputs and results, where that was asked for.
      cycled: bytes of all sets that the calls went round; what is in the cache still was not read from memory.
    """

    timing: Timing | None = None
    failure: str = ""
    held: int | None = None
    cycled: float = math.inf


@dataclasses.dataclass(frozen=True)
class Peer:
    """An operation of another library at one shape. Hashable: equal peers are timed once.

    Attributes:
      name: a key of `_PEERS`.
      shape: arguments of the peer's builder there.
    """

    name: str
    shape: tuple

    def __str__(self) -> str:
        return f"{self.name}, {_words(self.shape)}"


class Peers:
    """PyTorch's side of the benchmark.

    Args:
      repeats: measurements of each peer.
      torch: the module; None means to import it, and to do without where it is not installed or has no GPU.
    """

    def __init__(self, repeats: int, torch: Any = None):
        self._repeats = repeats
        self._torch = torch if torch is not None else _import_torch()
        self.measured: dict[Peer, Measured] = {}

    @property
    def version(self) -> str:
        """PyTorch's version, or "not installed"."""
        return "not installed" if self._torch is None else str(self._torch.__version__)

    def time(self, peer: Peer, least_seconds: float | None = None) -> Measured:
        """Times a peer; a second question has the same answer. `least_seconds` as in `timing.enough_calls`."""
        if peer not in self.measured:
            self.measured[peer] = Measured() if self._torch is None else self._time(peer, least_seconds)
        return self.measured[peer]

    def _time(self, peer: Peer, least_seconds: float | None) -> Measured:
        torch, sets = self._torch, None
        try:
            make, *variants = _PEERS[peer.name](torch, *peer.shape)
            sets = [make()]
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sets[0])
            touched = nbytes * _touched(peer)
            count = sets_beyond_cache(touched, nbytes)
            calls = enough_calls(least_seconds, count)
            sets += [make() for _ in range(min(count, calls) - 1)]
            timings = [time_torch(torch, function, sets, repeats=self._repeats, calls=calls) for function in variants]
            return Measured(min(timings, key=lambda timing: timing.seconds), cycled=len(sets) * touched)
        except Exception as error:  # whatever somebody else's library may raise: the run goes on
            return Measured(failure=reason(error))
        finally:
            sets = None
            gc.collect()
            torch.cuda.empty_cache()


def _touched(peer: Peer) -> float:
    """The share of its inputs that a peer reads: a grouped matmul leaves out the experts that no row goes to."""
    sizes = peer.shape[0]
    return sum(size > 0 for size in sizes) / len(sizes) if isinstance(sizes, tuple) else 1.0


def reason(error: Exception) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"[:300]


def _import_torch() -> Any:
    try:
        torch = require("torch", "gpu")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _words(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(each, int) for each in value) and len(value) > 5:
        return f"{sum(value)} rows in {len(value)} groups of {min(value)} to {max(value)}"
    return " x ".join(_words(each) for each in value) if isinstance(value, tuple) else str(value)


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _fp8(torch: Any, *shape: int) -> Any:
    return _normal(torch, *shape).to(torch.float8_e4m3fn)


def _offsets(torch: Any, sizes: tuple[int, ...]) -> Any:
    return torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)


# Builders: (torch, *shape) -> a maker of one set of inputs, and the functions of which the fastest counts.
_Builder = Callable[..., tuple[Callable, ...]]


def _copy(torch, nbytes):
    def make():
        return tuple(torch.randint(0, 256, (nbytes,), device="cuda", dtype=torch.uint8) for _ in range(2))

    return make, lambda source, target: target.copy_(source)


def _read(torch, nbytes):
    return lambda: (torch.randn(nbytes // 4, device="cuda"),), lambda x: x.sum(), lambda x: x.max()


def _dense(torch, M, N, K):
    return lambda: (_normal(torch, M, K), _normal(torch, N, K)), lambda x, w: x @ w.t()


def _dense_dgrad(torch, M, N, K):
    return lambda: (_normal(torch, M, N), _normal(torch, N, K)), lambda g, w: g @ w


def _dense_wgrad(torch, M, N, K):
    return lambda: (_normal(torch, M, N), _normal(torch, M, K)), lambda g, x: g.t() @ x


def _dense_fp8(torch, M, N, K):
    one = torch.ones((), device="cuda")

    def run(x, w):
        return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return lambda: (_fp8(torch, M, K), _fp8(torch, N, K)), run


def _grouped(torch, sizes, N, K):
    offsets = _offsets(torch, sizes)

    def make():
        return _normal(torch, sum(sizes), K), _normal(torch, len(sizes), N, K)

    return make, lambda x, w: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets)


def _grouped_dgrad(torch, sizes, N, K):
    offsets = _offsets(torch, sizes)

    def make():
        return _normal(torch, sum(sizes), N), _normal(torch, len(sizes), N, K)

    return make, lambda g, w: torch._grouped_mm(g, w, offs=offsets)


def _grouped_wgrad(torch, sizes, N, K):
    offsets = _offsets(torch, sizes)

    def make():
        return _normal(torch, sum(sizes), N), _normal(torch, sum(sizes), K)

    return make, lambda g, x: torch._grouped_mm(g.t(), x, offs=offsets)


def _grouped_fp8(torch, sizes, N, K):
    offsets = _offsets(torch, sizes)
    scale_x = torch.ones(sum(sizes), device="cuda")
    scale_w = torch.ones(len(sizes), N, device="cuda")

    def run(x, w):
        return torch._scaled_grouped_mm(
            x, w.transpose(-2, -1), scale_x, scale_w, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return lambda: (_fp8(torch, sum(sizes), K), _fp8(torch, len(sizes), N, K)), run


def _expert_mlp(torch, tokens, top_k, sizes, D, F):
    """Gather, gate and up, SwiGLU, down, combine: each step as PyTorch's fastest operation, the combine in two ways."""
    offsets, rows = _offsets(torch, sizes), sum(sizes)

    def make():
        slot = torch.randperm(rows, device="cuda")
        order = torch.argsort(slot)
        weights = torch.softmax(torch.randn(tokens, top_k, device="cuda"), dim=-1)
        w_in, w_out = _normal(torch, len(sizes), 2 * F, D), _normal(torch, len(sizes), D, F)
        return _normal(torch, tokens, D), w_in, w_out, order // top_k, slot, weights

    def experts(x, w_in, w_out, token, slot):
        gate_up = torch._grouped_mm(x.index_select(0, token), w_in.transpose(-2, -1), offs=offsets)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        out = torch._grouped_mm(inner, w_out.transpose(-2, -1), offs=offsets)
        return out.index_select(0, slot).view(tokens, top_k, D)

    def combine_as_product(x, w_in, w_out, token, slot, weights):
        return torch.bmm(weights.to(torch.bfloat16)[:, None], experts(x, w_in, w_out, token, slot))

    def combine_as_sum(x, w_in, w_out, token, slot, weights):
        return (experts(x, w_in, w_out, token, slot) * weights[..., None]).sum(1).to(torch.bfloat16)

    return make, combine_as_product, combine_as_sum


def _flash(torch: Any, is_causal: bool) -> Callable:
    """PyTorch's flash attention of [B, H, T, K], heads shared as the shapes say."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    return run


def _sdpa_causal(torch, B, T, H, N, K):
    return lambda: tuple(_normal(torch, B, heads, T, K) for heads in (H, N, N)), _flash(torch, True)


def _sdpa_gradients(torch, B, T, H, N, K):
    flash = _flash(torch, True)

    def make():
        q, k, v = (_normal(torch, B, heads, T, K).requires_grad_() for heads in (H, N, N))
        return _normal(torch, B, H, T, K), q, k, v

    def run(g, q, k, v):
        with torch.enable_grad():  # the timer says that none are wanted
            return torch.autograd.grad(flash(q, k, v), (q, k, v), g)

    return make, run


def _sdpa_decode(torch, B, T, H, N, K):
    return lambda: tuple(_normal(torch, B, *rest) for rest in ((H, 1, K), (N, T, K), (N, T, K))), _flash(torch, False)


COPY, READ = "device copy", "read alone (sum, max)"
CUBLAS_BF16, CUBLAS_FP8 = "cuBLAS bf16", "cuBLAS fp8"
GROUPED_BF16, GROUPED_FP8 = "torch._grouped_mm bf16", "torch._scaled_grouped_mm fp8"
CUBLAS_DGRAD, CUBLAS_WGRAD = "cuBLAS bf16 dgrad", "cuBLAS bf16 wgrad"
GROUPED_DGRAD, GROUPED_WGRAD = "torch._grouped_mm bf16 dgrad", "torch._grouped_mm bf16 wgrad"
EXPERT_MLP = "expert MLP in PyTorch, bf16"
SDPA_CAUSAL, SDPA_GRADIENTS = "flash attention in PyTorch, causal", "flash attention in PyTorch, causal, with gradients"
SDPA_DECODE = "flash attention in PyTorch, one token"
_PEERS: dict[str, _Builder] = {
    COPY: _copy,
    READ: _read,
    CUBLAS_BF16: _dense,
    CUBLAS_FP8: _dense_fp8,
    CUBLAS_DGRAD: _dense_dgrad,
    CUBLAS_WGRAD: _dense_wgrad,
    GROUPED_BF16: _grouped,
    GROUPED_FP8: _grouped_fp8,
    GROUPED_DGRAD: _grouped_dgrad,
    GROUPED_WGRAD: _grouped_wgrad,
    EXPERT_MLP: _expert_mlp,
    SDPA_CAUSAL: _sdpa_causal,
    SDPA_GRADIENTS: _sdpa_gradients,
    SDPA_DECODE: _sdpa_decode,
}
