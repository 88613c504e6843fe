"""Decoding with the one forward."""

from minite_jax.sampler.requests import SamplingParams
from minite_jax.sampler.sampling import FINISH_LENGTH, FINISH_STOP, Rollouts, sample, stream

__all__ = ["FINISH_LENGTH", "FINISH_STOP", "Rollouts", "SamplingParams", "sample", "stream"]
