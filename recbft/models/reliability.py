"""What a model makes of the reliability of events, a number beside each such as a rating or the time spent on it.

    x(u)   = (rank of u - 1) / (n - 1)             among the n training events that have one         (5.12)
    r(u)   = exp(4 tanh(a (F(x) - F(1/2)) / 4))    times the item's precision before the first layer (5.13)
    F(x)   = sum_k p_k clip(K x - k, 0, 1)         p = softmax(b), so that F rises from 0 to 1
    h_0   += sum_k max(0, 1 - |K x - k|) m_k       vectors of K + 1 quantiles                        (6.19)

r is monotone in u, upwards or downwards as the sign of a is learned, and 1 in the middle. a and all m_k start at 0, so
that a model begins as the one without. An event without a number has r = 1 and no vector. Ties share their middle rank;
between and beyond the values that were met in training, x is interpolated and held.

Shapes: B rows, T tokens, D model width, K steps, n events, G kept values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

STEPS = 8  # K
KEPT = 129  # G: all values where there are no more, else evenly spaced quantiles
LARGEST_LOG_FACTOR = 4.0  # 55 times more or less than without


class Quantiles(nn.Module):
    """Equation (5.12), fitted once and kept with the model."""

    value: Tensor
    quantile: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(KEPT))  # ascending, the last repeated where there are fewer
        self.register_buffer("quantile", torch.full((KEPT,), 0.5))

    def fit(self, values: NDArray[np.float64]) -> None:
        """Take the values of the training events, (n,), NaN where there is none."""
        known = np.sort(values[~np.isnan(values)])
        if not known.size:
            return
        distinct, first, count = np.unique(known, return_index=True, return_counts=True)
        middle = first + (count - 1) / 2  # from 0
        x = middle / (known.size - 1) if known.size > 1 else np.full(1, 0.5)
        # of many values those nearest to evenly spaced quantiles
        which = np.arange(KEPT) if len(x) <= KEPT else np.searchsorted(x, np.linspace(0, x[-1], KEPT))
        which = which.clip(max=len(x) - 1)
        self.value.copy_(torch.from_numpy(distinct[which]))
        self.quantile.copy_(torch.from_numpy(x[which]))

    def forward(self, values: Tensor) -> Tensor:
        """x of values without NaN, of any shape."""
        values = values.to(self.value.dtype)
        above = torch.searchsorted(self.value, values.contiguous()).clamp(1, KEPT - 1)
        low, high = self.value[above - 1], self.value[above]
        share = ((values - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)).clamp(0, 1)
        return torch.lerp(self.quantile[above - 1], self.quantile[above], share)


class ReliabilityPrecision(nn.Module):
    """Equation (5.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.quantiles = Quantiles()
        self.slope = nn.Parameter(torch.zeros(()))  # a
        self.step_logits = nn.Parameter(torch.zeros(STEPS))  # b

    def forward(self, values: Tensor) -> Tensor:
        """r of events, (B, T) with NaN where there is no number -> (B, T, 1)."""
        missing = values.isnan()
        x = self.quantiles(values.masked_fill(missing, 0.0))
        log_factor = self.slope * (self._risen(x) - self._risen(x.new_full((), 0.5)))
        bounded = LARGEST_LOG_FACTOR * torch.tanh(log_factor / LARGEST_LOG_FACTOR)  # never without a gradient
        factor: Tensor = bounded.masked_fill(missing, 0.0).exp()[..., None]
        return factor

    def _risen(self, x: Tensor) -> Tensor:
        """F."""
        steps = (STEPS * x[..., None] - torch.arange(STEPS, device=x.device)).clamp(0, 1)  # (.., K)
        return steps @ self.step_logits.softmax(dim=0)


class ReliabilityInput(nn.Module):
    """Equation (6.19)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.quantiles = Quantiles()
        self.vectors = nn.Parameter(torch.zeros(STEPS + 1, hidden_size))

    def forward(self, values: Tensor) -> Tensor:
        """What is added to tokens, (B, T) with NaN where there is no number -> (B, T, D)."""
        missing = values.isnan()
        x = self.quantiles(values.masked_fill(missing, 0.0))
        near = (STEPS * x[..., None] - torch.arange(STEPS + 1, device=x.device)).abs()  # (B, T, K + 1)
        added: Tensor = ((1 - near).clamp(min=0) * ~missing[..., None]) @ self.vectors
        return added
