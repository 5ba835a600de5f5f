"""Softmax attention as a mixer: precision-weighted kriging, or the plain layer where no estimator is asked for.

    q, k, v   linear maps of the normalised input, cut into H heads of width K
    e, S, n   softmax moments with bias  w log lbar_j + w lag_tj log rho                          (1)
    lobs      by the estimator, per head; through the squared weights of W_out where there is one (2)

Source: Precision Tracked Transformer (arXiv 2605.18832), sections 2.3 and 3.1.
Shapes: B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import (
    Moments,
    SequenceContext,
    projected_precision,
    reml_naive_precision,
    scalar_log_precision,
    softmax_mean,
    softmax_moments,
)
from recbft.kernels.filter_step import reml_precision
from recbft.mixers.observation import Observation

Estimator = Literal["reml", "reml_naive"]


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention over a packed batch.

    Args:
        hidden_size: D.
        n_heads: H, divides D.
        dropout: probability of dropping an attention weight; precision always uses the undropped weights.
        output_projection: a linear map after the heads are joined.
        recency_decay: start of the learned rho in (0, 1), or None for no decay.
        estimator: how the observation precision is estimated, or None for the plain layer.
        prior_dof, prior_variance, cap: nu, s0 and lam_max of the estimator; s0 defaults to 1 / K.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        dropout: float = 0.0,
        output_projection: bool = False,
        recency_decay: float | None = None,
        estimator: Estimator | None = None,
        prior_dof: float = 1.0,
        prior_variance: float | None = None,
        cap: float = 100.0,
    ) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.estimator = n_heads, dropout, estimator
        self.prior_dof, self.cap = prior_dof, cap
        self.prior_variance = n_heads / hidden_size if prior_variance is None else prior_variance
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        self.decay_logit: nn.Parameter | None = None
        if recency_decay is not None:
            self.decay_logit = nn.Parameter(torch.tensor(math.log(recency_decay / (1 - recency_decay))))

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position.

        Args:
            x: normalised input, (B, T, D).
            precision: incoming precision, (B, T, D), or None for equal trust in every key.
            context: which token may read which.
            ramp: w, the warm-up of the precision and recency biases, in [0, 1].
            source: what keys and values are read from, (B, T, D); ``x`` unless given.
        """
        source = x if source is None else source
        q, k, v = self._heads(self.query(x)), self._heads(self.key(source)), self._heads(self.value(source))
        log_precision = None if precision is None else ramp * scalar_log_precision(precision)
        log_decay = None if self.decay_logit is None else ramp * F.logsigmoid(self.decay_logit)
        dropout = self.dropout if self.training else 0.0
        if self.estimator is None:
            mean = softmax_mean(q, k, v, context, log_precision=log_precision, log_decay=log_decay, dropout=dropout)
            return Observation(self._join(mean), None)
        moments = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, dropout=dropout)
        return self._observe(moments)

    def _observe(self, moments: Moments) -> Observation:
        if self.estimator == "reml":
            precision = reml_precision(
                moments.residual_variance,
                moments.effective_sample_size,
                prior_scale=self.prior_variance,
                prior_dof=self.prior_dof,
                cap=self.cap,
            )
        else:
            precision = reml_naive_precision(moments.residual_variance, moments.effective_sample_size, cap=self.cap)
        joined = precision.transpose(1, 2).flatten(2)
        if self.out is not None:
            joined = projected_precision(joined, self.out.weight, cap=self.cap)
        return Observation(self._join(moments.mean), joined)

    def _heads(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, H, T, K)
        B, T, D = x.shape
        return x.view(B, T, self.n_heads, D // self.n_heads).transpose(1, 2)

    def _join(self, mean: Tensor) -> Tensor:  # (B, H, T, K) -> (B, T, D)
        joined = mean.transpose(1, 2).flatten(2)
        return joined if self.out is None else self.out(joined)
