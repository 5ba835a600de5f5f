"""The residual connection as a Kalman update: how much of the innovation a position takes up.

    gain = r / (lam + r)        h' = h + gain * e        lam' = lam + r                          (1)
    warm-up: gain <- 1 - w (1 - gain);  w = 0 is the plain residual connection                   (2)

per coordinate, r the observation precision and w the ramp.

Source: Precision Tracked Transformer (arXiv 2605.18832), equation 3; Kalman (1960) in information form.
Shapes: B rows, T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recbft.core.belief import Belief


def kalman_update(
    belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float | Tensor = 1.0
) -> tuple[Belief, Tensor]:
    """Merge a belief with an observation.

    Args:
        belief: mean and precision before, each (B, T, D), precision > 0.
        innovation: e, the observation relative to the belief, (B, T, D).
        observation_precision: r, (B, T, D), >= 0; zero leaves the belief alone.
        ramp: w of (2), in [0, 1].

    Returns:
        The belief after, and the gain, (B, T, D), in [0, 1].
    """
    precision = belief.precision + observation_precision
    gain = observation_precision / precision  # (1)
    if not (isinstance(ramp, float) and ramp == 1.0):
        gain = 1 - ramp * (1 - gain)  # (2)
    return Belief(torch.addcmul(belief.mean, gain, innovation), precision), gain
