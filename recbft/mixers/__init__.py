"""Mixers move information along T: one file per mechanism, all returning an ``Observation``."""

from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.observation import Observation
from recbft.mixers.pointwise import PointwiseAttention

MIXERS = {"attention": SoftmaxAttention, "pointwise": PointwiseAttention}

__all__ = ["MIXERS", "Observation", "PointwiseAttention", "SoftmaxAttention"]
