"""Isotropic robust filter attention with an analytic backward: of the pairs, only the weights and the misfit are kept.

With x = P R2 / nu, y = log(1 + x) (student) or x (gaussian), a = softmax(tau L + b), A = a E, and g, g_e the gradients
of the rotated mean and of the evidence:

    da = (g v') E        dl = a * (da - sum_j a da)        dp = g_e exp(L)                            (1)
    dy = -kappa (tau dl + dp)        dx = dy / (1 + x) or dy        dR2 = dx P / nu                   (2)
    dq = -2 (E dR2) k + 2 q sum_j dR2     dk = -2 (E dR2)' q + 2 k sum_t E^2 dR2     dv = A' g        (3)
    d log E = 2 E dR2 (E |k|^2 - q . k) + da a                                                        (4)
    d log P = tau dl + dp        d (P / nu) = dx x / (P / nu)                                         (5)
    d tau = sum dl L        d kappa = -sum (tau dl + dp) y        d b_j = sum over heads and tokens of dl_tj (6)

where L in (6) is log P - kappa y. (4) forms q . k anew: taken from R2 it would leave rounding where E is 0, for a long
lag to multiply. Tables that all rows share have gradients summed over the rows. The batch is worked through in blocks
of rows, so that what is made on the way stays in the cache.

Shapes: B rows, H heads, T tokens, K complex coordinates per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.complex_pairs import as_complex, real
from recbft.autograd.transforms import applied, decline_dropout, once_differentiable, transformed
from recbft.core.belief import SequenceContext
from recbft.kernels.dropout import scaled_mask
from recbft.kernels.layout import by_tokens
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Variant, in_columns, turns_of
from recbft.kernels.robust_filter.isotropic import lag_tables

_At = tuple[slice, slice, slice]  # rows, readers, keys

BLOCK_ELEMENTS = 2**18  # pairs of tokens worked on at once
TILE = 64  # readers worked on at once: few enough to leave out most later keys, many enough for a fast product


def robust_filter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    dynamics: Dynamics,
    clock: Clock,
    variant: Variant,
    *,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    with_evidence: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The same as the reference with scalars (H,)."""
    tables = lag_tables(clock, dynamics, variant)
    query, key = turns_of(dynamics.frequency, clock)
    turned = _Turns(query, key, key, query) if variant.rotate_values else _Turns(query, key)
    outside, by_autograd = turned, query.requires_grad or transformed()
    if by_autograd:  # a learned unit of time, or frequencies that torch.func may ask about
        q, k, v = (x if by is None else x * by for x, by in ((q, turned.query), (k, turned.key), (v, turned.value)))
        turned = _Turns()
    kappa = (dynamics.dof + q.shape[-1]) / q.shape[-1]
    mean, *evidence = applied(
        _RobustFilter,
        q,
        k,
        v,
        *tables,
        kappa,
        dynamics.temperature,
        key_bias,
        turned,
        context.allowed,
        context.mask(kappa.dtype),
        context.blind,
        _Options(variant.kernel == "student", with_evidence, dropout, context.causal and in_columns(context)),
    )
    if by_autograd and outside.back is not None:
        mean = mean * outside.back.conj()
    return mean, evidence[0] if with_evidence else None


