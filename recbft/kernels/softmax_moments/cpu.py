"""Softmax moments with an analytic backward: one pass over the weights in each direction, nothing kept but them.

With u = v - mu, mu the value of the first token of the history (any constant gives the same S), so that
sum_j a u = e - mu, and G = g_e - 2 g_S (e - mu), the gradient of the weights and what follows from it are

    dA = G u' + g_S (u^2)' - 2 g_n n^2 a        dl = a * (dA - sum_j a dA)                     (1)
    dq = dl k / sqrt(K)    dk = dl' q / sqrt(K)    dv = a' G + 2 u * (a' g_S)                  (2)
    d key_bias_j = sum over heads and tokens of dl_tj                                          (3)

When causal, lag_tj = position_t - position_j and softmax ignores what is constant along j: the recency decay is a key
bias -position_j * log_decay like log precision. In both directions it is a bias per pair, as is the bias
that is given.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.belief import SequenceContext
from recbft.core.statistics import Moments
from recbft.kernels.dropout import scaled_mask


def decline(q: Tensor, *, dropout: float) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    return "moments with attention dropout are served by the reference" if dropout > 0 else None


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
    key_bias, pair_bias = _biases(q, context, log_precision, log_decay, bias)
    first = context.first + torch.arange(v.shape[0])[:, None] * v.shape[2]  # (B, T) row of v's tokens, batch by batch
    return Moments(
        *_SoftmaxMoments.apply(q, k, v, key_bias, pair_bias, context.mask(q.dtype), context.blind, first, 0.0)
    )


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
    key_bias, pair_bias = _biases(q, context, log_precision, log_decay, bias)
    mean: Tensor = _SoftmaxMoments.apply(
        q, k, v, key_bias, pair_bias, context.mask(q.dtype), context.blind, None, dropout
    )
    return mean


def _biases(
    q: Tensor,
    context: SequenceContext,
    log_precision: Tensor | None,
    log_decay: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The bias per key, (B, T), and per pair, (B or 1, H or 1, T, T)."""
    if log_decay is None:
        return log_precision, bias
    if not context.causal:
        decay = (context.lag.to(q.dtype) * log_decay[..., None])[:, None]
        return log_precision, decay if bias is None else bias + decay
    decay = context.position.to(q.dtype) * -log_decay
    return decay if log_precision is None else log_precision + decay, bias


class _SoftmaxMoments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        pair_bias: Tensor | None,
        mask: Tensor,
        blind: Tensor | None,
        first: Tensor | None,
        dropout: float,
    ) -> Any:
        B, H, T, K = q.shape
        # The products below would each copy a transposed view.
        values = v
        q, k, v = (q * (1 / math.sqrt(K))).contiguous(), k.contiguous(), v.contiguous()
        bias = mask[:, None]  # (B, 1, T, T), or per head
        for part in (pair_bias, None if key_bias is None else key_bias[:, None, None, :]):
            bias = bias if part is None else bias + part
        logits = torch.matmul(q, k.transpose(-2, -1)).add_(bias)
        weights = torch.softmax(logits, dim=-1, out=logits)
        if blind is not None:  # a row without a key is NaN so far
            weights.masked_fill_(blind[:, None, :, None], 0.0)
        ctx.with_moments = first is not None
        ctx.pair_shape = None if pair_bias is None else pair_bias.shape
        if first is None:
            drop = scaled_mask(weights, dropout) if dropout > 0 else None
            kept = weights if drop is None else weights * drop
            ctx.save_for_backward(q, k, v, weights, kept, *([] if drop is None else [drop]))
            return torch.matmul(kept, v)
        mean = torch.matmul(weights, v)
        # No clamp: a weight row sums to one, so its squares sum to at least 1 / T unless the row is empty.
        size = torch.linalg.vector_norm(weights, dim=-1).square_().reciprocal_()
        if blind is not None:
            size.masked_fill_(blind[:, None, :], 0.0)
        tokens = values.transpose(1, 2).reshape(B * T, H * K)
        centre = tokens.index_select(0, first.view(-1)).view(B, T, H, K).transpose(1, 2)
        centred = torch.sub(v, centre, out=torch.empty_like(v))
        offset = mean - centre
        if blind is not None:
            offset.masked_fill_(blind[:, None, :, None], 0.0)
        squares = centred.square()
        residual = torch.matmul(weights, squares).addcmul_(offset, offset, value=-1).clamp_(min=0)
        ctx.save_for_backward(q, k, v, weights, centred, squares, offset, size)
        return mean, residual, size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, *grad_moments: Tensor) -> Any:
        q, k, v, weights, *moments = ctx.saved_tensors
        if ctx.with_moments:
            centred, squares, offset, size = moments
            grad_residual, grad_size = grad_moments
            grad_value = torch.addcmul(grad_mean, grad_residual, offset, value=-2)  # G
            g, g_residual, u, squares, a = (
                x.reshape(-1, *x.shape[2:]) for x in (grad_value, grad_residual, centred, squares, weights)
            )
            d_weights = torch.bmm(g, u.transpose(1, 2)).baddbmm_(g_residual, squares.transpose(1, 2)).view_as(weights)
            d_weights.addcmul_(weights, (grad_size * size.square())[..., None], value=-2)
            d_v = torch.bmm(a.transpose(1, 2), g).addcmul_(torch.bmm(a.transpose(1, 2), g_residual), u, value=2)
            d_v = d_v.view_as(v)
        else:
            kept, *drop = moments
            d_weights = torch.matmul(grad_mean, v.transpose(-2, -1))
            for factor in drop:
                d_weights *= factor
            d_v = torch.matmul(kept.transpose(-2, -1), grad_mean)
        d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)  # (1)
        scale = 1 / math.sqrt(q.shape[-1])
        d_q = torch.matmul(d_logits, k).mul_(scale)
        d_k = torch.matmul(d_logits.transpose(-2, -1), q)  # q is kept scaled
        d_key = d_logits.sum(dim=(1, 2)) if ctx.needs_input_grad[3] else None  # (3)
        d_pair = d_logits.sum_to_size(ctx.pair_shape) if ctx.needs_input_grad[4] else None
        return d_q, d_k, d_v, d_key, d_pair, None, None, None, None
