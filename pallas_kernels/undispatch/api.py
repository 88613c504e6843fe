"""The transpose of MoE dispatch. Let M be tokens, k the experts per token, D the model width."""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch


def undispatch(
    rows: Float[Array, "Mk D"], slot: Int[Array, "M k"], *, out_dtype=None, implementation: str | None = None
) -> Float[Array, "M D"]:
    """Computes ``sum_r rows[slot[:, r]]`` in float32, added in rank order, rounded once: no scatter, no atomics.

    Dispatch copies a token to its k experts; this brings the copies' gradients home. It has no gradient of its own.

    Args:
      rows: [M k, D] bfloat16 or float32, one row per assignment.
      slot: [M, k] int32, the row of each token's r-th expert.
      out_dtype: type of the result, bfloat16 or float32; None: that of `rows`.
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      [M, D].

    Raises:
      TypeError: a type that is not one of these two.
      ValueError: the number of rows is not M k.
    """
    if rows.shape[0] != slot.size:
        raise ValueError(
            f"undispatch: rows {tuple(rows.shape)} must be one for each of the {slot.size} places in slot {tuple(slot.shape)}"
        )
    out_dtype = rows.dtype if out_dtype is None else out_dtype
    chosen = dispatch.resolve("undispatch", implementation)
    return dispatch.module(__package__, chosen).undispatch(rows, slot, out_dtype=out_dtype)
