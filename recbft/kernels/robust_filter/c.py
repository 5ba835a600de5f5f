"""Isotropic robust filter attention in C (``kernel.c``, which has the equations).

Weights live in the cache and are never kept, so that memory grows with T. What depends on the lag is a table by lag;
real elapsed times, of which every pair has its own, are left to the plain form.

Shapes: B rows, H heads, T tokens, K complex coordinates per head, L lags.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.complex_pairs import as_complex, real
from recbft.autograd.transforms import applied, once_differentiable, transformed
from recbft.core.belief import SequenceContext
from recbft.kernels import by_tokens, c_library, readable
from recbft.kernels.c_library import pointer
from recbft.kernels.c_library.heads import HeadView, Packing, Spans, check, run, spans_of
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Setting, Variant, turns_of
from recbft.kernels.robust_filter.reference import Tables, tables_of


def decline(q: Tensor, *, dropout: float = 0.0, by_position: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if dropout > 0:
        return "attention dropout is left to another path"
    if not by_position:
        return "real elapsed times are left to another path"
    if q.dtype != torch.complex64:
        return f"serves complex64, got {str(q.dtype).removeprefix('torch.')}"
    return c_library.missing()


def robust_filter(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, *, key_bias: Tensor | None, dropout: float, with_evidence: bool
) -> tuple[Tensor, Tensor | None]:
    """The same as the reference with scalars (H,)."""
    context, dynamics, clock, variant = setting
    assert dropout == 0 and clock.by_position
    d = Dynamics(*(x.float() for x in dynamics))
    turns, back = turns_of(d.frequency, clock), None
    outside = turns[0].requires_grad or transformed()  # frequencies that torch.func may ask about
    if outside:
        asks, reads = turns
        q, k = q * asks, k * reads
        if variant.rotate_values:
            v, back = v * reads, asks.conj()
    kappa = (d.dof + q.shape[-1]) / q.shape[-1]
    tables = _tables(context, clock, d, variant)
    bias = None if key_bias is None else key_bias.float().expand(context.segment.shape)
    how = _How(variant.kernel == "student", variant.rotate_values, with_evidence)
    spans = spans_of(context)
    found = applied(
        _RobustFilter,
        *map(real, (q, k, v)),
        *tables,
        kappa,
        d.temperature,
        bias,
        () if outside else turns,
        spans,
        how,
    )
    mean = as_complex(found[0])
    return mean if back is None else mean * back, found[1] if with_evidence else None


def _tables(context: SequenceContext, clock: Clock, dynamics: Dynamics, variant: Variant) -> Tables:
    """By lag, (H, L)."""
    longest = clock.lag.shape[-1] - 1
    if not clock.in_columns and context.position.numel():
        longest = int(context.position.max() - context.position.min())
    lags = torch.arange(longest + 1, dtype=torch.float32)[None, None, None]
    return Tables(*(x[0, :, 0] for x in tables_of(lags, dynamics, variant)))


class _How(NamedTuple):
    student: bool
    turns_values: bool
    with_evidence: bool


SCALARS = (*Tables._fields, "kappa", "temperature")


class _Call(ctypes.Structure):
    _fields_ = (
        ("of", Packing),
        *((name, ctypes.c_int64) for name in ("student", "turns_values", "L")),
        *((name, HeadView) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("turn_query", "turn_key")),
        *((name, ctypes.c_int64) for name in ("turn_query_row", "turn_key_row")),
        *((name, ctypes.c_void_p) for name in (*SCALARS, "key_bias")),
        ("mean", HeadView),
        *((name, ctypes.c_void_p) for name in ("evidence", "log_total")),
        ("grad_mean", HeadView),
        ("grad_evidence", ctypes.c_void_p),
        *((name, HeadView) for name in ("d_q", "d_k", "d_v")),
        *((f"d_{name}", ctypes.c_void_p) for name in (*SCALARS, "key_bias")),
    )


class _RobustFilter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        log_precision: Tensor,
        sharpness: Tensor,
        kappa: Tensor,
        temperature: Tensor,
        key_bias: Tensor | None,
        turns: tuple[Tensor, ...],
        spans: Spans,
        how: _How,
    ) -> tuple[Tensor, ...]:
        check(q, k, v, spans)
        heads = [readable(x) for x in (q, k, v)]
        scalars = [x.contiguous() for x in (log_decay, log_precision, sharpness, kappa, temperature)]
        key_bias = None if key_bias is None else key_bias.contiguous()
        mean, log_total = by_tokens(q), q.new_empty(q.shape[:3])
        evidence = torch.empty_like(log_total) if how.with_evidence else None
        kept = *heads, *scalars, key_bias, log_total, *(real(x).contiguous() for x in turns)
        call = _call(spans, how, *kept)
        call.mean, call.evidence = HeadView.of(mean), pointer(evidence)
        run(c_library.library().robust_filter_forward, call, q)
        ctx.save_for_backward(*kept)
        ctx.constants = spans, how
        return (mean,) if evidence is None else (mean, evidence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_evidence: Tensor | None = None) -> Any:
        q, k, v, *scalars = ctx.saved_tensors[: 3 + len(SCALARS)]
        call = _call(*ctx.constants, *ctx.saved_tensors)
        grad_mean = readable(grad_mean)
        grad_evidence = None if grad_evidence is None else grad_evidence.contiguous()
        call.grad_mean, call.grad_evidence = HeadView.of(grad_mean), pointer(grad_evidence)
        d_q, d_k, d_v = (by_tokens(x) for x in (q, k, v))
        call.d_q, call.d_k, call.d_v = map(HeadView.of, (d_q, d_k, d_v))
        sums = [x.new_empty(q.shape[0], *x.shape) for x in scalars]
        d_bias = q.new_empty(k.shape[:3]) if ctx.needs_input_grad[8] else None
        for name, x in zip((*SCALARS, "key_bias"), (*sums, d_bias), strict=True):
            setattr(call, f"d_{name}", pointer(x))
        run(c_library.library().robust_filter_backward, call, q)
        d_scalars = (x.sum(dim=0) for x in sums)
        return d_q, d_k, d_v, *d_scalars, None if d_bias is None else d_bias.sum(dim=1), None, None, None


def _call(spans: Spans, how: _How, *kept: Any) -> _Call:
    """What both directions know; the tensors stay with the caller."""
    q, k, v, *named = kept
    call = _Call(Packing.of(spans, q.shape[1], q.shape[3]), how.student, how.turns_values, named[0].shape[1])
    call.q, call.k, call.v = map(HeadView.of, (q, k, v))
    names = (*SCALARS, "key_bias", "log_total")
    for name, x in zip(names, named, strict=False):
        setattr(call, name, pointer(x))
    if turns := named[len(names) :]:  # (B or 1, H, T, K)
        call.turn_query, call.turn_key = map(pointer, turns)
        call.turn_query_row, call.turn_key_row = (x.stride(0) if x.shape[0] > 1 else 0 for x in turns)
    return call
