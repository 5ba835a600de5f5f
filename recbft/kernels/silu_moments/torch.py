"""SiLU moments with an analytic backward: scores are kept, weights are made again from them.

With g the gradient of e, and g1, g2, h1, h2 those of sum a, sum a^2, sum a^2 v and sum a^2 v^2:

    dA = g v' + g1 + 2 a * (g2 + h1 v' + h2 (v^2)')        ds = silu'(s) * dA / N                     (a)
    dq = ds k / sqrt(K)    dk = ds' q / sqrt(K)    dv = a' g + (a^2)' h1 + 2 v * ((a^2)' h2)          (b)

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import SequenceContext, SiluMoments


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None
) -> SiluMoments:
    """The same as the reference."""
    return SiluMoments(*applied(_SiluMoments, q, k, v, bias, _shares(context, q, length)))


def silu_mean(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None) -> Tensor:
    """The mean alone, by the same arithmetic."""
    mean: Tensor = applied(_SiluMean, q, k, v, bias, _shares(context, q, length))
    return mean


def _shares(context: SequenceContext, q: Tensor, length: int) -> Tensor:
    """1 / N where a token may read and 0 elsewhere, (B, 1, T, T)."""
    return context.allowed[:, None].to(q.dtype).mul_(1 / length)


class _SiluMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shares: Tensor) -> tuple[Tensor, ...]:
        scores = _scores(q, k, bias)
        weights = F.silu(scores).mul_(shares)
        squares = weights.square()
        ctx.save_for_backward(q, k, v, scores, weights, shares)
        ctx.bias_shape = None if bias is None else bias.shape
        return (
            torch.matmul(weights, v),
            weights.sum(dim=-1),
            squares.sum(dim=-1),
            torch.matmul(squares, v),
            torch.matmul(squares, v.square()),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g1: Tensor, g2: Tensor, h1: Tensor, h2: Tensor) -> Any:
        q, k, v, scores, weights, shares = ctx.saved_tensors
        second = v.square()
        d_weights = torch.matmul(h1, v.mT)
        d_weights += torch.matmul(h2, second.mT)
        d_weights.add_(g2[..., None]).mul_(weights).mul_(2).add_(g1[..., None])
        d_weights += torch.matmul(g, v.mT)
        squares = weights.square().mT
        d_v = torch.matmul(squares, h2).mul_(v).mul_(2)
        d_v += torch.matmul(squares, h1)
        d_v += torch.matmul(weights.mT, g)
        d_q, d_k, d_bias = _through_scores(ctx, d_weights, q, k, scores, shares)
        return d_q, d_k, d_v, d_bias, None


class _SiluMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shares: Tensor) -> Tensor:
        scores = _scores(q, k, bias)
        weights = F.silu(scores).mul_(shares)
        ctx.save_for_backward(q, k, v, scores, weights, shares)
        ctx.bias_shape = None if bias is None else bias.shape
        return torch.matmul(weights, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, scores, weights, shares = ctx.saved_tensors
        d_v = torch.matmul(weights.mT, g)
        d_q, d_k, d_bias = _through_scores(ctx, torch.matmul(g, v.mT), q, k, scores, shares)
        return d_q, d_k, d_v, d_bias, None


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.matmul(q * (1 / math.sqrt(q.shape[-1])), k.mT)
    return scores if bias is None else scores.add_(bias)


def _through_scores(
    ctx: Any, d_weights: Tensor, q: Tensor, k: Tensor, scores: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and the bias from those of the weights: the right of (a), and (b)."""
    d_scores = torch.ops.aten.silu_backward(d_weights, scores).mul_(shares)
    scale = 1 / math.sqrt(q.shape[-1])
    d_q = torch.matmul(d_scores, k).mul_(scale)
    d_k = torch.matmul(d_scores.mT, q).mul_(scale)
    return d_q, d_k, d_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[3] else None
