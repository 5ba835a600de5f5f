"""Mixers move information along T: one file per mechanism, all returning an ``Observation``."""

from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import Estimation, Mixer, MixerOptions, Observation
from recbft.mixers.pointwise import PointwiseAttention
from recbft.mixers.registry import MIXERS, MixerSpec, Place

__all__ = [
    "MIXERS", "Estimation", "Mixer", "MixerOptions", "MixerSpec", "Observation", "Place", "PointwiseAttention",
    "SoftmaxAttention",
]  # fmt: skip
