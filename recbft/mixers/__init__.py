"""Mixers move information along T: one file per mechanism, all returning an ``Observation``."""

from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.observation import Observation

MIXERS = {"attention": SoftmaxAttention}

__all__ = ["MIXERS", "Observation", "SoftmaxAttention"]
