"""How the scores read the precision of the state after the last layer: ``core.read_out``.

    z_d     = log lam_d - running mean of log lam_d
    state_d = exp(w a mean_d z_d) h_d                                               temperature    (6.18)
    state_d = (1 - w + w k_d) h_d,   k_d = (1 + nu) / (1 + nu exp(-z_d))            shrinkage

h is the state of (6.2), w the warm-up and lam_d / exp(running mean) = exp(z_d) the precision in units of what is usual
for its coordinate, so that neither form depends on the scale of precision. Both leave a state of usual precision alone.

``temperature`` multiplies all products with item vectors by one number: it changes what a list's probabilities are and
not, but for what is scored beside the state, its order. a is learned and starts at 0; above 0 a precise state is a sure
one. ``shrinkage`` is the posterior mean of a coordinate whose prior has mean 0 and nu times the usual precision,
lam / (lam + nu usual) h, times 1 + nu: an imprecise coordinate counts less than others, and the order changes.

Both are products of a state and item vectors: what is exported, indexed or calibrated needs to know nothing of them.
MacKay's l_i / sqrt(1 + (pi/8) sum_d e_id^2 / lam_d), the logit averaged over a Gaussian state, has a denominator of its
own for every pair of state and item, and is no such product. Biases of items and (6.16) are no part of the state and
stay as they are.

The running mean is over the real training positions of earlier batches (momentum 0.9), 0 before the first. It follows
the level of precision with a delay, so that moving the level would scale all logits alike, and far faster than any
other parameter does: models overfitted by that. So what the level of a batch has to do with the loss has no gradient:
that of log lam is less its mean over the batch's real positions, and that of a has z_d less its mean there. And a and
nu learn at the rate of the backbone, not at that of precision: a hundred times as fast, a made sure of what training
had memorised, histories of rare items, and cost ranking a tenth.

Source: ours; shrinkage by the ratio of precisions: Kalman (1960). MacKay, The evidence framework applied to
classification networks (1992). Shapes: B rows, T tokens, D state width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.autograd.transforms import transformed
from recbft.core import mean_over_tokens, remember

ReadOut = Literal["off", "temperature", "shrinkage"]
PRIOR_START = 0.1  # nu
MOMENTUM = 0.9


class PrecisionReadOut(nn.Module):
    """What (6.18) learns and remembers; ``kind`` is temperature or shrinkage."""

    mean_log_precision: Tensor
    updates: Tensor

    def __init__(self, kind: ReadOut, *, hidden_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.strength = nn.Parameter(torch.tensor(0.0 if kind == "temperature" else math.log(PRIOR_START)))
        self.register_buffer("mean_log_precision", torch.zeros(hidden_size))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @property
    def learned(self) -> float:
        """a of temperature, nu of shrinkage."""
        strength = float(self.strength.detach())
        return strength if self.kind == "temperature" else math.exp(strength)

    def forward(self, state: Tensor, precision: Tensor, valid: Tensor, ramp: float) -> Tensor:
        """Read all tokens of a batch, (B, T, D); in training the running mean is moved by the ``valid``, (B, T)."""
        z = self._above_usual(precision)  # the mean as it stood: no value depends on batch mates
        level = mean_over_tokens(z, valid) if self.training else None
        if level is not None and not transformed():
            remember(self.mean_log_precision, self.mean_log_precision + level.detach(), self.updates, MOMENTUM)
            self.updates += 1
        return read(state, z, level, self.strength, kind=self.kind, ramp=ramp)

    def some(self, state: Tensor, precision: Tensor, ramp: float) -> Tensor:
        """Read the states of some tokens, (..., D), and remember nothing."""
        return read(state, self._above_usual(precision), None, self.strength, kind=self.kind, ramp=ramp)

    def _above_usual(self, precision: Tensor) -> Tensor:
        return above(precision, self.mean_log_precision.clone())


@in_full_precision
def above(precision: Tensor, usual: Tensor) -> Tensor:
    """z of (6.18), from the running mean of log lam."""
    return precision.log() - usual


@in_full_precision
def read(state: Tensor, z: Tensor, level: Tensor | None, strength: Tensor, *, kind: ReadOut, ramp: float) -> Tensor:
    """Equation (6.18).

    Args:
        state: h, (..., D).
        z: log precision above what is usual, (..., D).
        level: the mean of z over a batch, which is to have no gradient, broadcastable to it; None in evaluation.
        strength: a of temperature or ln nu of shrinkage, broadcastable to the state.
        ramp: w, in [0, 1].

    Returns:
        (..., D), in the type of the state.
    """
    own, common = z, torch.zeros((), dtype=z.dtype, device=z.device)
    if level is not None:
        own, common = z - level, level.detach()
    if kind == "temperature":
        own, common = own.mean(dim=-1, keepdim=True), common if level is None else common.mean(dim=-1, keepdim=True)
        factor = torch.exp(ramp * (strength * own + strength.detach() * common))
    else:
        nu = strength.exp()
        factor = 1 - ramp + ramp * (1 + nu) / (1 + nu * torch.exp(-own - common))
    return state * factor.to(state.dtype)
