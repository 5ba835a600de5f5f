"""Attention as kriging: the weighted mean of the values, and the statistics that say how far to trust it.

    lbar_j = mean of lam_j over the coordinates                                             (2.1)
    l_tj   = q_t . k_j / sqrt(K) + log_precision_j + lag_tj * log_decay + bias_tj           (2.2)
    a_tj   = softmax_j(l_tj) over the keys j that t may read                                (2.3)
    e_t    = sum_j a_tj v_j                   weighted mean: the innovation                 (2.4)
    n_t    = 1 / sum_j a_tj^2                 Kish effective sample size                    (2.5)
    S_t    = sum_j a_tj v_j^2 - e_t^2         weighted residual variance, >= 0              (2.6)

(2.6) is a difference of two near numbers, so the values are centred on the first token of their history; S does not
change when a constant is subtracted. Logits are in the widest type of what is added up; the moments are in that of the
values. The functions whose names end in ``_ref`` are the plain form of ``kernels.softmax_moments``.

Some estimators need the weights themselves:

    l_tjk = (2.2) with log_precision_jk       a weight for each coordinate                  (2.14)
    P_t   = sum_j a^2 / lam_j                 variance of a linear map of the keys          (2.11)
    U_t   = mean_j (v_j - mean_j v_j)^2       unweighted variance of the keys               (2.12)
    s1 = sum a   s2 = sum a^2   w1 = sum a^2 u   w2 = sum a^2 u^2    u the centred values   (8.6)

(2.14) keeps T T D weights, so it serves short rows only. Each coordinate is then a head of width 1, and the other
equations hold as they stand.

Source: Precision Tracked Transformer (arXiv 2605.18832), equations 2, 5 and 7, section 4.1 and table 1; Kish, Survey
Sampling (1965), section 8.2.
Shapes: B rows, H heads, T tokens, K head width, D = H K; for weights per coordinate H and K are D and 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.core.belief import Moments, SequenceContext, SiluMoments

MAX_TOKENS = 64  # T of (2.14): at D = 64 and 64 rows the weights alone are 64 MiB, and autograd keeps several such


def scalar_log_precision(precision: Tensor) -> Tensor:
    """Log of (2.1), the mean precision that all heads share: (B, T, D) -> (B, T)."""
    return torch.log(precision.mean(dim=-1))


def ramped(x: Tensor, ramp: float) -> Tensor:
    """ramp x: x itself once the warm-up is over, without another pass over it."""
    return x if ramp == 1 else ramp * x


def softmax_weights(q: Tensor, k: Tensor, context: SequenceContext, **terms: Tensor | None) -> Tensor:
    """Equations (2.2) and (2.3): (B, H, T, T); a token that may read nothing has weights 0.

    Arguments as those of ``logits_of``.
    """
    return normalised(logits_of(q, k, context, **terms), context)


def logits_of(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Equation (2.2) alone.

    Args:
        q, k: queries and keys, (B, H, T, K).
        context: which token may read which.
        log_precision: log of each key's scalar precision, (B, T).
        log_decay: log of the recency decay, a scalar, <= 0.
        bias: any other bias, finite, (B or 1, H or 1, T, T).
    """
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if log_precision is not None:
        logits = logits + log_precision[:, None, None, :]
    if log_decay is not None:
        logits = logits + (context.lag * log_decay[..., None])[:, None]
    if bias is not None:
        logits = logits + bias
    return logits


def normalised(logits: Tensor, context: SequenceContext) -> Tensor:
    """Equation (2.3) alone: (B, H, T, T) logits to weights over the keys that each token may read."""
    empty = ~context.allowed.any(dim=-1)[:, None, :, None]  # (B, 1, T, 1)
    logits = logits.masked_fill(~context.allowed[:, None], float("-inf")).masked_fill(empty, 0.0)
    return torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)


def softmax_moments_ref(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, dropout: float = 0.0, **terms: Tensor | None
) -> Moments:
    """Equations (2.4) to (2.6)."""
    weights = softmax_weights(q, k, context, **terms).to(v.dtype)
    mean = F.dropout(weights, dropout) @ v  # (2.4)
    size = effective_sample_size(weights)
    return Moments(mean, residual_variance(weights, v, context), size)


def softmax_mean_ref(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, dropout: float = 0.0, **terms: Tensor | None
) -> Tensor:
    """Equation (2.4)."""
    return F.dropout(softmax_weights(q, k, context, **terms).to(v.dtype), dropout) @ v


def effective_sample_size(weights: Tensor) -> Tensor:
    """Equation (2.5): (B, H, T), 0 where nothing is read."""
    concentration = weights.square().sum(dim=-1)
    empty = concentration == 0
    return torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, concentration))


def residual_variance(weights: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
    """Equation (2.6): (B, H, T, K), >= 0."""
    centred = centre_on_first(v, context)
    return (weights @ centred.square() - (weights @ centred).square()).clamp(min=0)


def centre_on_first(v: Tensor, context: SequenceContext) -> Tensor:
    """Values less the value of the first token of their history: a centre that no other history or later item moves."""
    first = context.first[:, None, :, None].expand_as(v)
    return v - v.detach().gather(2, first)


def per_dimension_weights(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Equation (2.14): (B, D, T, T), a head of width 1 for every coordinate.

    Args:
        log_precision: log of each key's precision, (B, T, D); the others as ``logits_of``.

    Raises:
        ValueError: T exceeds ``MAX_TOKENS``.
    """
    T, K = q.shape[-2:]
    if T > MAX_TOKENS:
        raise ValueError(
            f"per-dimension weights of {T} tokens would be {T} x {T} for every coordinate; at most {MAX_TOKENS} tokens "
            "are taken: shorten the histories or use scalar weights"
        )
    logits = logits_of(q, k, context, log_decay=log_decay, bias=bias)
    # (B, H, T, T) -> (B, D, T, T)
    return normalised(logits.repeat_interleave(K, dim=1) + log_precision.mT[:, :, None, :], context)


def propagated_variance(weights: Tensor, precision: Tensor) -> Tensor:
    """Equation (2.11): (B, H, T).

    Args:
        weights: (B, H, T, T).
        precision: lam of each key, (B, T) for all heads or (B, H, T) for each, > 0.
    """
    variance = 1 / (precision[:, None] if precision.dim() == 2 else precision)
    return (weights.square() @ variance[..., None])[..., 0]


def key_variance(v: Tensor, context: SequenceContext) -> Tensor:
    """Equation (2.12): (B, H, T, K), >= 0; 0 where one key or none may be read."""
    allowed = context.allowed[:, None].to(v.dtype)
    return residual_variance(allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1), v, context)


def weight_sums(weights: Tensor, v: Tensor, context: SequenceContext) -> SiluMoments:
    """Equations (8.6), over centred values, with sum a u as the mean: what ``sandwich_precision`` takes."""
    centred, squares = centre_on_first(v, context), weights.square()
    return SiluMoments(
        weights @ centred,
        weights.sum(dim=-1),
        squares.sum(dim=-1),
        squares @ centred,
        squares @ centred.square(),
    )


def squares_variance(moments: SiluMoments) -> Tensor:
    """w2 / s2 - (w1 / s2)^2, the variance of the values under squared weights, (B, H, T, K), >= 0."""
    squares = moments.square_sum[..., None].clamp(min=torch.finfo(moments.square_sum.dtype).tiny)
    return (moments.square_second / squares - (moments.square_mean / squares).square()).clamp(min=0)
