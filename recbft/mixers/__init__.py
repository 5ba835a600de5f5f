"""Mixers move information along T: one file per mechanism, all returning an ``Observation``."""

from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import Observation
from recbft.mixers.pointwise import PointwiseAttention
from recbft.mixers.registry import MIXERS, MixerSpec, NoOptions, Place

__all__ = ["MIXERS", "MixerSpec", "NoOptions", "Observation", "Place", "PointwiseAttention", "SoftmaxAttention"]
