"""REML, sandwich precision, Kalman update and prediction with analytic backwards: a third of autograd's passes, or one.

The functions and their meaning are those of ``recbft.core``, which is the reference; on other devices than the CPU
and beyond one gradient of torch.func it is also what runs.
"""

from __future__ import annotations

from torch import Tensor

from recbft import core
from recbft.core import Belief, SiluMoments
from recbft.kernels.filter_step import compiled, cpu, sandwich
from recbft.kernels.full_precision import in_full_precision
from recbft.kernels.transforms import beyond_first_gradients


@in_full_precision
def reml_precision(
    residual_variance: Tensor, effective_sample_size: Tensor, *, prior_scale: float, prior_dof: float, cap: float
) -> Tensor:
    """``core.reml_precision``."""
    if _by_the_core(residual_variance):
        return core.reml_precision(
            residual_variance, effective_sample_size, prior_scale=prior_scale, prior_dof=prior_dof, cap=cap
        )
    return cpu.reml_precision(
        residual_variance, effective_sample_size, prior_scale=prior_scale, prior_dof=prior_dof, cap=cap
    )


@in_full_precision
def kalman_update(belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float) -> Belief:
    """The belief of ``core.kalman_update``."""
    if _by_the_core(innovation):
        return core.kalman_update(belief, innovation, observation_precision, ramp=ramp)[0]
    if compiled.serves_update(belief, innovation, observation_precision):
        return compiled.kalman_update(belief, innovation, observation_precision, ramp=ramp)
    return cpu.kalman_update(belief, innovation, observation_precision, ramp=ramp)


@in_full_precision
def predict_precision(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    """``core.predict_precision`` kept at ``low`` or above."""
    if _by_the_core(precision):
        return core.predict_precision(precision, jacobian, process_noise, cap=cap).clamp(min=low)
    if compiled.serves_prediction(precision, jacobian, process_noise):
        return compiled.predict_precision(precision, jacobian, process_noise, low=low, cap=cap)
    return cpu.predict_precision(precision, jacobian, process_noise, low=low, cap=cap)


@in_full_precision
def sandwich_precision(moments: SiluMoments, *, cap: float, centre: str) -> Tensor:
    """``core.sandwich_precision``."""
    if not _by_the_core(moments.mean) and sandwich.serves(moments):
        return sandwich.sandwich_precision(moments, cap=cap, centre=centre)
    return core.sandwich_precision(moments, cap=cap, centre=centre)


def _by_the_core(x: Tensor) -> bool:
    return x.device.type != "cpu" or beyond_first_gradients()
