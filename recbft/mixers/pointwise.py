"""Pointwise SiLU attention as a mixer (HSTU): gated, biased by position and, where asked for, by elapsed time.

    u, v, q, k = SiLU(W x + b), each split into H heads of width K where heads are needed      (8.1)
    s_tj = q_t . k_j / sqrt(K) + p[t - j] + g[bucket(t, j)] + w log lbar_j + w lag_tj log rho  (8.2)
    a_tj = SiLU(s_tj) / N over the keys that t may read;  e_t = sum_j a_tj v_j                 (8.3)
    innovation = W_out (Norm(e_t) * u_t), or Norm(e_t) * u_t without an output map             (8.4)
    bucket(t, j) = min(floor(ln(max(|time_t - time_j|, 1)) / 0.301), 127)                      (8.5)

p and g are learned per layer and shared by the heads. The observation precision is the sandwich estimate of e_t; the
norm and the gate of (8.4) are taken as precision-preserving, an output map carries it through its squared weights.

Source: Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152), section 3; Precision Tracked Transformer
(arXiv 2605.18832), section 5.1 and appendix D.
Shapes: B rows, T tokens, D model width, H heads, K head width, N the configured longest history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import HALVES
from recbft.core import (
    Readers,
    SequenceContext,
    check_estimator,
    look_up,
    projected_precision,
    ramped,
    scalar_log_precision,
    silu_weights,
    squares_variance,
)
from recbft.kernels.dropout import dropout as drop
from recbft.kernels.filter_step import sandwich_precision
from recbft.kernels.layer_norm import LayerNorm
from recbft.kernels.silu_moments import silu_mean, silu_moments
from recbft.mixers.interface import DECAY, DECAY_KEPT, Group, Mixer, Observation, by_head, joined, log_decay
from recbft.mixers.value_unit import ValueUnit

BUCKET_WIDTH = 0.301  # as in the authors' code
NUM_BUCKETS = 128
BIAS_STD = 0.02


class PointwiseAttention(Mixer):
    """Gated pointwise attention over a packed batch of histories.

    Args:
        length: N of (8.3), and the number of distances that (8.2) tells apart; the longest history.
        dropout: of the gated innovation, before the output map.
        norm_eps: of the norm in (8.4).
        time_bias: learn g of (8.2); the context must have times.
        recency_decay: start of the learned rho in (0, 1), or None for no decay.
        estimator: how the observation precision is estimated (``sandwich``), or None for the plain layer.
        running: values are told in units of their own spread (``value_unit``).
        centre: m of the estimator, as ``core.sandwich_precision_ref`` explains it.
    """

    weights = "silu"  # which estimators are defined: core.ESTIMATORS
    takes_only = True
    groups: Mapping[str, Group] = {DECAY: "precision"}
    decay_kept: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        length: int = 50,
        dropout: float = 0.0,
        output_projection: bool = False,
        norm_eps: float = 1e-6,
        time_bias: bool = False,
        recency_decay: float | None = None,
        estimator: str | None = None,
        running: bool = False,
        lam_max: float = 100.0,
        centre: str = "root",
    ) -> None:
        super().__init__()
        if estimator is not None:
            check_estimator(estimator, self.weights)
        self.n_heads, self.length, self.dropout, self.estimator = n_heads, length, dropout, estimator
        self.lam_max, self.centre = lam_max, centre
        self.gives_precision, self.mixes_heads = estimator is not None, output_projection
        self.unit = ValueUnit() if running and estimator is not None else None
        self.gate = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.norm = LayerNorm(hidden_size, eps=norm_eps)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        # Tables of one column, so that they are initialised as weights are.
        self.position_table = nn.Parameter(torch.empty(length, 1).normal_(std=BIAS_STD))
        self.time_table = nn.Parameter(torch.empty(NUM_BUCKETS, 1).normal_(std=BIAS_STD)) if time_bias else None
        self.decay_logit: nn.Parameter | None = None
        self.register_buffer(DECAY_KEPT, None)
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
        only: Tensor | None = None,
    ) -> Observation:
        """Observe every position, or the tokens ``only``, as ``Mixer`` says; positions are below ``length``."""
        source = x if source is None else source
        if only is None:
            return self._observe(x, source, precision, context, ramp)
        readers = Readers.of(only, *x.shape[:2])
        seen = self._observe(readers.take(x), source, precision, readers.context(context), ramp)
        return seen.at(readers.place)

    def _observe(
        self, x: Tensor, source: Tensor, precision: Tensor | None, context: SequenceContext, ramp: float
    ) -> Observation:
        """``forward`` of tokens that read others, ``source``."""
        gate = F.silu(self.gate(x))
        q = by_head(F.silu(self.query(x)), self.n_heads)
        k, v = (by_head(F.silu(part(source)), self.n_heads) for part in (self.key, self.value))
        known = self._biases(precision, context, ramp)
        if self.estimator is None:
            mean = silu_mean(q, k, v, context, length=self.length, **known)
            return Observation(self._innovation(mean, gate), None)
        halved = x.dtype in HALVES  # by weights in half precision, where squares vanish; not by autocast
        if halved:
            q, k, v = q.float(), k.float(), v.float()
        unit = None if self.unit is None else self.unit(v)
        moments = silu_moments(q, k, v if unit is None else v / unit, context, length=self.length, **known)
        mean = moments.mean if unit is None else moments.mean * unit
        if self.unit is not None and unit is not None and self.unit.learns:
            self.unit.learn(squares_variance(moments), unit, context)
        innovation = self._innovation(mean.to(x.dtype) if halved else mean, gate)
        found = joined(sandwich_precision(moments, cap=self.lam_max, centre=self.centre)).to(x.dtype)
        return Observation(
            innovation, found if self.out is None else projected_precision(found, self.out.weight, cap=self.lam_max)
        )

    def _innovation(self, mean: Tensor, gate: Tensor) -> Tensor:
        """Equation (8.4)."""
        gated: Tensor = self.norm(joined(mean)) * gate
        if self.out is None:
            return gated
        projected: Tensor = self.out(drop(gated, self.dropout if self.training else 0.0))
        return projected

    @property
    def recency_decay(self) -> Tensor | None:
        """rho, learned."""
        return None if self.decay_logit is None else torch.sigmoid(self.decay_logit)

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor:
        """The weights behind ``forward``, (B, H, T, T); of any sign, and they need not sum to one."""
        read = ((self.query, x), (self.key, x if source is None else source))
        q, k = (by_head(F.silu(part(y)), self.n_heads) for part, y in read)
        return silu_weights(q, k, context, length=self.length, **self._biases(precision, context, ramp))

    def _biases(self, precision: Tensor | None, context: SequenceContext, ramp: float) -> dict[str, Any]:
        """What (8.2) adds to the products: the learned biases, the log precision of keys, the log recency decay."""
        return {
            "bias": self._time_bias(context),
            "lag_bias": self.position_table[:, 0],
            "log_precision": None if precision is None else ramped(scalar_log_precision(precision), ramp),
            "log_decay": log_decay(self.decay_logit, ramp, self.decay_kept),
        }

    def _time_bias(self, context: SequenceContext) -> Tensor | None:
        """g of (8.2), (B, 1, T, T)."""
        if self.time_table is None:
            return None
        bucket = (context.log_elapsed / BUCKET_WIDTH).long()  # (8.5)
        return look_up(self.time_table[:, 0], bucket)[:, None]  # the last one of all that lies beyond the table
