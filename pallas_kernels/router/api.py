"""MoE router. Let M be tokens, D the model width, E experts, k experts per token."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.router import reference


@dispatch.replaceable
def router(
    x: Float[Array, "M D"], weight: Float[Array, "E D"], *, top_k: int, normalize: bool, implementation: str | None = None
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Chooses each token's experts: float32 logits, softmax over all experts, the k largest, ties to the lower index.

    Args:
      x: [M, D] bfloat16 or float32.
      weight: [E, D] float32; the product is float32 throughout (bfloat16 logits tie where float32 ones do not).
      top_k: experts per token, at most E.
      normalize: whether the k weights are divided by their sum (Qwen3's `norm_topk_prob`).
      implementation: see `pallas_kernels.dispatch.resolve`.

    Returns:
      Weights [M, k] float32 in falling order and expert numbers [M, k] int32. A logit that is NaN, whatever its sign, counts as
      the largest and makes the token's weights NaN. The gradient flows through the weights, with the choice of experts held
      fixed.

    Raises:
      ValueError: more experts per token than experts.
    """
    if not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"router: top_k={top_k} must lie between 1 and the number of experts, {weight.shape[0]}")
    return _router(dispatch.resolve("router", implementation), top_k, normalize, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _router(implementation, top_k, normalize, x_MD, weight_ED):
    return dispatch.module(__package__, implementation).router(x_MD, weight_ED, top_k=top_k, normalize=normalize)


def _forward(implementation, top_k, normalize, x_MD, weight_ED):
    weights_Mk, experts_Mk = _router(implementation, top_k, normalize, x_MD, weight_ED)
    return (weights_Mk, experts_Mk), (x_MD, weight_ED, weights_Mk, experts_Mk)


def _backward(implementation, top_k, normalize, residuals, gradients):
    del implementation  # single operations and dots that add in a fixed order: there is nothing for a kernel to keep apart
    return reference.router_backward(*residuals, gradients[0], normalize=normalize)


_router.defvjp(_forward, _backward)
