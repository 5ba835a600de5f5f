"""Belief in, belief out, as pure functions: observe, update, predict. Equations: docs/method.md."""

from recbft.core.belief import Belief, SequenceContext
from recbft.core.gain import gain_update, gate, kalman_update
from recbft.core.moments import scalar_log_precision, softmax_mean, softmax_moments
from recbft.core.observation_precision import (
    ESTIMATORS,
    Estimator,
    check_estimator,
    delta_precision,
    design_effect_precision,
    projected_precision,
    reml_naive_precision,
    reml_precision,
    sandwich_precision,
)
from recbft.core.prior import count_quantiles, empirical_bayes_precision, fit_pseudo_count, initial_scale
from recbft.core.process import (
    decay_precision,
    discount_precision,
    ffn_jacobian,
    gelu_slope,
    jacobian_factors,
    low_rank_jacobian,
    predict_precision,
    process_noise,
)
from recbft.core.readers import Readers, pick
from recbft.core.silu import silu_mean, silu_moments, silu_weights
from recbft.core.statistics import Moments, SiluMoments
from recbft.core.weights import (
    MAX_TOKENS,
    key_variance,
    per_dimension_weights,
    propagated_variance,
    weight_sums,
)
from recbft.kernels.softmax_moments.reference import effective_sample_size, residual_variance, softmax_weights

__all__ = [
    "ESTIMATORS",
    "MAX_TOKENS",
    "Belief",
    "Estimator",
    "Moments",
    "Readers",
    "SequenceContext",
    "SiluMoments",
    "check_estimator",
    "count_quantiles",
    "decay_precision",
    "delta_precision",
    "design_effect_precision",
    "discount_precision",
    "effective_sample_size",
    "empirical_bayes_precision",
    "ffn_jacobian",
    "fit_pseudo_count",
    "gain_update",
    "gate",
    "gelu_slope",
    "initial_scale",
    "jacobian_factors",
    "kalman_update",
    "key_variance",
    "low_rank_jacobian",
    "per_dimension_weights",
    "pick",
    "predict_precision",
    "process_noise",
    "projected_precision",
    "propagated_variance",
    "reml_naive_precision",
    "reml_precision",
    "residual_variance",
    "sandwich_precision",
    "scalar_log_precision",
    "silu_mean",
    "silu_moments",
    "silu_weights",
    "softmax_mean",
    "softmax_moments",
    "softmax_weights",
    "weight_sums",
]
