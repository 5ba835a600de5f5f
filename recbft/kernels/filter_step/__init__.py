"""Precision of an observation, Kalman update and prediction, with gradients written by hand.

Equations (2.8), (2.10), (3.1), (3.2) and (4.3); the references are ``core.reml_precision_ref``,
``core.sandwich_precision_ref``, ``core.kalman_update_ref`` and ``core.predict_precision_ref``.

Shapes: B rows, H heads, T tokens, K head width, D model width.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, float32

from recbft import core
from recbft.autograd.boundaries import eagerly, in_full_precision
from recbft.core import Belief, SiluMoments
from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose, late, triton_of
from recbft.kernels.filter_step import c
from recbft.kernels.filter_step import torch as by_torch


@eagerly
@in_full_precision
def reml_precision(
    residual_variance: Tensor,
    effective_sample_size: Tensor,
    *,
    prior_scale: float,
    prior_dof: float,
    cap: float,
    impl: str = "auto",
) -> Tensor:
    """Equation (2.8); arguments as those of ``core.reml_precision_ref``."""
    path = choose(impl, REML, residual_variance)
    prior = {"prior_scale": prior_scale, "prior_dof": prior_dof, "cap": cap}
    precision: Tensor = path(residual_variance, effective_sample_size, **prior)
    return precision


@eagerly
@in_full_precision
def sandwich_precision(moments: SiluMoments, *, cap: float, centre: str = "root", impl: str = "auto") -> Tensor:
    """Equation (2.10); arguments as those of ``core.sandwich_precision_ref``."""
    precision: Tensor = choose(impl, SANDWICH, moments.mean, moments=moments)(moments, cap=cap, centre=centre)
    return precision


@eagerly
@in_full_precision
def kalman_update(
    belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float = 1.0, impl: str = "auto"
) -> tuple[Belief, Tensor]:
    """Equations (3.1) and (3.2): the belief after, and the gain, which is a constant for gradients.

    Arguments as those of ``core.kalman_update_ref``.
    """
    path = choose(impl, UPDATE, innovation, operands=(*belief, observation_precision))
    after, gain = path(belief, innovation, observation_precision, ramp=ramp)
    return after, gain


@eagerly
@in_full_precision
def predict_precision(
    precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float, impl: str = "auto"
) -> Tensor:
    """Equation (4.3) kept at ``low`` or above; arguments as those of ``core.predict_precision_ref``."""
    path = choose(impl, PREDICTION, precision, jacobian=jacobian, noise=process_noise)
    predicted: Tensor = path(precision, jacobian, process_noise, low=low, cap=cap)
    return predicted


def _predict_ref(precision: Tensor, jacobian: Tensor, process_noise: Tensor, *, low: float, cap: float) -> Tensor:
    return core.predict_precision_ref(precision, jacobian, process_noise, cap=cap).clamp(min=low)


def _decline_update(innovation: Tensor, *, operands: tuple[Tensor, ...]) -> str | None:
    """One pass over memory takes operands that do not broadcast."""
    return None if _alike(innovation, *operands) else "needs float32 operands of one shape on one device"


def _decline_prediction(precision: Tensor, *, jacobian: Tensor, noise: Tensor) -> str | None:
    """One pass over memory takes the Jacobian of each token, or a constant that all tokens share."""
    shared = _each_shares(jacobian, precision) and not jacobian.requires_grad
    operands = (precision,) if shared else (precision, jacobian)
    if _each_shares(noise, precision) and _alike(*operands):
        return None
    return "needs float32, a Jacobian of each token or a constant one, and a noise that all tokens share"


def _decline_prediction_in_c(precision: Tensor, *, jacobian: Tensor, noise: Tensor) -> str | None:
    return _decline_prediction(precision, jacobian=jacobian, noise=noise) or c_library.missing()


def _each_shares(x: Tensor, like: Tensor) -> bool:
    return x.dtype == float32 and x.shape in ((), like.shape[-1:])


def _alike(first: Tensor, *others: Tensor) -> bool:
    return first.dtype == float32 and all(
        x.shape == first.shape and x.dtype == first.dtype and x.device == first.device for x in others
    )


REML = {
    "torch": Path(lambda: by_torch.reml_precision, opened=True),
    "reference": Path(lambda: core.reml_precision_ref),
}
SANDWICH = {
    "c": Path(lambda: c.sandwich_precision, "cpu", c.decline_sandwich, opened=True),
    "reference": Path(lambda: core.sandwich_precision_ref),
}
UPDATE = {
    "triton": Path(late("filter_step", "kalman_update"), "cuda", _decline_update, opened=True),
    "torch": Path(lambda: by_torch.kalman_update, opened=True),
    "reference": Path(lambda: core.kalman_update_ref),
}
PREDICTION = {
    "triton": Path(
        lambda: partial(by_torch.predict_by, triton_of("filter_step")), "cuda", _decline_prediction, opened=True
    ),
    "c": Path(lambda: partial(by_torch.predict_by, c), "cpu", _decline_prediction_in_c, opened=True),
    "torch": Path(lambda: by_torch.predict_precision, opened=True),
    "reference": Path(lambda: _predict_ref),
}
