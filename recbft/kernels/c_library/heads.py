"""Heads of a packed batch as the C sources see them (``heads.h``), and which token may read which keys.

Shapes: B rows, H heads, T tokens that read, J keys, K head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.kernels import c_library, readable
from recbft.kernels.c_library import pointer

if TYPE_CHECKING:  # core picks the kernels that need this file
    from recbft.core.belief import SequenceContext
    from recbft.core.regimes import BiasTerms


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


def spans_of(context: SequenceContext) -> Spans:
    """Found once per batch."""
    return context.keep("spans in C", lambda: _find_spans(context))


def _find_spans(context: SequenceContext) -> Spans:
    keys = context.segment, context.position
    tokens = context.readers
    key_history, key_place, history, place = (x.to(torch.int32).contiguous() for x in (*keys, *tokens))
    start, stop, gaps = (torch.empty_like(history) for _ in range(3))
    found = (history, place, key_history, key_place, start, stop, gaps)
    sizes = [ctypes.c_int64(n) for n in (*history.shape, key_history.shape[1], context.causal)]
    c_library.library().spans_of_tokens(*sizes, *c_library.pointers(*found))
    first = context.first.to(torch.int32).contiguous()
    return Spans(start, stop, gaps, first, history, place, key_history, key_place, context.causal)


class HeadView(ctypes.Structure):
    """A tensor (B, H, tokens, K) whose elements of a token stand side by side."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token")))

    @classmethod
    def of(cls, x: Tensor) -> HeadView:
        """Of a tensor that the caller keeps."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Packing(ctypes.Structure):
    """Sizes, and who reads whom."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "T", "J", "K")),
        *((name, ctypes.c_void_p) for name in Spans._fields[:8]),
        ("causal", ctypes.c_int64),
    )

    @classmethod
    def of(cls, spans: Spans, H: int, K: int) -> Packing:
        """Of heads; the spans stay with the caller."""
        B, T = spans.token_history.shape
        return cls(B, H, T, spans.key_history.shape[1], K, *map(pointer, spans[:8]), spans.causal)


class Terms(ctypes.Structure):
    """A bias per pair that is formed where it is read (``terms.h``), and room for its gradients."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shares", "table", "reach")),
        *((name, ctypes.c_int64) for name in ("num", "tables", "length")),
        *((name, ctypes.c_float) for name in ("mean", "sharpness", "limit", "scale")),
        *((name, ctypes.c_void_p) for name in ("d_shares", "d_scale")),
    )

    @classmethod
    def of(cls, terms: BiasTerms, causal: bool, d_shares: Tensor | None = None, d_scale: Tensor | None = None) -> Terms:
        """Of a bias whose tensors the caller keeps."""
        num = terms.shares.shape[-1]
        # The table's distance, its last, is from the last place that may be read.
        sizes = num, min(num, len(terms.table) - (not causal)), terms.table.shape[-1]
        numbers = terms.mean.item(), 1 / terms.deviation.item(), terms.limit, terms.scale.item()
        read = map(pointer, (terms.shares, terms.table, terms.reach))
        return cls(*read, *sizes, *numbers, pointer(d_shares), pointer(d_scale))


@eagerly
def statistics_of(terms: BiasTerms, context: SequenceContext, *, every: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of a bias before it is standardised, over the pairs of every few rows."""
    spans = spans_of(context)
    sums = torch.zeros(len(spans.start), 3, dtype=torch.float64)
    asked = ctypes.byref(Packing.of(spans, 1, 1)), ctypes.byref(Terms.of(terms, spans.causal)), ctypes.c_int64(every)
    c_library.library().statistics_of_terms(*asked, *c_library.pointers(sums))
    pairs, total, squares = sums.sum(dim=0)
    off = total / pairs.clamp(min=1)
    variance = squares / pairs.clamp(min=1) - off.square()
    return (terms.mean + off).to(terms.mean.dtype), variance.clamp(min=0).to(terms.mean.dtype)


