"""The one jitted update: log-probs, loss, gradients, optimiser step, and the new packed weights.

    state, policy, metrics = update(state, policy, batch)

The forward inside the gradient is `minite_jax.model.scored_tokens` on the policy that sampled, with the float32 masters
attached to receive the gradients. The weights are quantised once, at the end, outside the gradient; the sampler uses that same
policy.
"""

import dataclasses
from collections.abc import Callable
from typing import no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minite_jax.diagnostics.gap import gap_metrics
from minite_jax.model.forward import scored_tokens
from minite_jax.model.policy import Policy, pack
from pallas_kernels.log_prob import Truncation

_LARGEST_FLOAT32 = float(jnp.finfo(jnp.float32).max)


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class TrainState:
    """What training carries from step to step, and a checkpoint holds.

    Attributes:
      step: [] int32, updates done.
      params: float32 master weights.
      opt_state: optax state.
    """

    step: Int[Array, ""]
    params: dict
    opt_state: optax.OptState


@flax.struct.dataclass
@no_type_check  # jax rebuilds pytrees with stand-ins for arrays
class Batch:
    """One update's data. Column t of the [B, T-1] arrays belongs to token t + 1.

    Attributes:
      tokens: [B, T] int32, padded behind each sequence.
      mask: [B, T-1] bool, the tokens that are trained on. What other columns hold is never read: not even a NaN gets through.
      sampler_log_probs: [B, T-1] float32 nats, as the sampler gave them; None in supervised training.
      advantages: [B] float32; None in supervised training.
    """

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T1"]
    sampler_log_probs: Float[Array, "B T1"] | None = None
    advantages: Float[Array, "B"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and an optional cosine, after clipping by the global norm.

    Attributes:
      learning_rate: peak.
      warmup_steps: linear from 0.
      decay_steps: total steps of the cosine, warm-up included; 0: constant after the warm-up.
      final_fraction: of the peak, at the end of the cosine.
      b1, b2, eps, weight_decay: AdamW.
      max_grad_norm: clip the global norm; 0: no clipping.

    Raises:
      ValueError: a value out of range.
    """

    learning_rate: float
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self):
        # Comparisons that a NaN fails. Above float32's largest number a rate would become infinity on the device.
        for name in ("learning_rate", "eps", "weight_decay", "final_fraction"):
            if not 0.0 <= (value := getattr(self, name)) <= _LARGEST_FLOAT32:
                raise ValueError(f"{name}={value} must be 0 or a positive finite float32")
        for name in ("b1", "b2"):
            if not 0.0 <= (value := getattr(self, name)) < 1.0:
                raise ValueError(f"{name}={value} must lie in [0, 1)")
        if not self.max_grad_norm >= 0.0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be positive, or 0 for no clipping")
        for name in ("warmup_steps", "decay_steps"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name}={value} must be at least 0")


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by step."""
    if config.decay_steps:
        return optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup_steps, config.decay_steps, config.learning_rate * config.final_fraction
        )
    if config.warmup_steps:
        return optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.constant_schedule(config.learning_rate)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax chain of an `OptimizerConfig`. The first update counts as step 1, so that a warm-up does not begin with rate
    0.
    """
    rate = schedule(config)
    adamw = optax.adamw(
        lambda count: rate(count + 1), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    # Always a chain of the same shape, so that the states of two phases of one run are restored by one template.
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm or float("inf")), adamw)


def init_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first update."""
    return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))


def _check_shapes(batch: Batch) -> None:
    """Broadcasting would turn some wrong shapes into a wrong loss without a word."""
    if batch.tokens.ndim != 2:
        raise ValueError(f"batch.tokens has shape {batch.tokens.shape}; the update wants [B, T]")
    rows, slots = batch.tokens.shape
    wanted = dict(
        mask=("[B, T-1]", (rows, slots - 1)), sampler_log_probs=("[B, T-1]", (rows, slots - 1)), advantages=("[B]", (rows,))
    )
    for name, (axes, shape) in wanted.items():
        field = getattr(batch, name)
        if not (field is None and name != "mask") and jnp.shape(field) != shape:
            raise ValueError(f"batch.{name} has shape {jnp.shape(field)}; the update wants {axes} = {shape}")
    if batch.mask.dtype != bool:
        raise ValueError(f"batch.mask is {batch.mask.dtype}; the update wants bool")


def _all_finite(tree) -> Bool[Array, ""]:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


