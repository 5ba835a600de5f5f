"""Belief in, belief out, as pure functions: observe, update, predict. Equations: docs/method.md.

Where ``recbft.kernels`` has a faster form, the function here ends in ``_ref``: it is the reference, and the public call
of the operation is the one of ``kernels``.
"""

from recbft.core.belief import Belief, Moments, Readers, SiluMoments, pick
from recbft.core.belief import SequenceContext as SequenceContext  # for who checks a mixer of their own with mypy
from recbft.core.filter_step import (
    decay_precision,
    discount_precision,
    ffn_jacobian,
    gain_update,
    gate,
    gated_jacobian,
    gelu_slope,
    jacobian_factors,
    kalman_update_ref,
    mean_over_tokens,
    predict_precision_ref,
    process_noise,
    remember,
)
from recbft.core.moments import (
    MAX_TOKENS,
    effective_sample_size,
    key_variance,
    per_dimension_weights,
    propagated_variance,
    ramped,
    residual_variance,
    scalar_log_precision,
    softmax_mean_ref,
    softmax_moments_ref,
    softmax_weights,
    squares_variance,
    weight_sums,
)
from recbft.core.observation_precision import (
    ESTIMATORS,
    Estimator,
    check_estimator,
    delta_precision,
    design_effect_precision,
    projected_precision,
    reml_naive_precision,
    reml_precision_ref,
    sandwich_precision_ref,
)
from recbft.core.prior import count_quantiles, empirical_bayes_precision, fit_pseudo_count, initial_scale
from recbft.core.silu import look_up, silu_mean_ref, silu_moments_ref, silu_weights
