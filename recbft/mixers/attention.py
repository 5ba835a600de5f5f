"""Softmax attention as a mixer: precision-weighted kriging, or the plain layer where no estimator is asked for.

    q, k, v   linear maps of the normalised input, cut into H heads of width K
    e, S, n   softmax moments with bias  w log lbar_j + w lag_tj log rho  (2.2) to (2.6)
    lobs      by the estimator, per head                                 (2.7) to (2.12)
    lobs      through the squared weights of W_out where there is one             (2.13)

The estimators that need more than S and n, and weights per coordinate (``kriging: per_dimension``), take the weights
written out (``core.weights``); the others take the fast path.

Source: Precision Tracked Transformer (arXiv 2605.18832), sections 2.3, 3.1 and 4.1.
Shapes: B rows, T tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.core import (
    Estimator,
    Readers,
    SequenceContext,
    check_estimator,
    delta_precision,
    design_effect_precision,
    effective_sample_size,
    key_variance,
    per_dimension_weights,
    propagated_variance,
    ramped,
    reml_naive_precision,
    residual_variance,
    scalar_log_precision,
    softmax_weights,
    squares_variance,
    weight_sums,
)
from recbft.core.regimes import BiasTerms
from recbft.kernels.dropout import dropout as drop
from recbft.kernels.filter_step import reml_precision, sandwich_precision
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments, softmax_reml, takes_terms
from recbft.mixers.interface import (
    DECAY,
    DECAY_KEPT,
    Group,
    Kriging,
    Mixer,
    Observation,
    by_head,
    joined,
    log_decay,
    projected,
)
from recbft.mixers.value_unit import ValueUnit


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention over a packed batch.

    Args:
        dropout: probability of dropping an attention weight; precision always uses the undropped weights.
        recency_decay: start of the learned rho in (0, 1), or None for no decay.
        estimator: how the observation precision is estimated, or None for the plain layer.
        prior_dof, prior_variance: nu and s0 of the estimator, 1 / K unless given.
        running: values are told in units of their own spread (``value_unit``).
        kriging: ``scalar`` weighs a key by its mean precision, ``per_dimension`` each coordinate by its own (short rows
            only: ``core.MAX_TOKENS``).
    """

    weights = "softmax"  # which estimators are defined: core.ESTIMATORS
    takes_only = True
    groups: Mapping[str, Group] = {DECAY: "precision"}
    decay_kept: Tensor | None

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
        running: bool = False,
        lam_max: float = 100.0,
        kriging: Kriging = "scalar",
    ) -> None:
        super().__init__()
        if estimator is not None:
            check_estimator(estimator, self.weights)
        self.n_heads, self.dropout, self.estimator, self.kriging = n_heads, dropout, estimator, kriging
        self.gives_precision, self.mixes_heads = estimator is not None, output_projection
        self.by_coordinate = kriging == "per_dimension"
        self.prior_dof, self.lam_max = prior_dof, lam_max
        self.prior_variance = n_heads / hidden_size if prior_variance is None else prior_variance
        self.unit = ValueUnit() if running and estimator is not None else None
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
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
        bias: Tensor | BiasTerms | None = None,
        only: Tensor | None = None,
    ) -> Observation:
        """Observe every position, or the tokens ``only``; what is not said here as in ``Mixer``.

        Args:
            bias: a further bias of the logits, finite, (B or 1, H or 1, T, T), or its terms where ``takes_terms``.
            only: without ``bias``.
        """
        if only is None or self._is_written_out(self.estimator):
            return self.observe(*self.project(x, source), precision, context, ramp=ramp, bias=bias).at(only)
        assert bias is None
        readers = Readers.of(only, *x.shape[:2])
        q, k, v = self.project(readers.take(x), x if source is None else source)
        seen = self.observe(q, k, v, precision, readers.context(context), ramp=ramp)
        return seen.at(readers.place)

    @property
    def recency_decay(self) -> Tensor | None:
        """rho, learned."""
        return None if self.decay_logit is None else torch.sigmoid(self.decay_logit)

    def takes_terms(self, x: Tensor) -> bool:
        """Whether a bias need not be written out for a normalised input."""
        return not self._is_written_out(self.estimator) and takes_terms(x, dropout=self.dropout if self.training else 0)

    def project(self, x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a normalised input, (B, T, D) -> (B, H, T, K) each; ``source`` as in ``forward``."""
        source = x if source is None else source
        q, k, v = (by_head(y, self.n_heads) for y in (self.query(x), self.key(source), self.value(source)))
        return q, k, v

    def observe(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        bias: Tensor | BiasTerms | None = None,
        estimate: bool = True,
    ) -> Observation:
        """``forward`` from what ``project`` returns; without ``estimate`` the innovation alone."""
        estimator = self.estimator if estimate else None
        unit = None if self.unit is None or estimator is None else self.unit(v)
        v = v if unit is None else v / unit  # (2.15)
        if self._is_written_out(estimator):
            assert not isinstance(bias, BiasTerms)
            mean, found = self._estimate_written_out(q, k, v, precision, context, ramp, bias, estimator, unit)
        else:
            mean, found = self._estimate(q, k, v, precision, context, ramp, bias, estimator, unit)
        mean = mean if unit is None else mean * unit
        return projected(Observation(mean, found).each(joined), self.out, cap=self.lam_max)

    def _estimate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        ramp: float,
        bias: Tensor | BiasTerms | None,
        estimator: str | None,
        unit: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mean and precision, (B, H, T, K) each; ``unit`` is what the values were divided by."""
        known: dict[str, Any] = {
            "log_precision": None if precision is None else ramped(scalar_log_precision(precision), ramp),
            "log_decay": self._log_decay(ramp),
            "dropout": self.dropout if self.training else 0.0,
            "bias": bias,
        }
        if estimator is None:
            return softmax_mean(q, k, v, context, **known), None
        prior: dict[str, Any] = {"prior_scale": self.prior_variance, "prior_dof": self.prior_dof}
        if estimator == "reml" and (self.unit is None or not self.unit.learns):
            return softmax_reml(q, k, v, context, **known, **prior, cap=self.lam_max)
        mean, S, n = softmax_moments(q, k, v, context, **known)
        self._learn(S, unit, context)
        if estimator == "reml":
            return mean, reml_precision(S, n, **prior, cap=self.lam_max)
        return mean, reml_naive_precision(S, n, cap=self.lam_max)

    def _learn(self, spread: Tensor, unit: Tensor | None, context: SequenceContext) -> None:
        """Keep the spread of the values of a batch, (B, H, T, K), where they are told in units of it."""
        if self.unit is not None and unit is not None:
            self.unit.learn(spread, unit, context)

    def _is_written_out(self, estimator: str | None) -> bool:
        """Whether weights are kept, one by one: for estimators and kriging that need more than S and n."""
        return self.kriging == "per_dimension" or estimator not in (None, "reml", "reml_naive")

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The weights behind ``forward``, before dropout: (B, H, T, T), or (B, D, T, T) per dimension."""
        q, k = (by_head(y, self.n_heads) for y in (self.query(x), self.key(x if source is None else source)))
        return self.weigh(q, k, precision, context, ramp=ramp, bias=bias)

    def weigh(
        self,
        q: Tensor,
        k: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """``attention`` from the q and k that ``project`` returns."""
        log_decay = self._log_decay(ramp)
        if precision is None:
            return softmax_weights(q, k, context, log_decay=log_decay, bias=bias)
        if self.kriging == "scalar":
            log_precision = ramped(scalar_log_precision(precision), ramp)
            return softmax_weights(q, k, context, log_precision=log_precision, log_decay=log_decay, bias=bias)
        log_precision = ramped(precision.log(), ramp)
        return per_dimension_weights(q, k, context, log_precision=log_precision, log_decay=log_decay, bias=bias)

    def _log_decay(self, ramp: float) -> Tensor | None:
        return log_decay(self.decay_logit, ramp, self.decay_kept)

    @in_full_precision
    def _estimate_written_out(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        ramp: float,
        bias: Tensor | None,
        estimator: str | None,
        unit: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The same from weights that are kept, in float32 at least: squares of weights vanish in half precision."""
        shape, dtype = v.shape, v.dtype
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        precision = None if precision is None else precision.to(wide)
        weights = self.weigh(q, k, precision, context, ramp=ramp, bias=bias)
        if precision is None:
            trust = torch.ones_like(v[:, 0, :, 0])
        elif self.kriging == "scalar":
            trust = precision.mean(dim=-1)  # (B, T)
        else:
            trust = precision.mT
            v = v.mT.flatten(1, 2)[..., None]  # (B, H, T, K) -> (B, D, T, 1): every coordinate a head of width 1
        dropout = self.dropout if self.training else 0.0
        kept = weights * self._kept_pairs(q, dropout, num_heads=weights.shape[1]) if dropout else weights
        mean = _head_by_head(kept @ v, shape).to(dtype)
        if estimator is None:
            return mean, None
        found = _head_by_head(self._precision(weights, v, trust, context, unit).expand_as(v), shape)
        return mean, found.to(dtype)

    def _precision(
        self, weights: Tensor, v: Tensor, trust: Tensor, context: SequenceContext, unit: Tensor | None
    ) -> Tensor:
        """Observation precision by the estimator, (B, H, T, K) or (B, H, T, 1); ``trust`` is what delta propagates."""
        if self.estimator == "sandwich":
            sums = weight_sums(weights, v, context)
            self._learn(squares_variance(sums), unit, context)
            return sandwich_precision(sums, cap=self.lam_max)
        if self.estimator == "delta":
            return delta_precision(propagated_variance(weights, trust), cap=self.lam_max)
        n = effective_sample_size(weights)
        by_keys = self.estimator == "design_effect"
        spread = key_variance(v, context) if by_keys else residual_variance(weights, v, context)
        self._learn(spread, unit, context)
        if self.estimator == "reml_naive":
            return reml_naive_precision(spread, n, cap=self.lam_max)
        estimate = design_effect_precision if by_keys else reml_precision
        return estimate(spread, n, prior_scale=self.prior_variance, prior_dof=self.prior_dof, cap=self.lam_max)

    def _kept_pairs(self, q: Tensor, dropout: float, *, num_heads: int) -> Tensor:
        """Dropout of the weights, (B, num_heads, T, T): drawn per head, also where each coordinate has weights."""
        B, H, T, _ = q.shape
        return drop(q.new_ones(B, H, T, T), dropout).repeat_interleave(num_heads // H, dim=1)


def _head_by_head(x: Tensor, shape: torch.Size) -> Tensor:
    """(B, D, T, 1) back to (B, H, T, K); what is in that shape already stays."""
    B, H, T, K = shape
    return x if x.shape == shape else x.view(B, H, K, T).mT
