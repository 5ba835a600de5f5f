"""SiLU moments in C (``kernel.c``, which has the equations): weights live in the cache and are never kept.

Shapes: B rows, H heads, T tokens that read, J keys, K head width, L lags.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import SequenceContext, SiluMoments
from recbft.kernels import by_tokens, c_library, readable
from recbft.kernels.c_library import pointer
from recbft.kernels.c_library.heads import (
    Biases,
    HeadView,
    Packing,
    PairBias,
    Spans,
    check,
    over_heads,
    pairs_readable,
    run,
    spans_of,
)


def decline(q: Tensor, *, read_by_all: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    return c_library.decline(q)


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> SiluMoments:
    """The same as the reference of all biases that ``silu_moments`` takes."""
    return SiluMoments(*applied(_Silu, q, k, v, *_biases(q, context, **biases), spans_of(context), length, False))


def silu_mean(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> Tensor:
    """The mean alone, by the same arithmetic."""
    mean: Tensor = applied(_Silu, q, k, v, *_biases(q, context, **biases), spans_of(context), length, True)
    return mean


def _biases(
    q: Tensor,
    context: SequenceContext,
    *,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Of keys, (B, J), of lags, (L,), the log decay of each row, (B,), and of pairs."""
    key = None if log_precision is None else log_precision.to(q.dtype).expand(context.segment.shape)
    by_lag = None if lag_bias is None else lag_bias.to(q.dtype)
    decay = None if log_decay is None else log_decay.to(q.dtype).reshape(-1).expand(q.shape[0])
    return key, by_lag, decay, pairs_readable(bias, q, context.segment.shape[1])


class _Call(ctypes.Structure):
    _fields_ = (
        ("of", Packing),
        ("mean_alone", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "share")),
        *((name, HeadView) for name in ("q", "k", "v")),
        ("biases", Biases),
        *((name, HeadView) for name in ("mean", "square_mean", "square_second")),
        *((name, ctypes.c_void_p) for name in ("weight_sum", "square_sum")),
        *((name, HeadView) for name in ("grad_mean", "grad_square_mean", "grad_square_second")),
        *((name, ctypes.c_void_p) for name in ("grad_weight_sum", "grad_square_sum")),
        *((name, HeadView) for name in ("d_q", "d_k", "d_v")),
    )


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        lag_bias: Tensor | None,
        log_decay: Tensor | None,
        bias: Tensor | None,
        spans: Spans,
        length: int,
        mean_alone: bool,
    ) -> Any:
        check(q, k, v, spans)
        q, k, v = (readable(x.to(q.dtype)) for x in (q, k, v))
        biases = [None if x is None else x.contiguous() for x in (key_bias, lag_bias, log_decay)]
        call = _call(spans, length, mean_alone, q, k, v, bias, *biases)
        mean = by_tokens(q)
        call.mean = HeadView.of(mean)
        outputs: Any = mean
        if not mean_alone:
            square_mean, square_second = by_tokens(q), by_tokens(q)
            weight_sum, square_sum = q.new_empty(q.shape[:3]), q.new_empty(q.shape[:3])
            call.square_mean, call.square_second = HeadView.of(square_mean), HeadView.of(square_second)
            call.weight_sum, call.square_sum = pointer(weight_sum), pointer(square_sum)
            outputs = (mean, weight_sum, square_sum, square_mean, square_second)
        run(c_library.library().silu_forward, call, q)
        ctx.save_for_backward(q, k, v, bias, *biases)
        ctx.constants = spans, length, mean_alone
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, *others: Tensor) -> Any:
        q, k, v, bias, *_ = ctx.saved_tensors
        call = _call(*ctx.constants, *ctx.saved_tensors)
        grad_mean = readable(grad_mean)
        call.grad_mean = HeadView.of(grad_mean)
        if others:
            g1, g2 = (x.contiguous() for x in others[:2])
            h1, h2 = (readable(x) for x in others[2:])
            call.grad_weight_sum, call.grad_square_sum = pointer(g1), pointer(g2)
            call.grad_square_mean, call.grad_square_second = HeadView.of(h1), HeadView.of(h2)
        d_q, d_k, d_v = (by_tokens(x) for x in (q, k, v))
        call.d_q, call.d_k, call.d_v = map(HeadView.of, (d_q, d_k, d_v))
        room = call.biases.make_room(ctx.needs_input_grad[3:7], q, k.shape[2])
        run(c_library.library().silu_backward, call, q)
        return d_q, d_k, d_v, *over_heads(room, bias), None, None, None


def _call(spans: Spans, length: int, mean_alone: bool, *kept: Any) -> _Call:
    """What both directions know; the tensors stay with the caller."""
    q, k, v, bias, key, lag, decay = kept
    call = _Call(Packing.of(spans, q.shape[1], q.shape[3]), mean_alone, 1 / math.sqrt(q.shape[-1]), 1 / length)
    call.q, call.k, call.v = map(HeadView.of, (q, k, v))
    call.biases = Biases.of(key, lag, decay, PairBias.of(bias, q, k.shape[2]))
    return call
