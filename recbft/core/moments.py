"""Attention as kriging: the weighted mean of the values, and the statistics that say how far to trust it.

    l_tj = q_t . k_j / sqrt(K) + log_precision_j + lag_tj * log_decay + bias_tj         (1)
    a_tj = softmax_j(l_tj) over the keys j that t may read                              (2)
    e_t  = sum_j a_tj v_j                       weighted mean: the innovation           (3)
    n_t  = 1 / sum_j a_tj^2                     Kish effective sample size              (4)
    S_t  = sum_j a_tj v_j^2 - e_t^2             weighted residual variance, >= 0        (5)

(5) is a difference of two near numbers, so the values are centred first (S does not move when a constant is
subtracted). Nothing of shape (T, T, K) is ever built.

Source: Precision Tracked Transformer (arXiv 2605.18832), equations 2, 5 and 7; Kish, Survey Sampling (1965), section
8.2.
Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.core.belief import SequenceContext
from recbft.core.statistics import Moments
from recbft.kernels import softmax_moments as paths
from recbft.kernels.dispatch import choose


@eagerly
def softmax_moments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> Moments:
    """Mean, residual variance and effective sample size of softmax attention.

    Args:
        q, k, v: queries, keys and values, (B, H, T, K); what is added to the logits may be in a wider type.
        context: which token may read which.
        log_precision: log of each key's scalar precision, (B, T); a reliability bias on the logits.
        log_decay: log of the recency decay, a scalar or (B, 1), <= 0, multiplied by the lag in positions.
        dropout: probability of dropping a weight of (3); (4) and (5) always use the undropped weights.
        bias: any other bias of (1), finite, (B or 1, H or 1, T, T).
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``compiled``, ``cpu`` and ``reference``
            force one. Fewer queries than keys, as ``core.Readers`` has them, are for ``compiled`` and ``reference``.

    Returns:
        The moments, the mean in the type of the values; a token that may read nothing (padding) gets zeros.

    Raises:
        ValueError: unknown ``impl``, or the forced path cannot serve the call (the message says why).
    """
    _check_decay(q, log_decay)
    path = choose(impl, paths.PATHS, q, dropout=dropout, read_by_all=context.read_by_all)
    moments: Moments = path(
        q, k, v, context, log_precision=log_precision, log_decay=log_decay, dropout=dropout, bias=bias
    )
    return moments


@eagerly
def softmax_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Equation (3) alone, for layers that keep no precision: the same numbers as ``softmax_moments(...).mean``."""
    _check_decay(q, log_decay)
    path = choose(impl, paths.MEAN_PATHS, q, dropout=dropout, read_by_all=context.read_by_all)
    mean: Tensor = path(q, k, v, context, log_precision=log_precision, log_decay=log_decay, dropout=dropout, bias=bias)
    return mean


def _check_decay(q: Tensor, log_decay: Tensor | None) -> None:
    if log_decay is not None and log_decay.numel() != 1 and log_decay.shape != (q.shape[0], 1):
        raise ValueError(f"log_decay has shape {tuple(log_decay.shape)}; give a scalar tensor, or (B, 1) per row")


def ramped(x: Tensor, ramp: float) -> Tensor:
    """ramp x: x itself once the warm-up is over, without another pass over it."""
    return x if ramp == 1 else ramp * x


def scalar_log_precision(precision: Tensor) -> Tensor:
    """Log of the mean precision over the coordinates, shared by all heads; (B, T, D) -> (B, T)."""
    return torch.log(precision.mean(dim=-1))
