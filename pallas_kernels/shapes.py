"""Named shapes of real models: the same list serves tests, benchmark and tuning.

    for shape in shapes.QWEN3_8B.dense(): ...           # qkv, o, gate_up, down, lm_head
    for shape in shapes.QWEN3_30B_A3B.grouped(): ...    # the experts' gate_up and down

Let M be rows (tokens), N output features, K the summed axis, E experts, k experts per token. Sources: config.json of
Qwen/Qwen3-30B-A3B, Qwen/Qwen3-8B, Qwen/Qwen3-0.6B and meta-llama/Llama-3.2-1B; configs/quickstart.py.
"""

import dataclasses

# Rows that a learner's matmul sees at once, those of its experts (8192 tokens x 8), and tokens decoded at once.
LEARNER_ROWS = (8192, 16384, 65536)
DECODE_ROWS = (1, 16, 64)

# NVFP4: half a byte for a code, an E4M3 byte for a block of 16 of them.
PACKED_BYTES = 0.5 + 1 / 16


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense projection, ``[M, depth] x [features, depth]^T``.

    Attributes:
      model: name of the model, "odd" for none.
      name: which projection.
      features: N.
      depth: K.
    """

    model: str
    name: str
    features: int
    depth: int

    def flops(self, rows: int) -> int:
        """Multiplications and additions of one product."""
        return 2 * rows * self.features * self.depth

    def packed_bytes(self) -> int:
        """Size of the weights as NVFP4, outer scale not counted."""
        return round(self.features * self.depth * PACKED_BYTES)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A matmul of sorted rows, each group with its own matrix: ``[M, depth] x [experts, features, depth]^T``.

    Attributes:
      model: name of the model, "odd" for none.
      name: which projection.
      experts: E.
      top_k: k; M tokens give M k rows.
      features: N.
      depth: K.
    """

    model: str
    name: str
    experts: int
    top_k: int
    features: int
    depth: int

    def flops(self, rows: int) -> int:
        """Multiplications and additions of one product over `rows` rows, however they are grouped."""
        return 2 * rows * self.features * self.depth

    def packed_bytes(self, experts_hit: int | None = None) -> int:
        """Size as NVFP4 of the weights of so many experts (None: all), outer scales not counted."""
        hit = self.experts if experts_hit is None else experts_hit
        return round(hit * self.features * self.depth * PACKED_BYTES)


@dataclasses.dataclass(frozen=True)
class Model:
    """What determines the shapes of a Qwen3 or Llama model's operations.

    Attributes:
      name: as people call it.
      hidden: D.
      heads: query heads.
      kv_heads: key/value heads.
      head_dim: width of a head.
      vocabulary: rows of lm_head.
      inner: inner width of a dense MLP, or of an expert.
      experts: E, 0 for a dense model.
      top_k: k, 0 for a dense model.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    inner: int
    experts: int = 0
    top_k: int = 0

    def dense(self) -> tuple[Dense, ...]:
        """Every dense projection; q, k, v are one matrix, and so are gate and up."""
        attention = self.heads * self.head_dim
        found = [
            Dense(self.name, "qkv", attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            Dense(self.name, "o", self.hidden, attention),
        ]
        if not self.experts:
            found += [
                Dense(self.name, "gate_up", 2 * self.inner, self.hidden),
                Dense(self.name, "down", self.hidden, self.inner),
            ]
        return (*found, Dense(self.name, "lm_head", self.vocabulary, self.hidden))

    def grouped(self) -> tuple[Grouped, ...]:
        """The experts' projections; none for a dense model."""
        if not self.experts:
            return ()
        return (
            Grouped(self.name, "gate_up", self.experts, self.top_k, 2 * self.inner, self.hidden),
            Grouped(self.name, "down", self.experts, self.top_k, self.hidden, self.inner),
        )

    def projection(self, name: str) -> Dense:
        """The dense projection of that name.

        Raises:
          ValueError: the model has none.
        """
        for shape in self.dense():
            if shape.name == name:
                return shape
        raise ValueError(f"{self.name} has no dense projection {name!r}: choose from {', '.join(s.name for s in self.dense())}")

    def quantized_widths(self) -> tuple[int, ...]:
        """Widths of the rows that are quantised: inputs of the projections, widest last."""
        return tuple(sorted({s.depth for s in (*self.dense(), *self.grouped()) if s.name != "lm_head"}))

    def norm_widths(self) -> tuple[int, ...]:
        """Widths of the rows that are normalised: the residual stream, and the heads of q and k."""
        return (self.head_dim, self.hidden)


QWEN3_30B_A3B = Model("Qwen3-30B-A3B", 2048, 32, 4, 128, 151936, 768, experts=128, top_k=8)
QWEN3_8B = Model("Qwen3-8B", 4096, 32, 8, 128, 151936, 12288)
QWEN3_0_6B = Model("Qwen3-0.6B", 1024, 16, 8, 128, 151936, 3072)
LLAMA_3_2_1B = Model("Llama-3.2-1B", 2048, 32, 8, 64, 128256, 8192)
QUICKSTART = Model("quickstart", 64, 4, 2, 16, 256, 64, experts=8, top_k=2)
MODELS = (QWEN3_30B_A3B, QWEN3_8B, QWEN3_0_6B, QUICKSTART)

# What no model has and a kernel must still get right: few features, an odd number of them, short and uneven depths.
ODD_DENSE = (
    Dense("odd", "one feature", 1, 16),
    Dense("odd", "shortest depth", 33, 16),
    Dense("odd", "five blocks deep", 127, 80),
    Dense("odd", "nine blocks deep", 1000, 144),
    Dense("odd", "odd features", 2049, 768),
)
ODD_GROUPED = (
    Grouped("odd", "one expert", 1, 1, 33, 80),
    Grouped("odd", "seven experts", 7, 3, 129, 144),
)
ODD_ROWS = (1, 2, 7, 16, 17, 64, 127, 128, 129, 130, 4096)


def group_sizes(rows: int, experts: int, kind: str) -> tuple[int, ...]:
    """Rows of each expert, with sum `rows`, the same in every process.

    Args:
      rows: M.
      experts: E.
      kind: "equal": as equal as it gets. "skewed": Zipf's law over seven eighths of the experts in a scrambled order, the others
        empty, so that one expert has many times the mean.

    Raises:
      ValueError: another kind.
    """
    if kind == "equal":
        weights = [1.0] * experts
    elif kind == "skewed":
        busy = max(1, experts - experts // 8)
        weights = [0.0] * experts
        # 37 is prime to every count of experts in use, so this visits each expert once.
        step = 37 if experts % 37 else 1
        for rank in range(busy):
            weights[rank * step % experts] = 1 / (rank + 1)
    else:
        raise ValueError(f"group sizes {kind!r}: must be 'equal' or 'skewed'")
    total = sum(weights)
    sizes = [int(rows * weight / total) for weight in weights]
    # Rounding down leaves fewer rows than there are experts in use: one more for as many of the first.
    missing = rows - sum(sizes)
    for i in [i for i, weight in enumerate(weights) if weight][:missing]:
        sizes[i] += 1
    return tuple(sizes)
