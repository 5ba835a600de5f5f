"""Softmax attention: the weighted mean of the values, its moments, and the REML precision that follows from them.

Equations (2.1) to (2.8); the references are ``core.softmax_moments_ref`` and ``core.softmax_mean_ref``.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, bfloat16, float16, float32, is_autocast_enabled

from recbft import core
from recbft.autograd.boundaries import eagerly
from recbft.autograd.transforms import transformed
from recbft.core import Moments, SequenceContext
from recbft.kernels import dispatch
from recbft.kernels.dispatch import SOME_READ, Path, choose, late
from recbft.kernels.filter_step import reml_precision
from recbft.kernels.softmax_moments import c
from recbft.kernels.softmax_moments import torch as by_torch

# Of the Triton path, by what shared memory holds.
WIDEST_HEAD = {float32: 128, float16: 256, bfloat16: 256}


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
        dropout: probability of dropping a weight of (2.4); (2.5) and (2.6) always use the undropped weights.
        bias: any other bias of (2.2), finite, (B or 1, H or 1, T, T).
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``c``, ``torch`` and ``reference`` force
            one. Fewer queries than keys, as ``core.Readers`` has them, are for ``c`` and ``reference``.

    Returns:
        The moments, the mean in the type of the values; a token that may read nothing (padding) gets zeros.

    Raises:
        ValueError: unknown ``impl``, or the forced path cannot serve the call (the message says why).
    """
    biases = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    moments: Moments = _attend(MOMENTS, impl, q, k, v, context, dropout=dropout, **biases)
    return moments


@eagerly
def softmax_mean(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, impl: str = "auto", **call: Any
) -> Tensor:
    """Equation (2.4) alone, for layers that keep no precision: the same numbers as ``softmax_moments(...).mean``.

    Arguments as those of ``softmax_moments``; where ``takes_terms``, the bias may be its terms.
    """
    mean: Tensor = _attend(MEAN, impl, q, k, v, context, **call)
    return mean


@eagerly
def softmax_reml(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, impl: str = "auto", **call: Any
) -> tuple[Tensor, Tensor]:
    """The mean of ``softmax_moments`` and what ``reml_precision`` makes of its other moments, in one pass.

    Args:
        q, k, v, context: as in ``softmax_moments``.
        impl: ``auto`` takes the fastest path that serves the call; ``triton``, ``c`` and ``composed`` force one.
        call: what else ``softmax_mean`` takes, and ``prior_scale``, ``prior_dof`` and ``cap`` of ``reml_precision``.

    Returns:
        Mean and precision, (B, H, T, K) each.
    """
    mean, precision = _attend(REML, impl, q, k, v, context, **call)
    return mean, precision


@eagerly
def takes_terms(x: Tensor, *, dropout: float) -> bool:
    """Whether what attends to a normalised input by ``auto`` takes ``core.regimes.BiasTerms`` for a bias of pairs."""
    closed = transformed() or is_autocast_enabled(x.device.type)
    return x.device.type == "cpu" and not closed and c.decline(x, dropout=dropout) is None


def _attend(
    paths: dict[str, Path],
    impl: str,
    *inputs: Any,
    log_decay: Tensor | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> Any:
    q, _, _, context = inputs
    if log_decay is not None and log_decay.numel() != 1 and log_decay.shape != (q.shape[0], 1):
        raise ValueError(f"log_decay has shape {tuple(log_decay.shape)}; give a scalar tensor, or (B, 1) per row")
    path = choose(impl, paths, q, dropout=dropout, read_by_all=context.read_by_all)
    return path(*inputs, log_decay=log_decay, dropout=dropout, **more)


def _decline_triton(q: Tensor, *, dropout: float, read_by_all: bool) -> str | None:
    if not read_by_all:
        return SOME_READ
    if dropout > 0:
        return "moments with attention dropout are served by the reference"
    dtype = str(q.dtype).removeprefix("torch.")
    if q.dtype not in WIDEST_HEAD:
        return f"serves float32, float16 and bfloat16, got {dtype}"
    if q.dtype == bfloat16 and dispatch.interpreted():
        return "Triton's interpreter multiplies bfloat16 as if it were integers; take float16 or float32 there"
    if q.shape[-1] > WIDEST_HEAD[q.dtype]:
        return f"serves heads up to {WIDEST_HEAD[q.dtype]} wide in {dtype}, got {q.shape[-1]}"
    return None


def _composed(*inputs: Any, prior_scale: float, prior_dof: float, cap: float, **moments: Any) -> tuple[Tensor, Tensor]:
    mean, S, n = softmax_moments(*inputs, **moments)
    return mean, reml_precision(S, n, prior_scale=prior_scale, prior_dof=prior_dof, cap=cap)


def _triton(name: str) -> Path:
    return Path(late("softmax_moments", name), "cuda", _decline_triton, opened=True, takes_halves=True)


MOMENTS = {
    "triton": _triton("softmax_moments"),
    "c": Path(lambda: c.softmax_moments, "cpu", c.decline, opened=True),
    "torch": Path(lambda: by_torch.softmax_moments, "cpu", by_torch.decline, opened=True),
    "reference": Path(lambda: core.softmax_moments_ref),
}
MEAN = {
    "triton": _triton("softmax_mean"),
    "c": Path(lambda: c.softmax_mean, "cpu", c.decline, opened=True),
    "torch": Path(lambda: by_torch.softmax_mean, "cpu", by_torch.decline_mean, opened=True),
    "reference": Path(lambda: core.softmax_mean_ref),
}
REML = {
    "triton": _triton("softmax_reml"),
    "c": Path(lambda: c.softmax_reml, "cpu", c.decline, opened=True),
    "composed": Path(lambda: _composed, takes_halves=True),
}
