"""What a memory filter takes and gives, and a warning where rounding has cost a covariance its positive definiteness.

Shapes: B rows, H heads, T tokens, K key width, M value width.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from recbft.autograd.transforms import transformed

TOLERATED = 1e-3  # of the observation noise: below this a negative variance moves no gain by more


class MemoryState(NamedTuple):
    """The belief about a memory: N(mean, I (x) covariance), every column of values with the same covariance."""

    mean: Tensor  # (..., K, M)
    covariance: Tensor  # (..., K, K), symmetric


class MemoryEvent(NamedTuple):
    """One token: what is written, what is read, and how the memory moves and is seen."""

    query: Tensor  # (..., K)
    key: Tensor  # (..., K)
    value: Tensor  # (..., M)
    transition: Tensor | None  # (..., K) in (0, 1]; complex (..., K / 2) for damped rotations of pairs; None keeps all
    process_noise: Tensor  # (...), the variance added to every row, of pairs to their first row; >= 0
    observation_noise: Tensor  # (...), the variance of a value about what its key reads; > 0


class MemoryReading(NamedTuple):
    """What one token reads after its own write."""

    readout: Tensor  # (..., M)
    readout_variance: Tensor  # (...), q' P q
    gain: Tensor  # (...), share of the innovation taken up at the key, in [0, 1)


class MemoryTrace(NamedTuple):
    """What every token of every history reads, and the belief after the last column."""

    readout: Tensor  # (B, H, T, M)
    readout_variance: Tensor  # (B, H, T), q' P q
    gain: Tensor  # (B, H, T), beta k' u, the share of the innovation taken up at the key, in [0, 1)
    mean: Tensor  # (B, H, K, M)
    covariance: Tensor  # (B, H, K, K)


class UnfilteredTrace(NamedTuple):
    """The same of a memory without a covariance; with noise by column, variance and gain are by column too."""

    readout: Tensor  # (B, H, T, M)
    readout_variance: Tensor | None  # (B, H, T) or (B, H, T, M); None by the additive rule
    gain: Tensor  # (B, H, T) or (B, H, T, M)
    mean: Tensor  # (B, H, K, M)


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