LossFunction = Callable[[Float[Array, "B T1"], Batch], Float[Array, "B T1"]]


def make_update(
    optimizer: optax.GradientTransformation,
    loss_fn: LossFunction,
    *,
    truncation: Truncation = Truncation(),  # noqa: B008
    micro_batches: int = 1,
    remat: bool = False,
):
    """Builds the jitted update.

    Args:
      optimizer: see `make_optimizer`.
      loss_fn: ``(log_probs [B, T-1], batch) -> loss per token [B, T-1]``. It sees log-probs of 0, its own and the sampler's,
        where the mask is False.
      truncation: the sampler's convention of log-probs.
      micro_batches: the batch is cut into this many equal parts, whose gradients are added in order.
      remat: recompute each layer in the backward.

    Returns:
      ``update(state, policy, batch) -> (state, policy, metrics)``. Metrics are float32 scalars: loss (mean over the masked
      tokens of the whole batch), entropy, grad_norm (before clipping), update_applied (0 where the mask is empty or the
      gradient or a new weight not finite: weights, optimiser state and policy are then unchanged) and, where the batch has
      sampler log-probs, those of `gap_metrics`. The state's buffers are donated. Raises a ValueError where a shape of the batch
      or of the loss is not the documented one.
    """

    def micro_loss(params, policy, batch, num_tokens):
        log_probs_BT, entropy_BT = scored_tokens(policy.with_masters(params), batch.tokens, truncation, remat=remat)
        masked = lambda x_BT: jnp.where(batch.mask, x_BT, 0.0)  # noqa: E731
        # Masked before and after: behind the second mask alone, the gradient of an infinite loss is 0 * inf = NaN.
        seen = batch if batch.sampler_log_probs is None else batch.replace(sampler_log_probs=masked(batch.sampler_log_probs))
        loss_BT = loss_fn(masked(log_probs_BT), seen)
        if jnp.shape(loss_BT) != log_probs_BT.shape:
            raise ValueError(f"loss_fn returned shape {jnp.shape(loss_BT)}; the update wants [B, T-1] = {log_probs_BT.shape}")
        loss = jnp.sum(masked(loss_BT)) / num_tokens
        return loss, (log_probs_BT, jnp.sum(masked(lax.stop_gradient(entropy_BT))))

    def gradients(params, policy, batch, num_tokens):
        value_and_grad = jax.value_and_grad(micro_loss, has_aux=True)
        if micro_batches == 1:
            (loss, (log_probs_BT, entropy)), grads = value_and_grad(params, policy, batch, num_tokens)
            return loss, log_probs_BT, entropy, grads

        def body(carry, micro):
            (loss, (log_probs_BT, entropy)), grads = value_and_grad(params, policy, micro, num_tokens)
            return jax.tree.map(jnp.add, carry, (loss, entropy, grads)), log_probs_BT

        size = batch.tokens.shape[0]
        if size % micro_batches:
            raise ValueError(f"a batch of {size} rows cannot be cut into micro_batches={micro_batches} equal parts")
        micros = jax.tree.map(lambda x: x.reshape(micro_batches, size // micro_batches, *x.shape[1:]), batch)
        zero = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, entropy, grads), log_probs = lax.scan(body, zero, micros)
        return loss, log_probs.reshape(size, -1), entropy, grads

    def update(state: TrainState, policy: Policy, batch: Batch):
        _check_shapes(batch)
        num_tokens = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)
        loss, log_probs_BT, entropy, grads = gradients(state.params, policy, batch, num_tokens)
        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(grads)
            steps, opt_state = optimizer.update(grads, state.opt_state, state.params)
            new_params = optax.apply_updates(state.params, steps)
            applied = jnp.any(batch.mask) & jnp.isfinite(grad_norm) & _all_finite(new_params)
            keep = lambda new, old: jnp.where(applied, new, old)  # noqa: E731
            params = jax.tree.map(keep, new_params, state.params)
            opt_state = jax.tree.map(keep, opt_state, state.opt_state)
        new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        metrics = dict(loss=loss, entropy=entropy / num_tokens, grad_norm=grad_norm, update_applied=applied.astype(jnp.float32))
        if batch.sampler_log_probs is not None:
            metrics |= gap_metrics(log_probs_BT, batch.sampler_log_probs, batch.mask)
        return new_state, pack(params, policy.config, policy.recipe), metrics

    return jax.jit(update, donate_argnums=(0,))
