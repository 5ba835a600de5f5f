"""Softmax moments in C (``compiled/softmax.c``, which has the equations): weights live in the cache and are never kept.

Forward keeps the operands, n and the log of the sums; backward forms the weights again. Memory grows with T, and
short histories that share a row cost what they would alone. A recency decay is a bias per key when causal and taken
by the lag else.

Shapes: B rows, H heads, T tokens that read, J keys, K head width.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.belief import SequenceContext
from recbft.core.observation import epsilon_of
from recbft.core.statistics import Moments
from recbft.kernels import compiled
from recbft.kernels.compiled import pointer
from recbft.kernels.transforms import applied, untransformed

MEAN, MOMENTS, REML = range(3)


def decline(q: Tensor, *, dropout: float, read_by_all: bool = True, bias: bool = False) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if dropout > 0:
        return "attention dropout is left to another path"
    return "a bias per pair is left to another path" if bias else compiled.decline(q)


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
    """The same as the reference."""
    assert dropout == 0 and bias is None
    biases = _biases(q, context, log_precision, log_decay)
    return Moments(*applied(_Softmax, q, k, v, *biases, spans_of(context), _Estimate(MOMENTS)))


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
    """The mean alone, by the same arithmetic."""
    assert dropout == 0 and bias is None
    biases = _biases(q, context, log_precision, log_decay)
    mean: Tensor = applied(_Softmax, q, k, v, *biases, spans_of(context), _Estimate(MEAN))
    return mean


def softmax_reml(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    dropout: float,
    bias: Tensor | None = None,
    prior_scale: float,
    prior_dof: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """The mean and its REML precision; S is not written."""
    assert dropout == 0 and bias is None
    biases = _biases(q, context, log_precision, log_decay)
    estimate = _Estimate(REML, prior_dof, prior_dof * prior_scale + epsilon_of(v), cap)
    mean, precision = applied(_Softmax, q, k, v, *biases, spans_of(context), estimate)
    return mean, precision


class Spans(NamedTuple):
    """Which token may read which keys; int32."""

    start: Tensor  # (B, T) the columns from the first to the last that a token may read
    stop: Tensor
    gaps: Tensor  # (B, T) how many of these it may not
    first: Tensor  # (B, J) the column of the first token of a key's history
    token_history: Tensor  # (B, T), -1 for padding
    token_place: Tensor  # (B, T) the positions
    key_history: Tensor  # (B, J)
    key_place: Tensor
    causal: bool


@untransformed
def spans_of(context: SequenceContext) -> Spans:
    """Found once per batch and kept with it for all layers."""
    kept = vars(context)  # where functools.cached_property keeps what it found
    if "_compiled_spans" not in kept:
        kept["_compiled_spans"] = _find_spans(context)
    spans: Spans = kept["_compiled_spans"]
    return spans


def _find_spans(context: SequenceContext) -> Spans:
    keys = context.segment, context.position
    tokens = context.readers
    key_history, key_place, history, place = (x.to(torch.int32).contiguous() for x in (*keys, *tokens))
    start, stop, gaps = (torch.empty_like(history) for _ in range(3))
    found = (history, place, key_history, key_place, start, stop, gaps)
    sizes = [ctypes.c_int64(n) for n in (*history.shape, key_history.shape[1], context.causal)]
    compiled.library().softmax_spans(*sizes, *(ctypes.c_void_p(pointer(x)) for x in found))
    first = context.first.to(torch.int32).contiguous()
    return Spans(start, stop, gaps, first, history, place, key_history, key_place, context.causal)


class _Estimate(NamedTuple):
    kind: int
    prior_dof: float = 0.0
    constant: float = 0.0  # c of equation (2)
    cap: float = 0.0


def _biases(
    q: Tensor, context: SequenceContext, log_precision: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The bias per key, (B, J), and, where it is not one, the log decay per row, (B,)."""
    if log_precision is not None:
        log_precision = log_precision.to(q.dtype).expand(context.segment.shape)
    if log_decay is None:
        return log_precision, None
    log_decay = log_decay.to(q.dtype)
    if not context.causal:
        return log_precision, log_decay.reshape(-1).expand(q.shape[0])
    decay = context.position.to(q.dtype) * -log_decay  # softmax ignores what is constant along the keys
    return decay if log_precision is None else log_precision + decay, None


