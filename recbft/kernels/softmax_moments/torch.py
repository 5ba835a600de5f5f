"""Softmax moments with an analytic backward: one pass over the weights in each direction, nothing kept but them.

With u = v - mu, mu the value of the first token of the history (any constant gives the same S), so that
sum_j a u = e - mu, and G = g_e - 2 g_S (e - mu), the gradient of the weights and what follows from it are

    dA = G u' + g_S (u^2)' - 2 g_n n^2 a        dl = a * (dA - sum_j a dA)                     (a)
    dq = dl k / sqrt(K)    dk = dl' q / sqrt(K)    dv = a' G + 2 u * (a' g_S)                  (b)
    d key_bias_j = sum over heads and tokens of dl_tj                                          (c)

When causal, lag_tj = position_t - position_j and softmax ignores what is constant along j: the recency decay is a key
bias -position_j * log_decay like log precision. In both directions it is a bias per pair, as is the bias
that is given.

The weights of long rows are formed and used block by block, while they are in the cache. A block is some tokens of some
rows, against the keys from the first to the last that any of them may read. When a causal row holds its history in
order, the blocks leave out half of the pairs that nothing may read.

Shapes: B rows, H heads, T tokens, K head width; in a block b rows, t tokens and j keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, decline_dropout, once_differentiable
from recbft.core.belief import Moments, SequenceContext
from recbft.kernels.dispatch import SOME_READ
from recbft.kernels.dropout import scaled_mask

SHORT = 100  # rows up to this many tokens are one block: blocks gain nothing there
TOKENS = 50  # of a row in a block
PAIRS = 160_000  # weights in a block, about


def decline(q: Tensor, *, dropout: float, read_by_all: bool = True) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if not read_by_all:
        return SOME_READ
    return "moments with attention dropout are served by the reference" if dropout > 0 else None


def decline_mean(q: Tensor, *, dropout: float, read_by_all: bool = True) -> str | None:
    """The same of the mean alone."""
    return decline_dropout(dropout) if read_by_all else SOME_READ


def softmax_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, dropout: float, **biases: Tensor | None
) -> Moments:
    """The same as the reference."""
    return Moments(*applied(_SoftmaxMoments, q, k, v, *_biases(q, context, **biases), context))


def softmax_mean(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, dropout: float, **biases: Tensor | None
) -> Tensor:
    """The mean alone, by the same arithmetic."""
    mean: Tensor = applied(_SoftmaxMean, q, k, v, *_biases(q, context, **biases), context, dropout)
    return mean


def _biases(
    q: Tensor,
    context: SequenceContext,
    *,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
    bias: Tensor | None = None,
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
        context: SequenceContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = blocks_of(context, num_heads=q.shape[1])
        centre = _first_values(v, context)
        q, k, v = _operands(q, k, v)
        centred = torch.sub(v, centre, out=torch.empty_like(v))
        squares = centred.square()
        mean, residual, offset = (Joined(v, blocks) for _ in range(3))
        size = Joined(v[..., 0], blocks)
        weights = []
        for block in blocks:
            a, blind = _weights(q, k, key_bias, pair_bias, context, block)
            e = torch.matmul(a, v[block.read])
            # No clamp: a weight row sums to one, so its squares sum to at least 1 / T unless the row is empty.
            n = torch.linalg.vector_norm(a, dim=-1).square_().reciprocal_()
            o = e - centre[block.own]
            if blind is not None:
                n.masked_fill_(blind, 0.0)
                o.masked_fill_(blind[..., None], 0.0)
            S = torch.matmul(a, squares[block.read]).addcmul_(o, o, value=-1).clamp_(min=0)
            for whole, part in ((mean, e), (residual, S), (size, n), (offset, o)):
                whole.put(part, *block.own)
            weights.append(a)
        ctx.blocks, ctx.pair_shape = blocks, None if pair_bias is None else pair_bias.shape
        ctx.save_for_backward(q, k, centred, squares, offset.value, size.value, *weights)
        return mean.value, residual.value, size.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_residual: Tensor, grad_size: Tensor) -> Any:
        q, k, centred, squares, offset, size, *weights = ctx.saved_tensors
        gradients = _Gradients(ctx, q, k)
        d_v, d_squares = (Joined.sum(k, ctx.blocks) for _ in range(2))
        grad_value = torch.addcmul(grad_mean, grad_residual, offset, value=-2)  # G
        push = (grad_size * size.square())[..., None]
        for block, a in zip(ctx.blocks, weights, strict=True):
            own, read = block.own, block.read
            parts = grad_value[own], grad_residual[own], centred[read], squares[read], a
            g, g_residual, u, u_squared, a_flat = (x.flatten(0, 1) for x in parts)
            d_a = torch.bmm(g, u.mT).baddbmm_(g_residual, u_squared.mT).view_as(a)
            gradients.add(block, a, d_a.addcmul_(a, push[own], value=-2))
            d_v.add(torch.bmm(a_flat.mT, g).view_as(centred[read]), *read)
            d_squares.add(torch.bmm(a_flat.mT, g_residual).view_as(centred[read]), *read)
        return *gradients.joined(d_v.value.addcmul_(d_squares.value, centred, value=2)), None


class _SoftmaxMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        pair_bias: Tensor | None,
        context: SequenceContext,
        dropout: float,
    ) -> Tensor:
        # Dropout is drawn for all weights at once.
        blocks = [WHOLE] if dropout > 0 else blocks_of(context, num_heads=q.shape[1])
        q, k, v = _operands(q, k, v)
        mean, drop = Joined(v, blocks), None
        weights = []
        for block in blocks:
            a, _ = _weights(q, k, key_bias, pair_bias, context, block)
            if dropout > 0:
                drop = scaled_mask(a, dropout)
            mean.put(torch.matmul(a if drop is None else a * drop, v[block.read]), *block.own)
            weights.append(a)
        ctx.blocks, ctx.pair_shape = blocks, None if pair_bias is None else pair_bias.shape
        ctx.save_for_backward(q, k, v, drop, *weights)
        return mean.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor) -> Any:
        q, k, v, drop, *weights = ctx.saved_tensors
        gradients = _Gradients(ctx, q, k)
        d_v = Joined.sum(v, ctx.blocks)
        for block, a in zip(ctx.blocks, weights, strict=True):
            g = grad_mean[block.own]
            d_a = torch.matmul(g, v[block.read].mT)
            if drop is not None:
                d_a *= drop
            gradients.add(block, a, d_a)
            d_v.add(torch.matmul((a if drop is None else a * drop).mT, g), *block.read)
        return *gradients.joined(d_v.value), None, None


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the products take, each of which would copy a transposed view; q is scaled."""
    return (q * (1 / math.sqrt(q.shape[-1]))).contiguous(), k.contiguous(), v.contiguous()


