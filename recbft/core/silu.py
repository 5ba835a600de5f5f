"""Pointwise SiLU attention (HSTU): the innovation, and the sums that a sandwich variance needs.

    s_tj = q_t . k_j / sqrt(K) + bias_tj + b[lag_tj] + log_precision_j + lag_tj * log_decay      (1)
    a_tj = SiLU(s_tj) / N over the keys j that t may read, N a constant length                   (2)
    e = sum a v    s1 = sum a    s2 = sum a^2    w1 = sum a^2 v    w2 = sum a^2 v^2               (3)

The weights are not normalised and may be negative. Nothing of shape (T, T, K) is ever built.

Source: Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152); Precision Tracked Transformer
(arXiv 2605.18832), section 5.1 and appendix D.
Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.core.belief import SequenceContext
from recbft.core.statistics import SiluMoments
from recbft.kernels import silu_moments as paths
from recbft.kernels.dispatch import choose
from recbft.kernels.silu_moments import reference
from recbft.kernels.silu_moments.bias import total_bias


@eagerly
def silu_moments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    length: int,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    impl: str = "auto",
) -> SiluMoments:
    """The sums of (3).

    Args:
        q, k, v: queries, keys and values, (B, H, T, K); what is added to the scores may be in a wider type.
        context: which token may read which.
        length: N of (2), > 0.
        bias: added to the scores, broadcastable to (B, H, T, T).
        lag_bias: b, (L,), the bias of each lag in positions; the last is that of all longer ones.
        log_precision: log of each key's scalar precision, (B, T).
        log_decay: log of the recency decay, a scalar, <= 0, multiplied by the lag in positions.
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``compiled``, ``cpu`` and ``reference``
            force one. Fewer queries than keys, as ``core.Readers`` has them, are for ``compiled`` and ``reference``.

    Raises:
        ValueError: unknown ``impl``, or the forced path cannot serve the call; ``length`` is not positive.
    """
    _check_length(length)
    path = choose(impl, paths.PATHS, q, read_by_all=context.read_by_all)
    biases = {"bias": bias, "lag_bias": lag_bias, "log_precision": log_precision, "log_decay": log_decay}
    sums: SiluMoments = path(q, k, v, context, length=length, **biases)
    return sums


@eagerly
def silu_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    length: int,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The first sum of (3) alone, for layers that keep no precision: the same as ``silu_moments(...).mean``."""
    _check_length(length)
    path = choose(impl, paths.MEAN_PATHS, q, read_by_all=context.read_by_all)
    biases = {"bias": bias, "lag_bias": lag_bias, "log_precision": log_precision, "log_decay": log_decay}
    mean: Tensor = path(q, k, v, context, length=length, **biases)
    return mean


def silu_weights(
    q: Tensor,
    k: Tensor,
    context: SequenceContext,
    *,
    length: int,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The weights of (2) written out, (B, H, T, T), 0 where a token may not read; arguments as above."""
    biases = {"bias": bias, "lag_bias": lag_bias, "log_precision": log_precision, "log_decay": log_decay}
    total = total_bias(q, context, **biases)
    return reference.silu_weights(q, k, context, length=length, bias=total)


def _check_length(length: int) -> None:
    if length <= 0:
        raise ValueError(f"length is {length}; give the constant that divides the weights, > 0")
