"""What attention reports beside its mean."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Statistics of row-normalised attention weights; zeros where a token may read nothing."""

    mean: Tensor  # (B, H, T, K)  e, the weighted mean of the values
    residual_variance: Tensor  # (B, H, T, K)  S, the weighted variance of the values, >= 0
    effective_sample_size: Tensor  # (B, H, T)  n, Kish's 1 / sum a^2, between 1 and the number of keys


class SiluMoments(NamedTuple):
    """Sums over weights a of any kind, SiLU's above all; zeros where a token may read nothing."""

    mean: Tensor  # (B, H, T, K)  sum a v, the innovation
    weight_sum: Tensor  # (B, H, T)  sum a
    square_sum: Tensor  # (B, H, T)  sum a^2
    square_mean: Tensor  # (B, H, T, K)  sum a^2 v
    square_second: Tensor  # (B, H, T, K)  sum a^2 v^2
