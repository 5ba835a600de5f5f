"""Softmax moments on a GPU, in Triton: nothing of T x T tokens is ever stored.

The forward is one kernel, the backward two (``triton_passes``); all walk over tiles of tokens and
form the weights as they go, from values that are centred before (``triton_tiles``). Which tiles need a visit is found
on the device, once per batch (``triton_tiles``). Inputs may be float32, float16 or bfloat16 with any strides; the mean
has the type of the values, S and n are float32. Only a bias per pair that wants a gradient takes memory by T x T, as it
does itself.

Shapes: B rows, H heads, T tokens, K head width, W the power of two that holds it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import Moments, SequenceContext
from recbft.core.observation_precision import epsilon_of
from recbft.kernels import by_tokens, dispatch
from recbft.kernels.softmax_moments.triton_passes import forward_kernel, key_kernel, query_kernel
from recbft.kernels.softmax_moments.triton_tiles import columns_kernel, spans_kernel

SPANS_TILE, COLUMNS_TILE = 32, 64


class Tile(NamedTuple):
    """How a kernel is cut and run."""

    own: int  # tokens of the tile that a program owns
    other: int  # and of those that it walks over
    warps: int
    stages: int
    registers: int | None = None  # that a thread may have, where more would leave room for fewer programs


# By W, in half precision, of the forward kernel there where another is faster, and in single precision. Those of width
# 64 are the fastest of nine each and of five on an H100, the others have few instructions per pair of tokens with few
# registers spilled. Four warps for 64 tokens: products then leave a token's row to one warp, and its maximum and sums
# need no barrier.
HALF_TILES = {
    16: Tile(64, 64, 4, 2),
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 3),
    128: Tile(64, 32, 8, 1),
    256: Tile(32, 16, 4, 1),
}
FORWARD_HALF_TILES = {64: Tile(64, 64, 4, 2, registers=168)}
SINGLE_TILES = {16: Tile(64, 32, 4, 1), 32: Tile(64, 32, 4, 1), 64: Tile(64, 32, 4, 1), 128: Tile(16, 16, 4, 1)}


class Spans(NamedTuple):
    """What ``spans_kernel`` finds of a batch; int32."""

    home: Tensor  # (B, T)
    place: Tensor  # (B, T) the positions
    read: Tensor  # (3, B, T) start, stop and gaps of what each token reads
    readers: Tensor  # (3, B, T) the same of those that read it
    causal: bool


def softmax_moments(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, **call: Any) -> Moments:
    """The same as the reference."""
    mean, size, residual = _attend(q, k, v, context, True, **call)
    return Moments(mean, residual, size)


def softmax_mean(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, **call: Any) -> Tensor:
    """The mean alone, by the same arithmetic."""
    return _attend(q, k, v, context, False, **call)[0]


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
    """The mean and its REML precision, float32, from one kernel; S and n are not written."""
    reml = _Reml(float(prior_dof), prior_dof * prior_scale + epsilon_of(v), float(cap))
    mean, precision = _attend(q, k, v, context, reml, **call)
    return mean, precision


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    moments: bool | _Reml,
    *,
    dropout: float,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What ``_SoftmaxMoments`` gives."""
    assert dropout == 0
    q, k = q.to(v.dtype), k.to(v.dtype)
    found: tuple[Tensor, ...] = applied(
        _SoftmaxMoments, q, k, v, log_precision, log_decay, bias, spans_of(context), moments
    )
    return found


def spans_of(context: SequenceContext) -> Spans:
    """Which token reads which; found once per batch."""
    return context.keep(
        "spans in Triton", lambda: _find_spans(context.segment, context.position, causal=context.causal)
    )


def _find_spans(segment: Tensor, position: Tensor, *, causal: bool) -> Spans:
    B, T = segment.shape
    home, place = (_output(segment, B, T, dtype=torch.int32) for _ in range(2))
    read, readers = (_output(segment, 3, B, T, dtype=torch.int32) for _ in range(2))
    strides = {"s_b": segment.stride(0), "s_t": segment.stride(1), "p_b": position.stride(0), "p_t": position.stride(1)}
    scalars = strides | {"B": B, "T": T, "CAUSAL": causal, "TILE": SPANS_TILE}
    _launch(spans_kernel, B * triton.cdiv(T, SPANS_TILE), (segment, position, home, place, read, readers), scalars)
    return Spans(home, place, read, readers, causal)


class _Reml(NamedTuple):
    """How S and n become a precision, equation (2.8) of the forward kernel."""

    nu: float = 0.0
    c: float = 0.0
    cap: float = 0.0


