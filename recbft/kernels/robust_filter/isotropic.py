"""Robust filter attention at the cost of attention: one decay and one noise per head, nothing of shape (T, T, K).

    Qr, Kr, Vr = turn(t) * q, k, v                                          rotated back to a common frame   (1)
    R2_tj = |Q_t|^2 + E_tj^2 |K_j|^2 - 2 E_tj Re(conj(Qr_t) . Kr_j)         by one real product of width 2K  (2)
    L = log P - kappa log(1 + P R2 / nu)                                    student; gaussian drops the log  (3)
    A = softmax_j(tau L + b) * E       out_t = conj(turn(t)) * sum_j A_tj Vr_j      evidence_t = sum_j exp L (4)

E and P depend on the lag alone, so where positions are counted they are one table for all rows.

Source: Robust Filter Attention (paper), section 3.2, appendices B.3 and D.3.
Shapes: B rows, H heads, T tokens, K complex coordinates per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.complex_pairs import as_complex, real
from recbft.core.belief import SequenceContext
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Variant, residual_variance, turns
from recbft.kernels.softmax_moments.reference import normalised


class Tables(NamedTuple):
    """What depends on the lag alone, (B or 1, H, T, T)."""

    log_decay: Tensor  # log E
    log_precision: Tensor  # log P
    sharpness: Tensor  # P / nu, or 1 / nu where the precision does not multiply


def lag_tables(clock: Clock, dynamics: Dynamics, variant: Variant) -> Tables:
    """The tables of a batch."""
    # Where columns are counted, T lags stand for T T pairs.
    lag = clock.lag[:, :, :1].mT if clock.in_columns else clock.lag  # (1, 1, T): the lags of the first column
    tables = tables_of(lag.abs()[:, None], dynamics, variant)
    if not clock.in_columns:
        return tables
    T = clock.lag.shape[-1]
    distance = clock.lag[0].abs().long().flatten()
    return Tables(*(x[..., 0, :].index_select(-1, distance).unflatten(-1, (T, T)) for x in tables))


def tables_of(lag: Tensor, dynamics: Dynamics, variant: Variant) -> Tables:
    """The same of lags >= 0, (.., 1, ., .) -> (.., H, ., .)."""
    per_head = Dynamics(*(x[..., None, None] for x in dynamics))  # (H, 1, 1)
    elapsed = lag + variant.horizon
    variance = residual_variance(elapsed, per_head)
    sharpness = per_head.dof[None].reciprocal()
    if variant.multiplicative:
        sharpness = sharpness / variance
    return Tables(-per_head.decay * elapsed, -torch.log(variance), sharpness.expand_as(variance))


def robust_filter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    dynamics: Dynamics,
    clock: Clock,
    variant: Variant,
    *,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    with_evidence: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The same as the reference with scalars (H,)."""
    weights, logits = decayed_weights(q, k, context, dynamics, clock, variant, key_bias)
    value = real(v * turns(dynamics.frequency, clock.key) if variant.rotate_values else v)
    mean = as_complex(F.dropout(weights, dropout) @ value)
    if variant.rotate_values:
        mean = mean * turns(dynamics.frequency, clock.query).conj()
    evidence = torch.exp(logits).masked_fill(~context.allowed[:, None], 0.0).sum(dim=-1) if with_evidence else None
    return mean, evidence  # (4)


def decayed_weights(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    dynamics: Dynamics,
    clock: Clock,
    variant: Variant,
    key_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A of (4), 0 where a token may not read, and L of (3): (B, H, T, T) each."""
    K = q.shape[-1]
    tables = lag_tables(clock, dynamics, variant)
    query, key = (real(x * turns(dynamics.frequency, time)) for x, time in ((q, clock.query), (k, clock.key)))
    decay, cross = tables.log_decay.exp(), query @ key.mT
    key_square = key.square().sum(dim=-1)[:, :, None]  # (B, H, 1, T)
    residual = query.square().sum(dim=-1, keepdim=True) + decay * (decay * key_square - 2 * cross)  # (2)
    misfit = tables.sharpness * residual.clamp(min=0)  # a difference of near numbers can round below 0
    if variant.kernel == "student":
        misfit = torch.log1p(misfit)
    logits = tables.log_precision - ((dynamics.dof + K) / K)[:, None, None] * misfit  # (3)
    scores = dynamics.temperature[:, None, None] * logits
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :]
    return normalised(scores, context) * decay, logits
