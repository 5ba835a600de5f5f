"""Softmax moments as the equations of ``recbft.core.moments`` read: the plain form every fast path must equal.

Logits are in the widest type of what is added up; the moments are in that of the values.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.core.statistics import Moments


def softmax_weights(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Equations (1) and (2): (B, H, T, T); a token that may read nothing has weights 0.

    Args:
        q, k: queries and keys, (B, H, T, K).
        context: which token may read which.
        log_precision: log of each key's scalar precision, (B, T).
        log_decay: log of the recency decay, a scalar, <= 0.
        bias: any other bias, finite, (B or 1, H or 1, T, T).
    """
    terms = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    return normalised(logits_of(q, k, context, **terms), context)


def logits_of(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Equation (1) alone."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if log_precision is not None:
        logits = logits + log_precision[:, None, None, :]
    if log_decay is not None:
        logits = logits + (context.lag * log_decay[..., None])[:, None]
    if bias is not None:
        logits = logits + bias
    return logits


def normalised(logits: Tensor, context: SequenceContext) -> Tensor:
    """Equation (2) alone: (B, H, T, T) logits to weights over the keys that each token may read."""
    empty = ~context.allowed.any(dim=-1)[:, None, :, None]  # (B, 1, T, 1)
    logits = logits.masked_fill(~context.allowed[:, None], float("-inf")).masked_fill(empty, 0.0)
    return torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)


def softmax_moments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    dropout: float,
    bias: Tensor | None = None,
) -> Moments:
    """Equations (3) to (5)."""
    terms = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    weights = softmax_weights(q, k, context, **terms).to(v.dtype)
    mean = F.dropout(weights, dropout) @ v  # (3)
    size = effective_sample_size(weights)
    return Moments(mean, residual_variance(weights, v, context), size)


def softmax_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    dropout: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Equation (3)."""
    terms = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    return F.dropout(softmax_weights(q, k, context, **terms).to(v.dtype), dropout) @ v


def effective_sample_size(weights: Tensor) -> Tensor:
    """Equation (4): (B, H, T), 0 where nothing is read."""
    concentration = weights.square().sum(dim=-1)
    empty = concentration == 0
    return torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, concentration))


def residual_variance(weights: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
    """Equation (5): (B, H, T, K), >= 0."""
    centred = centre_on_first(v, context)
    return (weights @ centred.square() - (weights @ centred).square()).clamp(min=0)


def centre_on_first(v: Tensor, context: SequenceContext) -> Tensor:
    """Values less the value of the first token of their history: a centre that no other history or later item moves."""
    first = context.first[:, None, :, None].expand_as(v)
    return v - v.detach().gather(2, first)
