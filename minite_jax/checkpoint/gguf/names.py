"""Which tensor of a GGUF file is which part of our parameter tree.

The tensors are those of Hugging Face's folders under other names, but for two things: a layer's experts are three tensors, gate,
up and down; and of architecture `llama` the rows of the query and key projections stand in another order (`rows_in_order`).
"""

import re

import numpy as np

from minite_jax.checkpoint.huggingface.names import Placement
from minite_jax.checkpoint.huggingface.names import placements as huggingface_placements
from minite_jax.model.config import ModelConfig

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TURNED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


def placements(config: ModelConfig) -> list[Placement]:
    """Every tensor of a model, in the order of the layers."""
    found: list[Placement] = []
    for each in huggingface_placements(config, fused_experts=True):
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", each.tensor)
        if layer is None:
            name, part = each.tensor.rsplit(".", 1)
            found.append(each._replace(tensor=f"{_WHOLE[name]}.{part}"))
            continue
        number, name = layer.groups()
        if name == "mlp.experts.gate_up_proj":
            E, F2, D = each.shape
            for what, row in (("gate", 0), ("up", F2 // 2)):
                found.append(Placement(f"blk.{number}.ffn_{what}_exps.weight", (E, F2 // 2, D), each.leaf, (0, row, 0)))
        elif name == "mlp.experts.down_proj":
            found.append(each._replace(tensor=f"blk.{number}.ffn_down_exps.weight"))
        else:
            name, part = name.rsplit(".", 1)
            found.append(each._replace(tensor=f"blk.{number}.{_IN_LAYER[name]}.{part}"))
    return found


def is_turned(tensor: str) -> bool:
    """Whether a `llama` file has this tensor's rows in llama.cpp's order."""
    return _TURNED.fullmatch(tensor) is not None


def rows_in_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a query or key projection, [heads * K, ...], as they stand in a `llama` file -> in our order.

    Rotary embedding turns pairs of rows. We, as Hugging Face, pair i with i + K/2; llama.cpp pairs neighbours there, and its
    conversion from Hugging Face reorders the rows of each head to fit: row 2 i + j of a file is row i + j K/2 of ours.
    """
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
