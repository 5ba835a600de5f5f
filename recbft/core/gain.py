"""The residual connection as a Kalman update: how much of the innovation a position takes up.

    gain = r / (lam + r)        h' = h + gain * e        lam' = lam + r                          (1)
    warm-up: gain <- 1 - w (1 - gain);  w = 0 is the plain residual connection                   (2)
    other gains:  residual 1,  fixed a constant,  gate sigmoid(W x + b)                          (3)

per coordinate, r the observation precision, w the ramp and x the normalised belief that the mixer read. With a gain of
(3) precision is still lam' = lam + r, and stays lam where the mixer estimates none.

Source: Precision Tracked Transformer (arXiv 2605.18832), equation 3 and section 4.2; Kalman (1960) in information form;
gate: Qiu et al., Gated Attention for Large Language Models (arXiv 2505.06708).
Shapes: B rows, T tokens, D model width, H heads, K = D / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def gain_update(
    belief: Belief,
    innovation: Tensor,
    gain: Tensor | float,
    observation_precision: Tensor | None = None,
    *,
    ramp: float | Tensor = 1.0,
) -> Belief:
    """Take up a share of the innovation that is not derived from precision: (3).

    Args:
        belief: mean and precision before, each (B, T, D).
        innovation: e, (B, T, D).
        gain: in [0, 1], broadcastable to (B, T, D); 1 is the residual connection.
        observation_precision: r, (B, T, D), or None where there is no estimate.
        ramp: w of (2), in [0, 1].
    """
    precision = belief.precision if observation_precision is None else belief.precision + observation_precision
    if isinstance(gain, float) and gain == 1.0:
        return Belief(belief.mean + innovation, precision)
    share = 1 - ramp * (1 - gain)  # (2)
    # A number is written where it is wanted: a GPU is waited for to copy one there, and a graph of its work holds none.
    share = share.to(innovation) if isinstance(share, Tensor) else innovation.new_full((), share)
    return Belief(torch.addcmul(belief.mean, share, innovation), precision)


def gate(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The learned gain of (3): sigmoid(W x + b).

    Args:
        x: (B, T, D).
        weight: W, (D, D) for a gain per coordinate, (H, D) for one per head, repeated over its K coordinates.
    """
    gain = torch.sigmoid(F.linear(x, weight, bias))
    return gain.repeat_interleave(x.shape[-1] // weight.shape[0], dim=-1)