class PairBias(ctypes.Structure):
    """A bias per pair, and room for its gradient."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "token")),
        ("gradient", ctypes.c_void_p),
        ("terms", ctypes.POINTER(Terms)),
    )

    @classmethod
    def made_of(cls, terms: Terms) -> PairBias:
        """Of terms that the caller keeps."""
        return cls(terms=ctypes.pointer(terms))

    @classmethod
    def of(cls, bias: Tensor | None, q: Tensor, num_keys: int) -> PairBias:
        """Of a bias that broadcasts to (B, H, T, J), whose last stride is 1, and that the caller keeps."""
        if bias is None:
            return cls()
        return cls(bias.data_ptr(), *bias.expand(*q.shape[:3], num_keys).stride()[:3])


class Biases(ctypes.Structure):
    """What is added to the products of queries and keys, and room for its gradients."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "lag", "log_decay")),
        ("L", ctypes.c_int64),
        ("pairs", PairBias),
        *((name, ctypes.c_void_p) for name in ("d_key", "d_lag", "d_log_decay")),
    )

    @classmethod
    def of(cls, key: Tensor | None, lag: Tensor | None, log_decay: Tensor | None, pairs: PairBias) -> Biases:
        """Of tensors that the caller keeps: (B, J), (L,) and (B,)."""
        return cls(*map(pointer, (key, lag, log_decay)), 0 if lag is None else len(lag), pairs)

    def make_room(self, wanted: Sequence[bool], q: Tensor, num_keys: int) -> list[Tensor | None]:
        """Room for the gradients of keys, lags, decays and pairs that are wanted, for each head."""
        ends = (num_keys,), (self.L,), (q.shape[2],), (q.shape[2], num_keys)
        room = [q.new_empty(*q.shape[:2], *end) if each else None for each, end in zip(wanted, ends, strict=True)]
        self.d_key, self.d_lag, self.d_log_decay, self.pairs.gradient = map(pointer, room)
        return room


def over_heads(room: list[Tensor | None], bias: Tensor | None) -> list[Tensor | None]:
    """The sums of what ``Biases.make_room`` has been filled with; ``bias`` is that of pairs."""
    *by_name, d_pairs = room
    sums = [None if x is None else x.sum(dim=dim) for x, dim in zip(by_name, ((1,), (0, 1), (1, 2)), strict=True)]
    return [*sums, None if d_pairs is None or bias is None else d_pairs.sum_to_size(bias.shape)]


def pairs_readable(bias: Tensor | None, q: Tensor, num_keys: int) -> Tensor | None:
    """A bias per pair with the keys side by side."""
    if bias is None:
        return None
    bias = bias.to(q.dtype)
    if bias.shape[-1] != num_keys:
        bias = bias.expand(*bias.shape[:-1], num_keys)
    return readable(bias)


def check(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> None:
    """What C would not notice."""
    shapes = {"keys": k.shape, "values": v.shape}
    expected = (*q.shape[:2], spans.key_history.shape[1], q.shape[3])
    for name, shape in shapes.items():
        if shape != expected:
            raise ValueError(f"{name} have shape {tuple(shape)}; queries and context ask for {expected}")
    if q.shape[0::2] != spans.token_history.shape:
        raise ValueError(f"queries have shape {tuple(q.shape)}, and the context {tuple(spans.token_history.shape)}")
    if {q.dtype, k.dtype, v.dtype} != {torch.float32}:
        raise ValueError(f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}; the kernels in C take float32")
    if {k.device, v.device, spans.start.device} != {q.device}:
        raise ValueError(f"queries are on {q.device}, keys on {k.device} and values on {v.device}")


def run(function: Any, call: ctypes.Structure, q: Tensor) -> None:
    """Call one of the functions of heads."""
    if function(ctypes.byref(call)):
        raise MemoryError(f"no memory to work on a head of {q.shape[2]} tokens; lower max_length")
