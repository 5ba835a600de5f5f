"""Robust filter attention in plain PyTorch: the tensor form, and the form with one set of scalars for each head.

The anisotropic tensor form, a state of size T T K per head (``robust_filter_ref``):

    r_tjk = q_tk - exp((-mu_k + i w_k) dt_tj) k_jk                          residual of the carried key      (9.8)
    d2_tj = sum_k P_tjk |r_tjk|^2,   P = 1 / V                              Mahalanobis distance             (9.8)
    L_tjk = log P_tjk - kappa log(1 + d2_tj / nu),   kappa = (nu + K) / K   student                          (9.9)
    L_tjk = log P_tjk - kappa d2_tj / nu                                    gaussian                         (9.10)
    a_tjk = softmax_j(tau L_tjk + b_j)                                                                       (9.11)
    out_tk = sum_j a_tjk exp((-mu_k + i w_k) dt_tj) v_jk                                                     (9.11)
    evidence_tk = sum_j exp(L_tjk)                                                                           (9.12)

(9.10) is (9.9) to first order in d2, and its limit for large nu; the paper's exponential kernel exp(-d2 / nu') has
nu' = nu / kappa.

With one decay and one noise per head it costs what attention does, nothing of shape (T, T, K) (``isotropic``):

    Qr, Kr, Vr = turn(t) * q, k, v                                          rotated back to a common frame   (9.6)
    R2_tj = |Q_t|^2 + E_tj^2 |K_j|^2 - 2 E_tj Re(conj(Qr_t) . Kr_j)         by one real product of width 2K  (9.8)
    L = log P - kappa log(1 + P R2 / nu)                                    student; gaussian drops the log  (9.9)
    A = softmax_j(tau L + b) * E       out_t = conj(turn(t)) * sum_j A_tj Vr_j                               (9.11)

E and P depend on the lag alone, so where positions are counted they are one table for all rows.

Source: Robust Filter Attention (paper), section 3.2, appendices B.1, B.3 and D.3; (9.10) appendix A.5.1.
Shapes: B rows, H heads, T tokens, K complex coordinates per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.complex_pairs import as_complex, real
from recbft.core.moments import normalised
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Setting, Variant, residual_variance, turns


def robust_filter_ref(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, *, key_bias: Tensor | None, dropout: float, with_evidence: bool
) -> tuple[Tensor, Tensor | None]:
    """The tensor form of ``filtered``, whose arguments these are."""
    context, dynamics, clock, variant = setting
    K = q.shape[-1]
    per_coordinate = dynamics.decay.dim() == 2
    d = Dynamics(*(x if x.dim() == 2 else x[:, None] for x in dynamics))  # (H, K) or (H, 1)
    d = Dynamics(*(x[:, None, None, :] for x in d))  # (H, 1, 1, K or 1)
    elapsed = (clock.lag.abs() + variant.horizon)[:, None, ..., None]  # (B or 1, 1, T, T, 1)
    carry = torch.exp(-d.decay * elapsed + 1j * d.frequency * clock.lag[:, None, ..., None])  # (B or 1, H, T, T, K)
    precision = 1 / residual_variance(elapsed, d)
    distance = (q[:, :, :, None] - carry * k[:, :, None]).abs().square()  # (9.8)
    if variant.multiplicative:
        distance = precision * distance
    misfit = distance.sum(dim=-1, keepdim=True) / d.dof  # (9.8)
    if variant.kernel == "student":
        misfit = torch.log1p(misfit)
    logits = torch.log(precision) - (d.dof + K) / K * misfit  # (9.9), (9.10): (B, H, T, T, K or 1)
    allowed = context.allowed[:, None, :, :, None]
    scores = d.temperature * logits
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :, None]
    empty = ~allowed.any(dim=3, keepdim=True)
    scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, dim=3).masked_fill(empty, 0.0)  # (9.11)
    if not variant.rotate_values:
        carry = torch.exp(-d.decay * elapsed)
    value = (F.dropout(weights, dropout) * carry * v[:, :, None]).sum(dim=3)  # (9.11)
    if not with_evidence:
        return value, None
    evidence = torch.exp(logits).masked_fill(~allowed, 0.0).sum(dim=3)  # (9.12)
    return value, evidence if per_coordinate else evidence[..., 0]


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


def isotropic(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, *, key_bias: Tensor | None, dropout: float, with_evidence: bool
) -> tuple[Tensor, Tensor | None]:
    """The same as the reference with scalars (H,)."""
    context, dynamics, clock, variant = setting
    weights, logits = decayed_weights(q, k, setting, key_bias)
    value = real(v * turns(dynamics.frequency, clock.key) if variant.rotate_values else v)
    mean = as_complex(F.dropout(weights, dropout) @ value)
    if variant.rotate_values:
        mean = mean * turns(dynamics.frequency, clock.query).conj()
    evidence = torch.exp(logits).masked_fill(~context.allowed[:, None], 0.0).sum(dim=-1) if with_evidence else None
    return mean, evidence


def decayed_weights(q: Tensor, k: Tensor, setting: Setting, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A of (9.11), 0 where a token may not read, and L of (9.9): (B, H, T, T) each."""
    (context, dynamics, clock, variant), K = setting, q.shape[-1]
    tables = lag_tables(clock, dynamics, variant)
    query, key = (real(x * turns(dynamics.frequency, time)) for x, time in ((q, clock.query), (k, clock.key)))
    decay, cross = tables.log_decay.exp(), query @ key.mT
    key_square = key.square().sum(dim=-1)[:, :, None]  # (B, H, 1, T)
    residual = query.square().sum(dim=-1, keepdim=True) + decay * (decay * key_square - 2 * cross)  # (9.8)
    misfit = tables.sharpness * residual.clamp(min=0)  # a difference of near numbers can round below 0
    if variant.kernel == "student":
        misfit = torch.log1p(misfit)
    logits = tables.log_precision - ((dynamics.dof + K) / K)[:, None, None] * misfit  # (9.9)
    scores = dynamics.temperature[:, None, None] * logits
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :]
    return normalised(scores, context) * decay, logits
