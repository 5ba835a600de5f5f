"""Update rules: what share of the innovation a position takes up, and what its precision becomes.

    kalman     gain = r / (lam + r)             needs the mixer's observation precision r            (3.1)
    residual   gain = 1                         the plain residual connection                        (3.3)
    gate       gain = sigmoid(W x + b)          learned per head or per coordinate: gated attention  (3.4)
    fixed      gain = constant                                                                       (3.5)

All start from the plain residual connection at ramp 0 and add r to the precision where the mixer gives one. In (3.4) W
starts at 0 and b where the gain is K0, so that the rules can be compared from one starting point.

Source: Precision Tracked Transformer (arXiv 2605.18832), equation 3 and section 4.2; Qiu et al. (arXiv 2505.06708).
Shapes: B rows, T tokens, D model width, H heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recbft.core import ESTIMATORS, Belief, gain_update, gate
from recbft.errors import UserError
from recbft.kernels.filter_step import kalman_update
from recbft.mixers import MIXERS, Observation
from recbft.models.precision_channel import CoreConfig


class Updated(NamedTuple):
    """The belief after an update, and the share of the innovation that it took up."""

    mean: Tensor  # (B, T, D)
    precision: Tensor  # (B, T, D)
    gain: Tensor  # (B, T, D)


class KalmanUpdate(nn.Module):
    """Equation (3.1)."""

    def forward(self, belief: Belief, observation: Observation, x: Tensor, ramp: float) -> Updated:
        """Belief before, what the mixer saw (innovation after dropout), the normalised belief it read, the warm-up."""
        if observation.precision is None:  # the block has asked the mixer
            raise UserError("the mixer says that it gives a precision, and returned None in its place; return one")
        after, gain = kalman_update(belief, observation.innovation, observation.precision, ramp=ramp)
        return Updated(*after, gain)


class FixedUpdate(nn.Module):
    """Equations (3.5) and, with gain 1, (3.3)."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, belief: Belief, observation: Observation, x: Tensor, ramp: float) -> Updated:
        """As ``KalmanUpdate``."""
        after, gain = gain_update(belief, observation.innovation, self.gain, observation.precision, ramp=ramp)
        return Updated(*after, gain)


class GateUpdate(nn.Module):
    """Equation (3.4); ``num_gains``, the rows of W, is H for a gain per head, D for one per coordinate."""

    def __init__(self, hidden_size: int, num_gains: int, *, initial_gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_gains, hidden_size))
        self.offset = nn.Parameter(torch.full((num_gains,), math.log(initial_gain / (1 - initial_gain))))

    def forward(self, belief: Belief, observation: Observation, x: Tensor, ramp: float) -> Updated:
        """As ``KalmanUpdate``."""
        gain = gate(x, self.weight, self.offset)
        after, gain = gain_update(belief, observation.innovation, gain, observation.precision, ramp=ramp)
        return Updated(*after, gain)


def make_update(core: CoreConfig, *, hidden_size: int, n_heads: int) -> nn.Module:
    """The update rule that ``core.update`` names."""
    if core.update == "gate":
        num_gains = n_heads if core.gate == "headwise" else hidden_size
        return GateUpdate(hidden_size, num_gains, initial_gain=core.initial_gain)
    if core.update == "kalman":
        return KalmanUpdate()
    return FixedUpdate(core.fixed_gain if core.update == "fixed" else 1.0)


def without_precision(mixer: str) -> UserError:
    """What is said of the Kalman update over such a mixer."""
    kinds = {kind: [name for name, spec in MIXERS.items() if spec.precision == kind] for kind in (*ESTIMATORS, "own")}
    giving = [f"{', '.join(kinds[kind])} (estimator {', '.join(ESTIMATORS[kind])})" for kind in ESTIMATORS]
    return UserError(
        f"update 'kalman' needs an observation precision, and {mixer} gives none as it is set up; "
        f"choose update residual, gate or fixed, or a mixer that has one: {'; '.join(giving)}; "
        f"{', '.join(kinds['own'])} (of their own)"
    )
