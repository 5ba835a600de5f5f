"""The learned side of the precision channel: where precision starts and how a layer carries it on.

    tau_i = tau_range * tau_base_i + softplus(MLP(emb_i))        initial: hybrid                 (1)
    lam  <- kappa * lam0 * lam / mu                              prior_scale: per_layer          (2)
    lam'' by ``core.predict_precision`` with J from the feed-forward slope                       (3)

mu and the mean Jacobian are running means over real training positions (momentum 0.99), updated in training only.

Source: Precision Tracked Transformer (arXiv 2605.18832), sections 3.2 and 3.3.
Shapes: B rows, T tokens, D model width, F feed-forward width, V items.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import (
    SequenceContext,
    count_quantiles,
    initial_scale,
    jacobian_factors,
    low_rank_jacobian,
    predict_precision,
    process_noise,
)
from recbft.models.precision_config import CoreConfig, JacobianMode

LAM_MIN = 1e-3
MOMENTUM = 0.99
Q_LOGIT_START = -9.0


class ItemPrecision(nn.Module):
    """Precision of an item before the first layer, (1) and its alternatives.

    Args:
        core: which of ``hybrid | count | table | uniform``.
        training_counts: (V + 1,), index 0 is padding.
        hidden_size, head_width: D and K.
    """

    base: Tensor

    def __init__(self, core: CoreConfig, training_counts: Tensor, *, hidden_size: int, head_width: int) -> None:
        super().__init__()
        self.mode, self.lam_max = core.initial, core.lam_max
        self.register_buffer("base", count_quantiles(training_counts).float())
        if core.initial in ("hybrid", "count"):
            start = initial_scale(
                core.initial_gain, head_width=head_width, prior_dof=core.prior_dof, prior_variance=core.prior_variance
            )
            self.range = nn.Parameter(torch.tensor(start))
        if core.initial == "hybrid":
            self.read = nn.Sequential(nn.Linear(hidden_size, 16), nn.GELU(), nn.Linear(16, 1))
        if core.initial == "table":
            self.table = nn.Parameter(torch.zeros(training_counts.numel()))

    def forward(self, items: Tensor, embedded: Tensor) -> Tensor:
        """Initial precision of every token: (B, T) items and (B, T, D) embeddings -> (B, T, 1)."""
        if self.mode == "uniform":
            return torch.ones_like(embedded[..., :1])
        if self.mode == "table":
            tau = 1 + F.softplus(self.table[items])[..., None]
        else:
            tau = (self.range * self.base[items])[..., None]
            tau = tau + (F.softplus(self.read(embedded)) if self.mode == "hybrid" else math.log(2))
        return tau.clamp(LAM_MIN, self.lam_max)


class LayerPrecision(nn.Module):
    """What one layer learns and remembers about precision: (2) before the update, (3) after it."""

    mean_precision: Tensor
    mean_jacobian: Tensor
    updates: Tensor

    def __init__(self, core: CoreConfig, *, hidden_size: int, head_width: int) -> None:
        super().__init__()
        self.core = core
        self.first_precision = initial_scale(
            core.initial_gain, head_width=head_width, prior_dof=core.prior_dof, prior_variance=core.prior_variance
        )
        self.noise_logits = nn.Parameter(torch.full((hidden_size,), Q_LOGIT_START)) if core.process_noise else None
        self.log_kappa = nn.Parameter(torch.zeros(())) if core.prior_scale == "per_layer" else None
        self.register_buffer("mean_precision", torch.ones(()))
        self.register_buffer("mean_jacobian", torch.zeros(hidden_size))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.factors: tuple[Tensor, Tensor] | None = None

    @property
    def mode(self) -> JacobianMode:
        """How the Jacobian is had at present."""
        return self.core.jacobian if self.training else self.core.jacobian_in_evaluation

    def refresh(self, w1: Tensor, w2: Tensor) -> None:
        """Take the factors of C = W2 * W1' from the present weights; constants for autograd."""
        if "low_rank" in (self.core.jacobian, self.core.jacobian_in_evaluation) or self.core.jacobian == "running_mean":
            self.factors = jacobian_factors(w1.detach(), w2.detach(), self.core.jacobian_rank)

    def prior(self, precision: Tensor, context: SequenceContext) -> Tensor:
        """Equation (2): the incoming precision a layer works with, (B, T, D)."""
        if self.log_kappa is None:
            return precision
        # The mean as it stood before this batch: what a token gets must not depend on its batch mates.
        scale = self.log_kappa.exp() * self.first_precision / self.mean_precision.clone()
        if self.training:
            self._remember(self.mean_precision, _mean_over_tokens(precision.detach(), context).mean())
        return (scale * precision).clamp(LAM_MIN, self.core.lam_max)

    def needs_slope(self) -> bool:
        """Whether the feed-forward slope must be computed for this pass."""
        return self.mode in ("exact", "low_rank") or (self.mode == "running_mean" and self.training)

    def predict(
        self, precision: Tensor, slope: Tensor | None, w1: Tensor, w2: Tensor, context: SequenceContext
    ) -> Tensor:
        """Equation (3): precision after the feed-forward network; slope (B, T, F) where ``needs_slope``."""
        jacobian: Tensor | float = 0.0
        if slope is not None:
            jacobian = self._jacobian(slope.detach() if self.core.jacobian_detach else slope, w1, w2)
        mean = self.mean_jacobian.clone()  # as it stood before this batch
        if self.training and isinstance(jacobian, Tensor):
            self._remember(self.mean_jacobian, _mean_over_tokens(jacobian.detach(), context))
        if self.mode == "running_mean":
            jacobian = mean
        noise = 0.0 if self.noise_logits is None else process_noise(self.noise_logits, self.core.q_max)
        if self.training:
            self.updates += 1
        return predict_precision(precision, jacobian, noise, cap=self.core.lam_max).clamp(min=LAM_MIN)

    def _jacobian(self, slope: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        if self.mode == "exact":
            return F.linear(slope, (w2 * w1.T).detach())
        if self.factors is None:
            self.refresh(w1, w2)
        assert self.factors is not None
        return low_rank_jacobian(slope, *self.factors)

    def _remember(self, mean: Tensor, value: Tensor) -> None:
        """Running mean, started by the first batch."""
        weight = 1.0 if int(self.updates) == 0 else 1 - MOMENTUM
        mean.lerp_(value, weight)


def _mean_over_tokens(values: Tensor, context: SequenceContext) -> Tensor:  # (B, T, D) -> (D,)
    keep = context.valid.to(values.dtype)
    return torch.einsum("btd,bt->d", values, keep) / keep.sum().clamp(min=1)