def _first_values(v: Tensor, context: SequenceContext) -> Tensor:
    """The value of the first token of each token's history, (B, H, T, K)."""
    B, H, T, K = v.shape
    first = context.first + torch.arange(B)[:, None] * T  # row of v's tokens, batch by batch
    values = v.transpose(1, 2).reshape(B * T, H * K).index_select(0, first.view(-1))
    return values.view(B, T, H, K).transpose(1, 2)


def _weights(
    q: Tensor, k: Tensor, key_bias: Tensor | None, pair_bias: Tensor | None, context: SequenceContext, block: Block
) -> tuple[Tensor, Tensor | None]:
    """Weights of a block, (b, H, t, j), and which of its tokens may read nothing, (b, 1, t)."""
    bias = context.mask(q.dtype)[block.rows, None, block.tokens, block.keys]  # (b, 1, t, j), or per head
    if pair_bias is not None:
        bias = bias + pair_bias[block.pairs(pair_bias.shape)]
    if key_bias is not None:
        bias = bias + key_bias[block.rows, None, None, block.keys]
    logits = torch.matmul(q[block.own], k[block.read].mT).add_(bias)
    weights = torch.softmax(logits, dim=-1, out=logits)
    if context.blind is None:
        return weights, None
    blind = context.blind[block.rows, None, block.tokens]
    return weights.masked_fill_(blind[..., None], 0.0), blind  # a row without a key is NaN so far


