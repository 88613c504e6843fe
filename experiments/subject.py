"""The model that a study of engines looks at: a finished run's, or one of a real model's width with random weights.

    --checkpoint=runs/quickstart                               # a finished run, asked held-out problems
    --random_model=qwen3_30b_a3b --random_layers=2             # random weights, asked random tokens
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from absl import flags

import minite_jax as mt
from experiments import cli
from experiments.evaluation import held_out_prompts
from experiments.training import finished_run
from minite_jax import model as models
from minite_jax.errors import UserError
from minite_jax.sampler import SamplingParams

_MODELS = ("qwen3_30b_a3b", "qwen3_8b", "qwen3_0_6b", "tiny_moe", "tiny_dense")
_CHECKPOINT = cli.checkpoint_flag()
_RECIPE = cli.recipe_flag()
_MODEL = flags.DEFINE_enum("random_model", None, _MODELS, "In place of --checkpoint: random weights in this model's width.")
_LAYERS = flags.DEFINE_integer("random_layers", 2, "Layers of the random model.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("random_tokens", 64, "Tokens of an answer of the random model.", lower_bound=1)
_PROMPT = 8  # random tokens that it is asked


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is looked at.

    Attributes:
      params: float32 masters.
      policy: aligned, of these.
      prompts: token ids.
      sampling: how they are answered.
      key: of the sampling.
      about: one sentence for the notes of a table.
    """

    params: dict
    policy: mt.Policy
    prompts: list[list[int]]
    sampling: SamplingParams
    key: jax.Array
    about: str


def subject(prompts: int, samples: int | None = None) -> Subject:
    """The model that the flags name.

    Args:
      prompts: how many.
      samples: answers to each prompt; None: as the run had it, 1 of a random model.

    Raises:
      UserError: the flags name no model, or two.
    """
    if (_CHECKPOINT.value is None) == (_MODEL.value is None):
        raise UserError("which model? give --checkpoint=WORKDIR of a finished run or --random_model=NAME, and not both")
    if _CHECKPOINT.value is not None:
        run = finished_run(Path(_CHECKPOINT.value))
        setup, params = run.setup, run.state.train.params
        recipe = mt.recipe(_RECIPE.value) if _RECIPE.value else setup.recipe
        sampling = dataclasses.replace(setup.sampling, n=samples or setup.sampling.n)
        asked, key = held_out_prompts(setup, prompts), jax.random.key(run.config.seed)
        config, about = setup.model, f"a trained model (task {run.config.task.name}), held-out problems"
    else:
        config = getattr(models, _MODEL.value)(num_hidden_layers=_LAYERS.value)
        recipe, key = mt.recipe(_RECIPE.value or "nvfp4"), jax.random.key(0)
        params = models.init_params(config, key)
        asked = np.random.default_rng(0).integers(0, config.vocab_size, (prompts, _PROMPT)).tolist()
        sampling = SamplingParams(n=samples or 1, max_tokens=_TOKENS.value)
        about = (
            f"random weights in the shape of {_MODEL.value}, {_LAYERS.value} layers, prompts of {_PROMPT} random tokens. "
            "A random model's distributions are flat, which a trained one's are not: compare gaps with each other, not with a "
            "trained model's"
        )
    policy = mt.prepare(params, config, recipe)
    about = f"The subject: {about}. {mt.num_params(config):,} parameters, recipe {recipe.name}"
    return Subject(params, policy, asked, sampling, key, about)
