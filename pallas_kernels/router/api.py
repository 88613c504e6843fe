"""MoE router. Let M be tokens, D the model width, E experts, k experts per token."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.matmul.reference import dot_nk
from pallas_kernels.router import reference


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
      Weights [M, k] float32 in falling order and expert numbers [M, k] int32. The gradient flows through the weights, with the
      choice of experts held fixed.

    Raises:
      ValueError: more experts per token than experts.
    """
    if not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"router: top_k={top_k} must lie between 1 and the number of experts, {weight.shape[0]}")
    dispatch.resolve("router", implementation)
    return _router(top_k, normalize, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _router(top_k, normalize, x_MD, weight_ED):
    return reference.router(x_MD, weight_ED, top_k=top_k, normalize=normalize)


def _forward(top_k, normalize, x_MD, weight_ED):
    weights_Mk, experts_Mk = _router(top_k, normalize, x_MD, weight_ED)
    return (weights_Mk, experts_Mk), (x_MD, weight_ED, experts_Mk)


def _backward(top_k, normalize, residuals, gradients):
    x_MD, weight_ED, experts_Mk = residuals

    def weights_given_choice(x_MD, weight_ED):
        probs_ME = jax.nn.softmax(dot_nk(x_MD.astype(jnp.float32), weight_ED), axis=-1)
        chosen_Mk = jnp.take_along_axis(probs_ME, experts_Mk, axis=-1)
        return chosen_Mk / jnp.sum(chosen_Mk, axis=-1, keepdims=True) if normalize else chosen_Mk

    _, vjp = jax.vjp(weights_given_choice, x_MD, weight_ED)
    return vjp(gradients[0])


_router.defvjp(_forward, _backward)
