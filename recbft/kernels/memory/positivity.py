"""Loss of positive definiteness of a covariance, which rounding can cause: counted and reported, never hidden."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from recbft.autograd.transforms import transformed

TOLERATED = 1e-3  # of the observation noise: below this a negative variance moves no gain by more


def check_positive(readout_variance: Tensor, gain: Tensor, observation_noise: Tensor) -> None:
    """Warn where a variance that cannot be negative is: q' P q, or k' Pb k as the gain shows it; not under torch.func.

    Args:
        readout_variance, gain, observation_noise: of every token, alike in shape.
    """
    if transformed():
        return
    margin = readout_variance.detach() / observation_noise.detach()
    lost = (margin < -TOLERATED) | (gain.detach() < -TOLERATED)
    if bool(lost.any()):
        predicted = gain.detach() / (1 - gain.detach())  # k' Pb k over the noise
        worst = torch.minimum(margin, predicted)[lost]
        told = worst[worst.isfinite()]
        report_loss(int(lost.sum()), lost.numel(), told.min().item() if told.numel() else -math.inf)


def report_loss(count: int, total: int, worst: float) -> None:
    """Warn of ``count`` steps with a negative variance, the worst of them in units of the observation noise."""
    warnings.warn(
        f"the covariance of a memory lost positive definiteness at {count:,} of {total:,} steps (worst variance "
        f"{worst:.3g} times the observation noise); raise the process or observation noise, or use float64",
        RuntimeWarning,
        stacklevel=3,
    )
