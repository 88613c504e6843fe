"""Scale rules: how the two levels of scales of an NVFP4 tensor are chosen from its numbers."""

import dataclasses

_BLOCKS = ((1, 16), (16, 16))


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """A named way to choose outer scales, block scales and codes. Hashable, so that it can be a static
    argument of `jax.jit`.

    Use the constructors `ScaleRule.fp8_exact` and `ScaleRule.te`.

    Attributes:
      family: "fp8_exact": this project's rule, comparisons and powers of two only, block scales from a set
        for which code x scale is itself an E4M3 number. "te": TransformerEngine's order of operations, to the
        bit, all E4M3 block scales.
      outer: "row": one outer scale per row. "matrix": one for the last two axes (per weight matrix, per
        expert).
      block: numbers that share a block scale: (1, 16) along a row, or a (16, 16) tile, whose transpose is the
        same numbers.
      four_over_six: None, or the error ("mae", "mse") by which a block chooses to send its largest number to
        4 or to 6. "te" only; "fp8_exact" always chooses, by absolute error.
      bound: largest block scale, 448 or, with `four_over_six`, 256 (so that a block that maps to 4 has room
        for a larger scale).
    """

    family: str
    outer: str = "row"
    block: tuple[int, int] = (1, 16)
    four_over_six: str | None = None
    bound: int = 448

    def __post_init__(self):
        if self.family not in ("fp8_exact", "te"):
            raise ValueError(f"family={self.family!r}: must be 'fp8_exact' or 'te'")
        if self.outer not in ("row", "matrix"):
            raise ValueError(f"outer={self.outer!r}: must be 'row' or 'matrix'")
        if self.block not in _BLOCKS:
            raise ValueError(f"block={self.block!r}: must be (1, 16) or (16, 16)")
        if self.block == (16, 16) and self.outer == "row":
            raise ValueError("block=(16, 16) shares scales between rows; use outer='matrix' with it")
        if self.four_over_six not in (None, "mae", "mse"):
            raise ValueError(f"four_over_six={self.four_over_six!r}: must be None, 'mae' or 'mse'")
        if self.bound not in (448, 256):
            raise ValueError(f"bound={self.bound!r}: must be 448 or 256")
        if self.family == "fp8_exact" and (self.four_over_six is not None or self.bound != 448):
            raise ValueError("four_over_six and bound belong to ScaleRule.te; fp8_exact has no such choice")
        if self.bound == 256 and self.four_over_six is None:
            raise ValueError("bound=256 needs four_over_six='mae' or 'mse'; without it leave bound at 448")

    @classmethod
    def fp8_exact(cls, outer: str = "row", block: tuple[int, int] = (1, 16)) -> "ScaleRule":
        """This project's rule, exact by construction (see `fp8_exact.py`)."""
        return cls("fp8_exact", outer, tuple(block))

    @classmethod
    def te(
        cls,
        outer: str = "matrix",
        block: tuple[int, int] = (1, 16),
        four_over_six: str | None = None,
        bound: int = 448,
    ) -> "ScaleRule":
        """TransformerEngine's rules (see `te.py`): plain, or "four over six"."""
        return cls("te", outer, tuple(block), four_over_six, bound)
