"""Softmax moments in C (``kernel.c``, which has the equations): weights live in the cache and are never kept.

Forward keeps the operands, n and the log of the sums; backward forms the weights again. Memory grows with T,
but for a bias per pair and its gradient, and short histories that share a row cost what they would alone. A recency
decay is a bias per key when causal and taken by the lag else.

Shapes: B rows, H heads, T tokens that read, J keys, K head width.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import Moments, SequenceContext
from recbft.core.observation_precision import epsilon_of
from recbft.core.regimes import BiasTerms
from recbft.kernels import by_tokens, c_library, readable
from recbft.kernels.c_library import pointer
from recbft.kernels.c_library.heads import (
    Biases,
    HeadView,
    Packing,
    PairBias,
    Spans,
    Terms,
    check,
    over_heads,
    pairs_readable,
    run,
    spans_of,
)

MEAN, MOMENTS, REML = range(3)


def decline(q: Tensor, *, dropout: float, read_by_all: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if dropout > 0:
        return "attention dropout is left to another path"
    return c_library.decline(q)


def softmax_moments(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, **call: Any) -> Moments:
    """The same as the reference."""
    return Moments(*_attend(q, k, v, context, _Estimate(MOMENTS), **call))


def softmax_mean(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, **call: Any) -> Tensor:
    """The mean alone, by the same arithmetic."""
    mean: Tensor = _attend(q, k, v, context, _Estimate(MEAN), **call)
    return mean


def softmax_reml(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    prior_scale: float,
    prior_dof: float,
    cap: float,
    **call: Any,
) -> tuple[Tensor, Tensor]:
    """The mean and its REML precision; S is not written."""
    estimate = _Estimate(REML, prior_dof, prior_dof * prior_scale + epsilon_of(v), cap)
    mean, precision = _attend(q, k, v, context, estimate, **call)
    return mean, precision


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    estimate: _Estimate,
    *,
    dropout: float,
    bias: Tensor | BiasTerms | None = None,
    **more: Tensor | None,
) -> Any:
    """What the kernel gives for an estimate."""
    assert dropout == 0
    terms, shares, scale = None, None, None
    if isinstance(bias, BiasTerms):
        terms, shares, scale, bias = bias, bias.shares, bias.scale, None
    biases = _biases(q, context, bias, **more)
    return applied(_Softmax, q, k, v, *biases, shares, scale, spans_of(context), estimate, terms)


class _Estimate(NamedTuple):
    kind: int
    prior_dof: float = 0.0
    constant: float = 0.0  # c of equation (2.8)
    cap: float = 0.0


def _biases(
    q: Tensor,
    context: SequenceContext,
    bias: Tensor | None,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The bias per key, (B, J); where it is not one, the log decay per row, (B,); and the bias per pair."""
    bias = pairs_readable(bias, q, context.segment.shape[1])
    if log_precision is not None:
        log_precision = log_precision.to(q.dtype).expand(context.segment.shape)
    if log_decay is None:
        return log_precision, None, bias
    log_decay = log_decay.to(q.dtype)
    if not context.causal:
        return log_precision, log_decay.reshape(-1).expand(q.shape[0]), bias
    decay = context.position.to(q.dtype) * -log_decay  # softmax ignores what is constant along the keys
    return decay if log_precision is None else log_precision + decay, None, bias


class _Call(ctypes.Structure):
    _fields_ = (
        ("of", Packing),
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "nu", "constant", "cap")),
        *((name, HeadView) for name in ("q", "k", "v")),
        ("biases", Biases),
        *((name, HeadView) for name in ("mean", "second")),
        *((name, ctypes.c_void_p) for name in ("size", "log_total")),
        *((name, HeadView) for name in ("grad_mean", "grad_second")),
        ("grad_size", ctypes.c_void_p),
        *((name, HeadView) for name in ("d_q", "d_k", "d_v")),
    )


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        log_decay: Tensor | None,
        bias: Tensor | None,
        shares: Tensor | None,
        scale: Tensor | None,
        spans: Spans,
        estimate: _Estimate,
        terms: BiasTerms | None,
    ) -> Any:
        check(q, k, v, spans)
        heads = [readable(x.to(q.dtype)) for x in (q, k, v)]
        biases = [None if x is None else x.contiguous() for x in (key_bias, log_decay)]
        mean = by_tokens(q)
        second = mean if estimate.kind == MEAN else by_tokens(q)
        size, log_total = (q.new_empty(q.shape[:3]) for _ in range(2))
        kept = *heads, *biases, mean, second, size, log_total
        call = _call(spans, estimate, *kept)
        call.biases.pairs = (
            PairBias.of(bias, q, k.shape[2]) if terms is None else PairBias.made_of(Terms.of(terms, spans.causal))
        )
        run(c_library.library().softmax_forward, call, q)
        ctx.spans, ctx.estimate, ctx.terms = spans, estimate, terms
        ctx.save_for_backward(bias, shares, *kept)
        if estimate.kind == MEAN:
            return mean
        return (mean, second, size) if estimate.kind == MOMENTS else (mean, second)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_second: Tensor | None = None, grad_size: Tensor | None = None
    ) -> Any:
        bias, shares, *kept = ctx.saved_tensors
        q, k, v, *_ = kept
        grad_mean = readable(grad_mean)
        grad_second = grad_mean if grad_second is None else readable(grad_second)
        grad_size = None if grad_size is None else grad_size.contiguous()
        d_q, d_k, d_v = (by_tokens(x) for x in (q, k, v))
        call = _call(ctx.spans, ctx.estimate, *kept)
        call.grad_mean, call.grad_second = map(HeadView.of, (grad_mean, grad_second))
        call.d_q, call.d_k, call.d_v = map(HeadView.of, (d_q, d_k, d_v))
        call.grad_size, call.biases.pairs = pointer(grad_size), PairBias.of(bias, q, k.shape[2])
        key, decay, pairs = ctx.needs_input_grad[3:6]
        room, d_shares, d_scale = call.biases.make_room((key, False, decay, pairs), q, k.shape[2]), None, None
        if ctx.terms is not None:
            d_shares, d_scale = q.new_empty(*q.shape[:3], shares.shape[-1]), q.new_empty(q.shape[:3])
            call.biases.pairs = PairBias.made_of(Terms.of(ctx.terms, ctx.spans.causal, d_shares, d_scale))
        run(c_library.library().softmax_backward, call, q)
        d_shares = None if d_shares is None else d_shares.sum(dim=1)
        d_scale = None if d_scale is None else d_scale.sum()
        d_key, _, d_decay, d_pairs = over_heads(room, bias)
        return d_q, d_k, d_v, d_key, d_decay, d_pairs, d_shares, d_scale, None, None, None


def _call(spans: Spans, estimate: _Estimate, *kept: Any) -> _Call:
    """What both directions know; the tensors stay with the caller."""
    q, k, v, key_bias, log_decay, mean, second, size, log_total = kept
    call = _Call(Packing.of(spans, q.shape[1], q.shape[3]), estimate.kind, 1 / math.sqrt(q.shape[-1]))
    call.nu, call.constant, call.cap = estimate.prior_dof, estimate.constant, estimate.cap
    call.q, call.k, call.v, call.mean, call.second = map(HeadView.of, (q, k, v, mean, second))
    call.biases = Biases.of(key_bias, None, log_decay, PairBias())
    call.size, call.log_total = map(pointer, (size, log_total))
    return call