class _Gradients:
    """d_q, d_k and those of the biases, block by block."""

    def __init__(self, ctx: Any, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.d_q, self.d_k = Joined(q, ctx.blocks), Joined.sum(k, ctx.blocks)
        wants_key, wants_pair = ctx.needs_input_grad[3:5]
        self.d_key = Joined.sum(q[:, 0, :, 0], ctx.blocks) if wants_key else None
        self.d_pair = Joined.sum(q, ctx.blocks, ctx.pair_shape) if wants_pair else None
        self.pair_shape = ctx.pair_shape

    def add(self, block: Block, weights: Tensor, d_weights: Tensor) -> None:
        """Take in the gradient of the weights of a block."""
        d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)  # (a)
        self.d_q.put(torch.matmul(d_logits, self.k[block.read]).mul_(1 / math.sqrt(self.q.shape[-1])), *block.own)
        self.d_k.add(torch.matmul(d_logits.mT, self.q[block.own]), *block.read)  # q is kept scaled
        if self.d_key is not None:
            self.d_key.add(d_logits.sum(dim=(1, 2)), block.rows, block.keys)  # (c)
        if self.d_pair is not None:
            shape = [1 if n == 1 else size for n, size in zip(self.pair_shape, d_logits.shape, strict=True)]
            self.d_pair.add(d_logits.sum_to_size(shape), *block.pairs(self.pair_shape))

    def joined(self, d_v: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v, the bias per key and the bias per pair."""
        return self.d_q.value, self.d_k.value, d_v, *(None if d is None else d.value for d in (self.d_key, self.d_pair))


class Block(NamedTuple):
    """Which rows, which tokens of them, and which keys."""

    rows: slice = slice(None)
    tokens: slice = slice(None)
    keys: slice = slice(None)

    @property
    def own(self) -> tuple[slice, slice, slice]:
        """The tokens, of a tensor (B, H, T, ..)."""
        return self.rows, slice(None), self.tokens

    @property
    def read(self) -> tuple[slice, slice, slice]:
        """The keys, of a tensor (B, H, T, ..)."""
        return self.rows, slice(None), self.keys

    def pairs(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The pairs, of a tensor (B or 1, H or 1, T, T)."""
        return self.rows if shape[0] > 1 else slice(None), slice(None), self.tokens, self.keys


WHOLE = Block()


def blocks_of(context: SequenceContext, *, num_heads: int) -> list[Block]:
    """Blocks that hold every token once; a single one where rows are short."""
    B, T = context.segment.shape
    if T <= SHORT or B == 0:
        return [WHOLE]
    read = torch.stack([part.any(dim=1) for part in context.allowed.split(TOKENS, dim=1)]).byte()  # (blocks, B, T)
    found = read.amax(dim=2) > 0
    first = torch.where(found, read.argmax(dim=2), T - 1).tolist()
    last = torch.where(found, T - read.flip(2).argmax(dim=2), 1).tolist()
    num_rows = max(1, PAIRS // (num_heads * TOKENS * T))
    blocks = []
    for rows in (slice(row, row + num_rows) for row in range(0, B, num_rows)):
        for n, token in enumerate(range(0, T, TOKENS)):
            start = min(first[n][rows])
            keys = slice(start, max(start + 1, *last[n][rows]))
            blocks.append(Block(rows, slice(token, token + TOKENS), keys))
    return blocks


class Joined:
    """A tensor put together from the parts of blocks; where one block is all there is, its part is the tensor."""

    def __init__(self, like: Tensor, blocks: list[Block], shape: Sequence[int] | None = None) -> None:
        self.alone = blocks == [WHOLE]
        self.value = like if self.alone else like.new_empty(like.shape if shape is None else shape)

    @classmethod
    def sum(cls, like: Tensor, blocks: list[Block], shape: Sequence[int] | None = None) -> Joined:
        """One whose parts may overlap, or leave elements out."""
        joined = cls(like, blocks, shape)
        if not joined.alone:
            joined.value.zero_()
        return joined

    def put(self, part: Tensor, *where: slice) -> None:
        """Take the part of a block that no other block comes to."""
        if self.alone:
            self.value = part
        else:
            self.value[where] = part

    def add(self, part: Tensor, *where: slice) -> None:
        """Take the part of a block into a sum."""
        if self.alone:
            self.value = part
        else:
            self.value[where] += part
