"""Belief in, belief out, as pure functions: observe, update, predict. Equations: docs/method.md."""

from recbft.core.belief import Belief, SequenceContext
from recbft.core.moments import scalar_log_precision, softmax_mean, softmax_moments
from recbft.core.observation import projected_precision, reml_naive_precision, reml_precision, sandwich_precision
from recbft.core.prior import count_quantiles, initial_scale
from recbft.core.process import (
    ffn_jacobian,
    gelu_slope,
    jacobian_factors,
    low_rank_jacobian,
    predict_precision,
    process_noise,
)
from recbft.core.silu import silu_moments
from recbft.core.statistics import Moments, SiluMoments
from recbft.core.update import kalman_update

__all__ = [
    "Belief",
    "Moments",
    "SequenceContext",
    "SiluMoments",
    "count_quantiles",
    "ffn_jacobian",
    "gelu_slope",
    "initial_scale",
    "jacobian_factors",
    "kalman_update",
    "low_rank_jacobian",
    "predict_precision",
    "process_noise",
    "projected_precision",
    "reml_naive_precision",
    "reml_precision",
    "sandwich_precision",
    "scalar_log_precision",
    "silu_moments",
    "softmax_mean",
    "softmax_moments",
]
