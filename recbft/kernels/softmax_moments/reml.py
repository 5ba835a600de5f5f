"""Softmax attention and its REML precision at once: in one kernel where there is one, else one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recbft import core
from recbft.autograd.eager import eagerly
from recbft.core import SequenceContext
from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path, late
from recbft.kernels.filter_step import reml_precision
from recbft.kernels.softmax_moments import compiled, decline_triton


@eagerly
def softmax_reml(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    prior_scale: float,
    prior_dof: float,
    cap: float,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The mean of ``core.softmax_moments`` and what ``core.reml_precision`` makes of its other moments.

    Args:
        q, k, v, context, log_precision, log_decay, dropout, bias: as in ``core.softmax_moments``.
        prior_scale, prior_dof, cap: as in ``core.reml_precision``.
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``compiled`` and ``composed`` force one.

    Returns:
        Mean and precision, (B, H, T, K) each.

    Raises:
        ValueError: unknown ``impl``, or the forced path cannot serve the call (the message says why).
    """
    path = dispatch.choose(impl, PATHS, q, dropout=dropout, read_by_all=context.read_by_all)
    biases = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    prior = {"prior_scale": prior_scale, "prior_dof": prior_dof, "cap": cap}
    mean, precision = path(q, k, v, context, dropout=dropout, **biases, **prior)
    return mean, precision


def _composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    prior_scale: float,
    prior_dof: float,
    cap: float,
    **moments: Any,
) -> tuple[Tensor, Tensor]:
    mean, S, n = core.softmax_moments(q, k, v, context, **moments)
    return mean, reml_precision(S, n, prior_scale=prior_scale, prior_dof=prior_dof, cap=cap)


PATHS = {
    "triton": Path(late("softmax_moments", "softmax_reml"), "cuda", decline_triton, opened=True, takes_halves=True),
    "compiled": Path(lambda: compiled.softmax_reml, "cpu", compiled.decline, opened=True),
    "composed": Path(lambda: _composed, takes_halves=True),
}
