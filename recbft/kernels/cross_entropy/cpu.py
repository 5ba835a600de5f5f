"""Full cross-entropy in blocks of positions: the (N, V) logits never exist, gradients are formed on the way.

A block of logits that stays in the cache becomes exp(l - shift) in place; with z its row sums and r = 1 / (N z),

    loss = mean(shift + log z - l_target)
    dX   = r * (exp(l - shift) W) - W_target / N        dW = exp(l - shift)' (r X) - scatter(X_target / N)     (1)

so probabilities are never normalised one by one. The shift is 0 where no logit can leave the range in which exp is
safe (|l| <= max|x| max|w|), the row maximum elsewhere. Several seeds are taken one after another.

Shapes: N positions, V items, D width, S seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.kernels.per_seed.cpu import product

BLOCK_ELEMENTS = 1_600_000  # about 6 MB in float32: the block of logits stays in a shared cache
SAFE_LOGIT = 40.0  # exp(+-40) times a vocabulary of any size is far from float32's limits


def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same as the reference."""
    loss: Tensor = _FullCrossEntropy.apply(states, weight, target)
    return loss


def full_cross_entropies(states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int]) -> Tensor:
    """The same as the reference."""
    losses: Tensor = _FullCrossEntropies.apply(states, weight, target, counts)
    return losses


class _FullCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with_gradients = states.requires_grad or weight.requires_grad
        d_states = torch.empty_like(states) if with_gradients else None
        d_weight = torch.zeros_like(weight) if with_gradients else None
        loss = _mean_loss(states, weight, target, d_states, d_weight)
        if with_gradients:
            ctx.save_for_backward(d_states, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight = ctx.saved_tensors
        return d_states * grad, d_weight * grad, None


class _FullCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int]) -> Tensor:
        d_states, d_weight = torch.empty_like(states), torch.zeros_like(weight)
        ctx.counts = list(counts)
        parts = (states.split(ctx.counts), weight, target.split(ctx.counts), d_states.split(ctx.counts), d_weight)
        ctx.save_for_backward(d_states, d_weight)
        return torch.stack([_mean_loss(*own, product=product) for own in zip(*parts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight = ctx.saved_tensors
        each = grad.repeat_interleave(torch.tensor(ctx.counts))[:, None]
        return d_states * each, d_weight * grad[:, None, None], None, None


def _mean_loss(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    d_states: Tensor | None,
    d_weight: Tensor | None,
    *,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The loss; its gradients go into ``d_states`` (overwritten) and ``d_weight`` (added to) where they are given.

    ``product`` is another way to x W' than PyTorch's own.
    """
    N, V = states.shape[0], weight.shape[0]
    rows = max(16, min(N, BLOCK_ELEMENTS // V))
    block = states.new_empty(rows, V)
    target_weight = weight[target]  # (N, D)
    loss = states.new_zeros((), dtype=torch.float64).sub_((states * target_weight).sum(dtype=torch.float64))
    bounded = bool(_largest_norm(states) * _largest_norm(weight) <= SAFE_LOGIT)
    for first in range(0, N, rows):
        x = states[first : first + rows]
        logits = torch.mm(x, weight.T, out=block[: x.shape[0]]) if product is None else product(x, weight)
        if not bounded:
            shift = logits.amax(dim=1, keepdim=True)
            logits -= shift
            loss += shift.sum(dtype=torch.float64)
        odds = logits.exp_()
        total = odds.sum(dim=1, keepdim=True)
        loss += total.log().sum(dtype=torch.float64)
        if d_states is not None and d_weight is not None:
            share = 1 / (N * total)
            d_x = d_states[first : first + rows]
            if product is None:
                torch.mm(odds, weight, out=d_x).mul_(share)
                d_weight.addmm_(odds.T, x * share)
            else:
                torch.mul(product(odds, weight.T), share, out=d_x)
                d_weight += product((x * share).T, odds.T).T
    if d_states is not None and d_weight is not None:
        d_states.add_(target_weight, alpha=-1 / N)
        d_weight.index_add_(0, target, states.detach(), alpha=-1 / N)
    return (loss / N).to(states.dtype)


def _largest_norm(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return norms.amax()
