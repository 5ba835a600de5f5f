"""Robust filter attention in its anisotropic tensor form: the plain reference, a state of size T T K per head.

    r_tjk = q_tk - exp((-mu_k + i w_k) dt_tj) k_jk                          residual of the carried key      (1)
    d2_tj = sum_k P_tjk |r_tjk|^2,   P = 1 / V                              Mahalanobis distance             (2)
    L_tjk = log P_tjk - kappa log(1 + d2_tj / nu),   kappa = (nu + K) / K   student                          (3)
    L_tjk = log P_tjk - kappa d2_tj / nu                                    gaussian                         (4)
    a_tjk = softmax_j(tau L_tjk + b_j)                                                                       (5)
    out_tk = sum_j a_tjk exp((-mu_k + i w_k) dt_tj) v_jk,    evidence_tk = sum_j exp(L_tjk)                  (6)

With the scalars equal in all coordinates of a head this is the isotropic mechanism of ``isotropic.py``. (4) is (3) to
first order in d2, and its limit for large nu; the paper's exponential kernel exp(-d2 / nu') has nu' = nu / kappa.

Source: Robust Filter Attention (paper), appendix B.1; (4) appendix A.5.1.
Shapes: B rows, H heads, T tokens, K complex coordinates per head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Variant, residual_variance


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
    """Filter every position.

    Args:
        q, k, v: (B, H, T, K) complex.
        context: which token may read which.
        dynamics: scalars (H,), or (H, K) where every coordinate has its own; dof and temperature are (H,).
        clock: when each token asks and is read.
        key_bias: b of (5), (B, T).
        dropout: probability of dropping a weight of (5).

    Returns:
        The estimate (B, H, T, K), complex, and the evidence: (B, H, T), or (B, H, T, K) for scalars (H, K); zeros where
        nothing may be read.
    """
    K = q.shape[-1]
    per_coordinate = dynamics.decay.dim() == 2
    d = Dynamics(*(x if x.dim() == 2 else x[:, None] for x in dynamics))  # (H, K) or (H, 1)
    d = Dynamics(*(x[:, None, None, :] for x in d))  # (H, 1, 1, K or 1)
    elapsed = (clock.lag.abs() + variant.horizon)[:, None, ..., None]  # (B or 1, 1, T, T, 1)
    carry = torch.exp(-d.decay * elapsed + 1j * d.frequency * clock.lag[:, None, ..., None])  # (B or 1, H, T, T, K)
    precision = 1 / residual_variance(elapsed, d)
    distance = (q[:, :, :, None] - carry * k[:, :, None]).abs().square()  # (1)
    if variant.multiplicative:
        distance = precision * distance
    misfit = distance.sum(dim=-1, keepdim=True) / d.dof  # (2)
    if variant.kernel == "student":
        misfit = torch.log1p(misfit)
    logits = torch.log(precision) - (d.dof + K) / K * misfit  # (3), (4): (B, H, T, T, K or 1)
    allowed = context.allowed[:, None, :, :, None]
    scores = d.temperature * logits
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :, None]
    empty = ~allowed.any(dim=3, keepdim=True)
    scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, dim=3).masked_fill(empty, 0.0)  # (5)
    if not variant.rotate_values:
        carry = torch.exp(-d.decay * elapsed)
    value = (F.dropout(weights, dropout) * carry * v[:, :, None]).sum(dim=3)  # (6)
    if not with_evidence:
        return value, None
    evidence = torch.exp(logits).masked_fill(~allowed, 0.0).sum(dim=3)
    return value, evidence if per_coordinate else evidence[..., 0]