def decline(q: Tensor, *, dropout: float = 0.0, by_position: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    return decline_dropout(dropout)


class _Options(NamedTuple):
    student: bool
    with_evidence: bool
    dropout: float
    in_columns: bool  # no token reads a later column


class _Turns(NamedTuple):
    """exp(-i w t) for what is turned, (B or 1, H, T, K); ``back`` is what the mean is turned back by."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    back: Tensor | None = None


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
        turned: _Turns,
        allowed: Tensor,
        mask: Tensor,
        blind: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        B, H, T, _ = q.shape
        decay, scale, power = log_decay.exp(), temperature[:, None, None], -kappa[:, None, None]
        base, steepness = log_precision * scale, power * scale
        tiles = _tiles(T, options.in_columns)
        weights, misfit = ([kappa.new_empty(B, H, *_size(tile)) for tile in tiles] for _ in range(2))
        evidence = kappa.new_empty(B, H, T)
        mean = by_tokens(q)
        drop = scaled_mask(kappa.new_empty(B, H, T, T), options.dropout) if options.dropout > 0 else None
        keep = allowed.to(kappa.dtype) if options.with_evidence else None
        for rows in _blocks(B, H * T * T):
            query, key, value = _turn(q, turned.query, rows), _turn(k, turned.key, rows), _turn(v, turned.value, rows)
            query_square, key_square = _squared(query), _squared(key).mT
            found = torch.empty_like(value)
            bias = mask[rows] if key_bias is None else mask[rows] + key_bias[rows, None]  # (b, T, T)
            for (t, j), all_weights, all_misfits in zip(tiles, weights, misfit, strict=True):
                at = (rows, t, j)
                a, y, E = all_weights[rows], all_misfits[rows], _of(decay, at)
                _product(query[:, :, t], key[:, :, j].mT, out=y)
                y.addcmul_(E, key_square[..., j], value=-0.5)
                torch.addcmul(query_square[:, :, t], y, E, value=-2, out=y)  # R2
                y.clamp_(min=0).mul_(_of(sharpness, at))  # near numbers' difference can round below 0
                if options.student:
                    y.log1p_()
                if keep is not None:
                    evidence[rows, :, t] = _reweighted(y, log_precision, power, keep, at).sum(dim=-1)
                torch.add(bias[:, None, t, j], _of(base, at), out=a).addcmul_(y, steepness)
                torch.softmax(a, dim=-1, out=a)
                if blind is not None:  # a row without a key is NaN so far
                    a.masked_fill_(blind[rows, None, t, None], 0.0)
                _product(_kept(a, E, drop, at), value[:, :, j], out=found[:, :, t])
            _turn_back(found, turned.back, rows, out=mean)
        tables = (log_decay, log_precision, sharpness, kappa, temperature)
        ctx.save_for_backward(q, k, v, *tables, *weights, *misfit)
        ctx.turned, ctx.keep, ctx.drop, ctx.options, ctx.tiles = turned, keep, drop, options, tiles
        return (mean, evidence) if options.with_evidence else (mean,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, *grad_evidence: Tensor) -> Any:
        all_q, all_k, all_v, *tables = ctx.saved_tensors[:8]
        pairs = ctx.saved_tensors[8:]  # weights, then misfits, tile by tile
        turned, tiles = ctx.turned, ctx.tiles
        B, H, T, _ = grad_mean.shape
        sums = _Sums(*tables, needs_decay=ctx.needs_input_grad[3])
        d_query, d_key, d_value = (by_tokens(grad_mean) for _ in range(3))
        d_bias = grad_mean.real.new_zeros(B, T) if ctx.needs_input_grad[8] else None
        for rows in _blocks(B, H * T * T):
            q, k, v = _turn(all_q, turned.query, rows), _turn(all_k, turned.key, rows), _turn(all_v, turned.value, rows)
            g = _turn(grad_mean, turned.back, rows)
            key_square = _squared(k).mT
            d_q, d_k, d_v, d_key_square = (torch.empty_like(x) for x in (q, k, v, key_square))
            for (t, j), weights, misfit in zip(tiles, pairs[: len(tiles)], pairs[len(tiles) :], strict=True):
                at, more = (rows, t, j), t.stop < T  # the last readers come first, and set what others add to
                a, y, E = weights[rows], misfit[rows], _of(sums.decay, at)
                kept = _kept(a, E, ctx.drop, at)
                _product(kept.mT, g[:, :, t], out=d_v[:, :, j], add=more)
                d_weights = _kept(g[:, :, t] @ v[:, :, j].mT, E, ctx.drop, at)
                if sums.needs_decay:
                    _gather(torch.mul(d_weights, a, out=kept), sums.by_decay, at)
                dl = torch.ops.aten._softmax_backward_data(d_weights, a, -1, a.dtype)  # (1)
                if d_bias is not None:
                    d_bias[rows, j] += dl.sum(dim=(1, 2))
                dp = _reweighted(y, sums.log_precision, sums.power, ctx.keep, at) if ctx.options.with_evidence else None
                if dp is not None:
                    dp.mul_(grad_evidence[0][rows, :, t, None])
                d_misfit = sums.through_logits(dl, dp, y, at)
                d_residual = sums.through_misfit(d_misfit, y, at, student=ctx.options.student)
                d_query_square = d_residual.sum(dim=-1, keepdim=True)
                d_cross = d_residual.mul_(E)
                if sums.needs_decay:
                    inward = (E * key_square[..., j]).sub_(q[:, :, t] @ k[:, :, j].mT)
                    _gather(inward.mul_(d_cross).mul_(2), sums.by_decay, at)  # (4)
                square = (d_cross * E).sum(dim=-2, keepdim=True)
                d_key_square[..., j] = d_key_square[..., j] + square if more else square
                _product(d_cross, k[:, :, j], out=d_q[:, :, t])
                d_q[:, :, t].addcmul_(q[:, :, t], d_query_square, value=-1)
                _product(d_cross.mT, q[:, :, t], out=d_k[:, :, j], add=more)
            d_k.addcmul_(k, d_key_square.mT, value=-1)
            _turn_back(d_q.mul_(-2), turned.query, rows, out=d_query)  # (3)
            _turn_back(d_k.mul_(-2), turned.key, rows, out=d_key)
            _turn_back(d_v, turned.value, rows, out=d_value)
        return d_query, d_key, d_value, *sums.gradients(), d_bias, None, None, None, None, None


class _Sums:
    """The tables, and what their gradients are made of: sums over the rows that share a table, and per head."""

    def __init__(
        self,
        log_decay: Tensor,
        log_precision: Tensor,
        sharpness: Tensor,
        kappa: Tensor,
        temperature: Tensor,
        *,
        needs_decay: bool,
    ) -> None:
        self.decay, self.log_precision, self.sharpness = log_decay.exp(), log_precision, sharpness
        self.kappa, self.temperature, self.needs_decay = kappa, temperature, needs_decay
        self.power, self.scale = -kappa[:, None, None], temperature[:, None, None]
        # Of dl, of dp, of dx x, and of (4).
        self.by_logit, self.by_evidence, self.by_misfit, self.by_decay = (torch.zeros_like(sharpness) for _ in range(4))
        self.logit_misfit, self.evidence_misfit = torch.zeros_like(kappa), torch.zeros_like(kappa)  # of dl y, of dp y

    def through_logits(self, dl: Tensor, dp: Tensor | None, y: Tensor, at: _At) -> Tensor:
        """dy of (2); overwrites ``dl``."""
        _gather(dl, self.by_logit, at)
        self.logit_misfit += (dl * y).sum(dim=(0, 2, 3))
        d_misfit = dl.mul_(self.power * self.scale)
        if dp is not None:
            _gather(dp, self.by_evidence, at)
            self.evidence_misfit += (dp * y).sum(dim=(0, 2, 3))
            d_misfit.addcmul_(dp, self.power)
        return d_misfit

    def through_misfit(self, d_misfit: Tensor, y: Tensor, at: _At, *, student: bool) -> Tensor:
        """dR2 of (2); overwrites ``d_misfit``."""
        x = torch.expm1(y) if student else y
        d_x = d_misfit.div_(x + 1) if student else d_misfit
        _gather(x * d_x, self.by_misfit, at)
        return d_x.mul_(_of(self.sharpness, at))

    def gradients(self) -> tuple[Tensor, ...]:
        """Of log_decay, log_precision, sharpness, kappa and temperature: (4), (5), (6)."""
        return (
            self.by_decay,
            self.by_logit * self.scale + self.by_evidence,
            self.by_misfit / self.sharpness,
            -(self.temperature * self.logit_misfit + self.evidence_misfit),
            (self.by_logit * self.log_precision).sum(dim=(0, 2, 3)) - self.kappa * self.logit_misfit,
        )


def _tiles(T: int, in_columns: bool) -> list[tuple[slice, slice]]:
    """Readers and the keys they can have, the last readers first: theirs are all keys.

    Others have those in earlier columns, where histories lie in columns, and else all.
    """
    step = -(-T // -(-T // TILE))
    starts = range(step * ((T - 1) // step), -1, -step)
    return [(slice(t, min(t + step, T)), slice(0, min(t + step, T) if in_columns else T)) for t in starts]


def _size(tile: tuple[slice, slice]) -> tuple[int, int]:
    readers, keys = tile
    return readers.stop - readers.start, keys.stop


def _blocks(num_rows: int, per_row: int) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // per_row)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _of(table: Tensor, at: _At) -> Tensor:
    """This part of a table, (b or 1, H, t, j)."""
    rows, t, j = at
    return _rows_of(table, rows)[..., t, j]


def _rows_of(table: Tensor, rows: slice) -> Tensor:
    """These rows of a table; one row stands for all."""
    return table if table.shape[0] == 1 else table[rows]


def _turn(x: Tensor, turn: Tensor | None, rows: slice) -> Tensor:
    """These rows turned, as real coordinates next to each other: (b, H, T, 2 K)."""
    x = x[rows]
    turned = torch.empty(x.shape, dtype=x.dtype)
    return real(turned.copy_(x) if turn is None else torch.mul(x, _rows_of(turn, rows), out=turned))


def _turn_back(x: Tensor, turn: Tensor | None, rows: slice, *, out: Tensor) -> None:
    """The inverse."""
    found, out = as_complex(x), out[rows]
    if turn is None:
        out.copy_(found)
    else:
        torch.mul(found, _rows_of(turn, rows).conj(), out=out)


def _gather(x: Tensor, into: Tensor, at: _At) -> None:
    """Add to the table that all rows share, or to these rows' own."""
    _of(into, at).add_(x.sum(dim=0, keepdim=True) if into.shape[0] == 1 else x)


def _product(x: Tensor, y: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Matrix products of (b, H, ., .), put into ``out`` or added to it."""
    out, x, y = (part.flatten(0, 1) for part in (out, x, y))
    if add:
        out.baddbmm_(x, y)
    else:
        torch.bmm(x, y, out=out)


def _squared(x: Tensor) -> Tensor:
    """Squared lengths, (B, H, T, 1)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_()


def _kept(weights: Tensor, decay: Tensor, drop: Tensor | None, at: _At) -> Tensor:
    """A, or the gradient of a from that of A."""
    rows, t, j = at
    kept = weights * decay
    return kept if drop is None else kept.mul_(drop[rows, :, t, j])


def _reweighted(misfit: Tensor, log_precision: Tensor, power: Tensor, keep: Tensor, at: _At) -> Tensor:
    """exp(L), 0 where a token may not read."""
    rows, t, j = at
    # Zeros put in afterwards: the exponential of -inf takes many times longer than any other.
    return torch.addcmul(_of(log_precision, at), misfit, power).exp_().mul_(keep[rows, None, t, j])
