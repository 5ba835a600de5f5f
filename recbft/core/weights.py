"""Softmax weights written out, and what the estimators beyond REML ask of them.

    l_tj  = q_t . k_j / sqrt(K) + log_precision_j + lag_tj log_decay + bias_tj   a_tj  = softmax_j(l_tj)     (1)
    l_tjk = the same with log_precision_jk                                       a_tjk = softmax_j(l_tjk)    (2)
    n_t = 1 / sum_j a^2                          Kish effective sample size                                  (3)
    S_t = sum_j a (v_j - e_t)^2                  weighted residual variance                                  (4)
    P_t = sum_j a^2 / lam_j                      variance of a linear map of keys with precision lam_j       (5)
    U_t = mean_j (v_j - mean_j v_j)^2            unweighted variance over the keys that t may read           (6)
    s1 = sum a   s2 = sum a^2   w1 = sum a^2 u   w2 = sum a^2 u^2            sums of the sandwich variance   (7)

(1), (3) and (4) are functions of the reference (``kernels.softmax_moments``), which works by them.

(2) weighs every coordinate by a precision of its own: it keeps T T D weights, so it serves short rows only. Each
coordinate is then a head of width 1, and (3) to (7) read as they stand. Values enter as u, centred on the first token
of their history, which moves none of the variances and saves digits.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 4.1 and table 1; Kish, Survey Sampling (1965).
Shapes: B rows, H heads, T tokens, K head width, D = H K; in (3) to (7) H and K may be D and 1.
"""

from __future__ import annotations

from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.core.statistics import SiluMoments
from recbft.kernels.softmax_moments.reference import centre_on_first, logits_of, normalised, residual_variance

MAX_TOKENS = 64  # T of (2): at D = 64 and 64 rows the weights alone are 64 MiB, and autograd keeps several such


def per_dimension_weights(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Equation (2): (B, D, T, T), a head of width 1 for every coordinate.

    Args:
        q, k: queries and keys, (B, H, T, K).
        log_precision: log of each key's precision, (B, T, D).
        bias: any other bias, finite, (B or 1, H or 1, T, T).

    Raises:
        ValueError: T exceeds ``MAX_TOKENS``.
    """
    T, K = q.shape[-2:]
    if T > MAX_TOKENS:
        raise ValueError(
            f"per-dimension weights of {T} tokens would be {T} x {T} for every coordinate; at most {MAX_TOKENS} tokens "
            "are taken: shorten the histories or use scalar weights"
        )
    logits = logits_of(q, k, context, log_precision=None, log_decay=log_decay, bias=bias)
    # (B, H, T, T) -> (B, D, T, T)
    return normalised(logits.repeat_interleave(K, dim=1) + log_precision.mT[:, :, None, :], context)


def propagated_variance(weights: Tensor, precision: Tensor) -> Tensor:
    """Equation (5): (B, H, T).

    Args:
        weights: (B, H, T, T).
        precision: lam of each key, (B, T) for all heads or (B, H, T) for each, > 0.
    """
    variance = 1 / (precision[:, None] if precision.dim() == 2 else precision)
    return (weights.square() @ variance[..., None])[..., 0]


def key_variance(v: Tensor, context: SequenceContext) -> Tensor:
    """Equation (6): (B, H, T, K), >= 0; 0 where one key or none may be read."""
    allowed = context.allowed[:, None].to(v.dtype)
    return residual_variance(allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1), v, context)


def weight_sums(weights: Tensor, v: Tensor, context: SequenceContext) -> SiluMoments:
    """Equation (7), over centred values, with sum a u as the mean: what ``sandwich_precision`` takes."""
    centred, squares = centre_on_first(v, context), weights.square()
    return SiluMoments(
        weights @ centred,
        weights.sum(dim=-1),
        squares.sum(dim=-1),
        squares @ centred,
        squares @ centred.square(),
    )