class _SoftmaxMoments(torch.autograd.Function):
    """(e,); (e, n, S) where ``moments`` is True, and (e, r) where it says how."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_precision: Tensor | None,
        log_decay: Tensor | None,
        bias: Tensor | None,
        spans: Spans,
        moments: bool | _Reml,
    ) -> tuple[Tensor, ...]:
        mean, lse = by_tokens(v), _output(v, *v.shape[:3])
        offset = by_tokens(v, torch.float32 if v.dtype == torch.float32 else torch.float16)
        size = _output(v, *v.shape[:3]) if moments else None
        residual = by_tokens(v, torch.float32) if moments is True else None
        precision = by_tokens(v, torch.float32) if isinstance(moments, _Reml) else None
        statistics = (offset, lse, size, residual, precision)
        ctx.reml = moments._asdict() if isinstance(moments, _Reml) else _Reml()._asdict()
        in_products = offset.dtype  # bfloat16 has too few digits for the difference in S
        inputs = (q, k, v, log_precision, log_decay, bias)
        call = _Call.of(*inputs, spans=spans, in_products=in_products, squares=size is not None, forward=True)
        call.run(forward_kernel, spans.read, v, mean, *statistics, **_strides("v", "bhtk", v), **ctx.reml)
        ctx.save_for_backward(*inputs, *spans[:4], *statistics)
        ctx.causal, ctx.whole = spans.causal, moments is True
        ctx.set_materialize_grads(False)
        if size is not None and residual is not None:
            return mean, size, residual
        return (mean,) if precision is None else (mean, precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor | None, *others: Tensor | None) -> Any:
        inputs, (home, place, read, readers) = ctx.saved_tensors[:6], ctx.saved_tensors[6:10]
        spans, statistics = Spans(home, place, read, readers, ctx.causal), ctx.saved_tensors[10:]
        q, _, v, log_precision, log_decay, bias = inputs
        wants_precision, wants_decay, wants_bias = ctx.needs_input_grad[3:6]
        g_size, g_residual = others if ctx.whole else (None, None)
        g_precision = others[0] if others and not ctx.whole else None
        gradients = g_mean, g_size, g_residual, g_precision
        B, H, T, _ = q.shape
        spreads = g_residual is not None or g_precision is not None
        call = _Call.of(*inputs, spans=spans, in_products=v.dtype, squares=spreads)
        d_q, d_k, d_v, pulled = (by_tokens(v) for _ in range(4))
        spread = by_tokens(v) if spreads else None
        delta = _in_products(v, B, H, T)
        delta = _output(v, B, H, T) if delta is None else delta
        push = None if g_size is None and g_precision is None else _output(v, B, H, T)
        d_decay = _output(v, B, H, triton.cdiv(T, call.scalars["OWN"])) if wants_decay else None
        d_bias = bias.new_zeros(B, H, T, T) if wants_bias else None
        call.run(
            query_kernel,
            *(spans.read, *gradients, *statistics),
            *(d_q, pulled, spread, delta, push, d_bias),
            **_strides("e", "bhtk", g_mean),
            **_strides("n", "bht", g_size),
            **_strides("s", "bhtk", g_residual),
            **_strides("r", "bhtk", g_precision),
            **ctx.reml,
        )
        d_terms = _output(v, B, H, T) if wants_precision else None
        _, lse, *_ = statistics
        call.run(key_kernel, spans.readers, lse, pulled, spread, delta, push, d_k, d_v, d_terms, d_decay)
        if d_terms is not None:
            d_terms = d_terms.sum(dim=1).to(log_precision.dtype)
        if d_decay is not None:
            d_decay = d_decay.sum() if log_decay.numel() == 1 else d_decay.sum(dim=(1, 2))
            d_decay = d_decay.view(log_decay.shape).to(log_decay.dtype)
        if d_bias is not None:
            d_bias = d_bias.sum_to_size(bias.shape)
        return d_q, d_k, d_v, d_terms, d_decay, d_bias, None, None


class _Call(NamedTuple):
    """What all passes take: tensors in their order, and the rest by name."""

    tensors: tuple[Tensor | None, ...]
    scalars: dict[str, Any]

    @classmethod
    def of(cls, *inputs: Any, spans: Spans, in_products: torch.dtype, squares: bool, forward: bool = False) -> _Call:
        """The call of a function of these inputs; its columns are worked out here, in the type of the products."""
        q, k, v, log_precision, log_decay, bias = inputs
        B, H, T, K = q.shape
        columns = _columns(v, log_precision, log_decay, spans, in_products, squares=squares)
        scalars: dict[str, Any] = _strides("q", "bhtk", q) | _strides("k", "bhtk", k)
        scalars["d_b"] = _row_stride(log_decay)
        scalars |= _strides("x", "bhtj", None if bias is None else bias.expand(B, H, T, T))
        scalars |= {"B": B, "H": H, "T": T, "scale": math.log2(math.e) / math.sqrt(K)}
        scalars |= {"K": K, "W": _width(K), "CAUSAL": spans.causal}
        scalars["PRECISION"] = "ieee" if dispatch.interpreted() else "tf32x3"
        scalars |= _tiles(T, _width(K), q, with_bias=bias is not None, forward=forward)
        decay = None if spans.causal else log_decay  # else it is in the terms of the columns
        return cls((q, k, *columns, decay, bias, spans.home, spans.place), scalars)

    def run(self, kernel: Any, *tensors: Tensor | None, **more: float) -> None:
        """Run a kernel for every tile of every head."""
        programs = self.scalars["B"] * self.scalars["H"] * triton.cdiv(self.scalars["T"], self.scalars["OWN"])
        _launch(kernel, programs, (*self.tensors, *tensors), {**self.scalars, **more})


def _columns(
    v: Tensor,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    spans: Spans,
    dtype: torch.dtype,
    *,
    squares: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Centred values, their squares where asked for, and what columns add to logits, if anything, for a product too."""
    B, H, T, K = v.shape
    in_terms = log_decay if spans.causal else None
    centred, squared = by_tokens(v, dtype), by_tokens(v, dtype) if squares else None
    terms = None if log_precision is None and in_terms is None else _output(v, B, T)
    wide = None if terms is None else _in_products(v, B, T)
    tensors = (v, log_precision, in_terms, spans.home, spans.place, centred, squared, terms, wide)
    scalars: dict[str, Any] = _strides("v", "bhtk", v) | _strides("p", "bt", log_precision)
    scalars |= {"d_b": _row_stride(log_decay), "root": math.sqrt(K)}
    scalars |= {"H": H, "T": T, "K": K, "W": _width(K), "TILE": COLUMNS_TILE}
    _launch(columns_kernel, B * H * triton.cdiv(T, COLUMNS_TILE), tensors, scalars)
    return centred, squared, terms, wide


