"""REML, sandwich precision, Kalman update and prediction with analytic backwards: a third of autograd's passes, or one.

The functions and their meaning are those of ``recbft.core``, which is the reference, and which runs beyond one
gradient of torch.func.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from recbft import core
from recbft.autograd.eager import eagerly
from recbft.autograd.full_precision import in_full_precision
from recbft.autograd.transforms import beyond_first_gradients
from recbft.core import Belief, SiluMoments
from recbft.kernels import compiled as in_c
from recbft.kernels import dispatch
from recbft.kernels.filter_step import analytic, compiled, sandwich
from recbft.kernels.filter_step.fused import Fused, prediction_is_plain, update_is_plain


@eagerly
@in_full_precision
def reml_precision(
    residual_variance: Tensor, effective_sample_size: Tensor, *, prior_scale: float, prior_dof: float, cap: float
) -> Tensor:
    """``core.reml_precision``."""
    reml = core.reml_precision if beyond_first_gradients() else analytic.reml_precision
    return reml(residual_variance, effective_sample_size, prior_scale=prior_scale, prior_dof=prior_dof, cap=cap)


@eagerly
@in_full_precision
def kalman_update(belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float) -> Belief:
    """The belief of ``core.kalman_update``."""
    if beyond_first_gradients():
        return core.kalman_update(belief, innovation, observation_precision, ramp=ramp)[0]
    path = _path(innovation, update_is_plain(belief, innovation, observation_precision))
    updated: Belief = path.kalman_update(belief, innovation, observation_precision, ramp=ramp)
    return updated


@eagerly
@in_full_precision
def predict_precision(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    """``core.predict_precision`` kept at ``low`` or above."""
    if beyond_first_gradients():
        return core.predict_precision(precision, jacobian, process_noise, cap=cap).clamp(min=low)
    path = _path(precision, prediction_is_plain(precision, jacobian, process_noise))
    predicted: Tensor = path.predict_precision(precision, jacobian, process_noise, low=low, cap=cap)
    return predicted


def predict_by_logits(
    precision: Tensor, jacobian: Tensor, logits: Tensor, *, q_max: float, low: float, cap: float
) -> Tensor:
    """``predict_precision`` with ``core.process_noise(logits, q_max)``, logits of each coordinate."""
    each = logits.shape == precision.shape[-1:]
    if each and dispatch.fuses_steps(precision) and prediction_is_plain(precision, jacobian, logits):
        passes = import_module("recbft.kernels.filter_step.triton").LearnedNoise(q_max)
        return Fused(passes).predict_precision(precision, jacobian, logits, low=low, cap=cap)
    return predict_precision(precision, jacobian, core.process_noise(logits, q_max), low=low, cap=cap)


@eagerly
@in_full_precision
def sandwich_precision(moments: SiluMoments, *, cap: float, centre: str) -> Tensor:
    """``core.sandwich_precision``."""
    if not beyond_first_gradients() and sandwich.serves(moments):
        return sandwich.sandwich_precision(moments, cap=cap, centre=centre)
    return core.sandwich_precision(moments, cap=cap, centre=centre)


def _path(x: Tensor, plain: bool) -> Any:
    """What serves operands like ``x``; ``plain``: whether they are what a pass over memory takes."""
    if plain and in_c.serves(x):
        return Fused(compiled)
    if plain and dispatch.serves_steps(x):
        return Fused(import_module("recbft.kernels.filter_step.triton"))
    return analytic
