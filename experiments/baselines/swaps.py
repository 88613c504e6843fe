"""Our forward with the choices of `choices` swapped in, for `minite_jax.diagnostics.attribute`: parts are called
``attention@3``, the choice and the layer; ``head@out`` lies outside of the layers.
"""

import collections
from collections.abc import Callable

import jax
import numpy as np

from experiments.baselines import choices
from minite_jax.diagnostics.replay import replay
from minite_jax.model.policy import Policy, with_fp8_exact
from minite_jax.sampler.sampling import Rollouts
from pallas_kernels.log_prob import Truncation

_WEIGHTS = "weights"


class Swaps:
    """`attribute`'s `run` and `groups`: given completions, run with any choices in any layers.

    One program is compiled, with every choice both ways, and runs every combination. Weights are swapped layer by layer before it
    runs.

    Args:
      policy: the aligned policy.
      params: float32 masters; read if "weights" is among the choices.
      rollouts: tokens that the other engine sampled.
      truncation: of its sampling.
      names: of choices; those that cannot matter in this model and recipe are left out.
      run: what gives log-probs: `replay`, as a sampler runs the tokens, or another program, such as the learner's.
    """

    def __init__(
        self,
        policy: Policy,
        params: dict,
        rollouts: Rollouts,
        truncation: Truncation,
        names: list[str],
        run: Callable[[Policy, Rollouts, Truncation], jax.Array] = replay,
    ):
        config = policy.config
        names = choices.applicable(names, config, policy.recipe)
        self._layers = config.num_hidden_layers
        self._truncation, self._rollouts, self._config, self._run = truncation, rollouts, config, run
        self._names = [name for name in names if name != _WEIGHTS]
        self._policy = choices.switched_policy(policy, self._names)
        self._ours = self._theirs = self._policy.weights["layers"]
        if _WEIGHTS in names:
            # Two formats of weights would be two programs: both lose the mark of ours.
            self._policy = self._policy.replace(weights=with_fp8_exact(self._policy.weights, False))
            self._ours = self._policy.weights["layers"]
            self._theirs = with_fp8_exact(choices.their_weights(policy, params)["layers"], False)
        self.groups = {name: [self._part(name, i) for i in choices.places(name, config)] for name in names}

    def _part(self, name: str, layer: int) -> str:
        return f"{name}@{'out' if layer == self._layers else layer}"

    def __call__(self, parts: frozenset[str]) -> np.ndarray:
        """Log-probs, float32 and of the shape that `run` gives, with these parts swapped in."""
        on = collections.defaultdict(list)
        for part in parts:
            name, place = part.split("@")
            on[name].append(self._layers if place == "out" else int(place))
        theirs = set(on.pop(_WEIGHTS, ()))
        layers = [self._theirs[i] if i in theirs else self._ours[i] for i in range(self._layers)]
        policy = self._policy.replace(
            weights={**self._policy.weights, "layers": layers}, switches=choices.switches_of(self._names, self._config, on)
        )
        return np.asarray(self._run(policy, self._rollouts, self._truncation))