class _View(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token")))

    @classmethod
    def of(cls, x: Tensor) -> _View:
        return cls(x.data_ptr(), *x.stride()[:3])


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "T", "J", "K", "kind")),
        *((name, ctypes.c_float) for name in ("scale", "nu", "constant", "cap")),
        *((name, _View) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("key_bias", "log_decay")),
        *((name, ctypes.c_void_p) for name in Spans._fields[:8]),
        ("causal", ctypes.c_int64),
        *((name, _View) for name in ("mean", "second")),
        *((name, ctypes.c_void_p) for name in ("size", "log_total")),
        *((name, _View) for name in ("grad_mean", "grad_second")),
        ("grad_size", ctypes.c_void_p),
        *((name, _View) for name in ("d_q", "d_k", "d_v")),
        *((name, ctypes.c_void_p) for name in ("d_key_bias", "d_log_decay")),
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
        spans: Spans,
        estimate: _Estimate,
    ) -> Any:
        _check(q, k, v, spans)
        q, k, v = (_readable(x.to(q.dtype)) for x in (q, k, v))
        key_bias = None if key_bias is None else key_bias.contiguous()
        log_decay = None if log_decay is None else log_decay.contiguous()
        mean = _by_tokens(q)
        second = mean if estimate.kind == MEAN else _by_tokens(q)
        size, log_total = (q.new_empty(q.shape[:3]) for _ in range(2))
        call = _call(q, k, v, key_bias, log_decay, spans, estimate, mean, second, size, log_total)
        _run(compiled.library().softmax_forward, call, q, k)
        ctx.spans, ctx.estimate = spans, estimate
        ctx.save_for_backward(q, k, v, key_bias, log_decay, mean, second, size, log_total)
        if estimate.kind == MEAN:
            return mean
        return (mean, second, size) if estimate.kind == MOMENTS else (mean, second)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_second: Tensor | None = None, grad_size: Tensor | None = None
    ) -> Any:
        q, k, v, key_bias, log_decay, *results = ctx.saved_tensors
        grad_mean = _readable(grad_mean)
        grad_second = grad_mean if grad_second is None else _readable(grad_second)
        grad_size = None if grad_size is None else grad_size.contiguous()
        d_q, d_k, d_v = (_by_tokens(x) for x in (q, k, v))
        wants_key, wants_decay = ctx.needs_input_grad[3:5]
        d_key = k.new_empty(k.shape[:3]) if wants_key else None
        d_decay = q.new_empty(q.shape[:3]) if wants_decay else None
        call = _call(q, k, v, key_bias, log_decay, ctx.spans, ctx.estimate, *results)
        call.grad_mean, call.grad_second, call.grad_size = *map(_View.of, (grad_mean, grad_second)), pointer(grad_size)
        call.d_q, call.d_k, call.d_v = map(_View.of, (d_q, d_k, d_v))
        call.d_key_bias, call.d_log_decay = pointer(d_key), pointer(d_decay)
        _run(compiled.library().softmax_backward, call, q, k)
        d_key = None if d_key is None else d_key.sum(dim=1)
        d_decay = None if d_decay is None else d_decay.sum(dim=(1, 2))
        return d_q, d_k, d_v, d_key, d_decay, None, None


def _check(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> None:
    """What C would not notice."""
    shapes = {"keys": k.shape, "values": v.shape}
    expected = (*q.shape[:2], spans.key_history.shape[1], q.shape[3])
    for name, shape in shapes.items():
        if shape != expected:
            raise ValueError(f"{name} have shape {tuple(shape)}; queries and context ask for {expected}")
    if q.shape[0::2] != spans.token_history.shape:
        raise ValueError(f"queries have shape {tuple(q.shape)}, and the context {tuple(spans.token_history.shape)}")
    if {k.device, v.device, spans.start.device} != {q.device}:
        raise ValueError(f"queries are on {q.device}, keys on {k.device} and values on {v.device}")


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    log_decay: Tensor | None,
    spans: Spans,
    estimate: _Estimate,
    mean: Tensor,
    second: Tensor,
    size: Tensor,
    log_total: Tensor,
) -> _Call:
    """What both directions know; the tensors stay with the caller."""
    B, H, T, K = q.shape
    call = _Call(B, H, T, k.shape[2], K, estimate.kind, 1 / math.sqrt(K))
    call.nu, call.constant, call.cap = estimate.prior_dof, estimate.constant, estimate.cap
    call.q, call.k, call.v, call.mean, call.second = map(_View.of, (q, k, v, mean, second))
    call.key_bias, call.log_decay = pointer(key_bias), pointer(log_decay)
    for name, found in zip(Spans._fields[:8], spans[:8], strict=True):
        setattr(call, name, pointer(found))
    call.causal = spans.causal
    call.size, call.log_total = pointer(size), pointer(log_total)
    return call


def _run(function: Any, call: _Call, q: Tensor, k: Tensor) -> None:
    if function(ctypes.byref(call)):
        raise MemoryError(f"no memory to work on a head of {q.shape[2]} tokens; lower max_length")


def _readable(x: Tensor) -> Tensor:
    """The same with elements of a token side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_tokens(like: Tensor) -> Tensor:
    """Room for (B, H, T, K), laid out as the layers around have it: (B, T, H, K)."""
    B, H, T, K = like.shape
    return like.new_empty(B, T, H, K).transpose(1, 2)