def _launch(kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], scalars: dict[str, Any]) -> None:
    if programs > 0:
        kernel[(programs,)](*tensors, **scalars)


def _strides(letter: str, axes: str, x: Tensor | None) -> dict[str, int]:
    """Strides by the names the kernels give them; zeros for what is not there."""
    return {f"{letter}_{axis}": 0 if x is None else x.stride(n) for n, axis in enumerate(axes)}


def _row_stride(log_decay: Tensor | None) -> int:
    return 0 if log_decay is None or log_decay.numel() == 1 else log_decay.stride(0)


def _width(K: int) -> int:
    return max(16, int(triton.next_power_of_2(K)))


def _tiles(T: int, W: int, like: Tensor, *, with_bias: bool = False, forward: bool = False) -> dict[str, int]:
    """How the kernels of a pass are cut and run."""
    # Where operands of products lie in registers beside all else, tiles are smaller.
    in_registers = dispatch.capability(like) is not None and not dispatch.on_hopper(like)
    if like.dtype == torch.float32:
        own, other, warps, stages, registers = SINGLE_TILES[W]
        if in_registers:
            own, other = min(own, 2_048 // W), 16
    else:
        found = FORWARD_HALF_TILES.get(W) if forward and not (in_registers or with_bias) else None
        own, other, warps, stages, registers = found or HALF_TILES[W]
        if in_registers or (with_bias and W <= 32):  # with a bias four warps would spill 336 bytes a thread
            other = min(other, 32)
        if with_bias:  # of three stages a multiprocessor has room for one program
            stages = min(stages, 2)
    short = max(16, triton.next_power_of_2(T))
    tile = {"OWN": min(own, short), "OTHER": min(other, short), "num_warps": warps, "num_stages": stages}
    return tile if registers is None else tile | {"maxnreg": registers}


def _in_products(like: Tensor, *shape: int) -> Tensor | None:
    """Memory for numbers that a row or column has in common, if they enter by products: beside heads in half precision.

    In single precision products are more often the bottleneck. The interpreter's products of bfloat16 are wrong.
    """
    if like.dtype == torch.float32:
        return None
    return _output(like, *shape, 16, dtype=torch.float16 if dispatch.interpreted() else torch.bfloat16)


def _output(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)
