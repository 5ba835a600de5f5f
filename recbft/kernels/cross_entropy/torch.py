"""Full cross-entropy in blocks of positions: the (N, V) logits never exist, gradients are formed on the way.

A block of logits that stays in the cache becomes exp(l - shift) in place; with z its row sums and r = 1 / (N z),

    loss = mean(shift + log z - l_target)
    dX   = r * (exp(l - shift) W) - W_target / N        dW = exp(l - shift)' (r X) - scatter(X_target / N)     (a)

so probabilities are never normalised one by one. The shift is 0 where no logit can leave the range in which exp is
safe (|l| <= max|x| max|w|), the row maximum elsewhere. dW is added up as (D, V), the way its product is fastest.
Several seeds are taken one after another.

A row of a million logits lies in memory, not in the cache, and so does dW, which every block of rows would go through.
Where rows are that long, tiles of positions by items are taken instead, so that all that is touched at a time stays in
the cache; the price is a second product x . w, since a position's sum is known only after its last tile. With m the
largest logit of a position:

    first     m, z over all tiles
    second    dX += exp(l - m) / z W        dW' += (X / z)' exp(l - m)        for each tile of W       (b)

What a position leaves out of its sum has the logit ``NOTHING`` in either form, whose exponential is 0.

Shapes: N positions, V items, D width, S seeds, P pairs that are left out; a tile has n positions by v items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.kernels.cross_entropy.exponentials import exponentials
from recbft.kernels.product import add_product, common_size, fastest_layout, product

BLOCK_ELEMENTS = 1_600_000  # about 6 MB in float32: the block of logits stays in a shared cache
LONGEST_ROW = 50_000  # of logits; from here on tiles are faster: 1.1 times at 50,000 items, 3.4 times at 1,000,000
POSITIONS, ITEMS = 256, 4096  # of a tile: 4 MB of logits in float32
NOTHING = -1e30  # a logit without weight; finite, as the largest of a tile may be one
SAFE_LOGIT = 60.0  # exp(+-60) times a vocabulary of any size is far from float32's limits


def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor, left_out: Tensor | None = None) -> Tensor:
    """The same as the reference."""
    loss: Tensor = applied(_FullCrossEntropy, states, weight, target, left_out)
    return loss


def full_cross_entropies(
    states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], left_out: Tensor | None = None
) -> Tensor:
    """The same as the reference."""
    losses: Tensor = applied(_FullCrossEntropies, states, weight, target, counts, left_out)
    return losses


def split(left_out: Tensor | None, counts: Sequence[int]) -> list[Tensor | None]:
    """The pairs of each seed, whose positions are counted from its first."""
    if left_out is None:
        return [None] * len(counts)
    ends = torch.tensor(counts, device=left_out.device).cumsum(0)
    bounds = [0, *torch.searchsorted(left_out[0].contiguous(), ends).tolist()]
    first = [0, *ends.tolist()]
    shift = [left_out.new_tensor([[n], [0]]) for n in first]
    return [left_out[:, a:b] - n for a, b, n in zip(bounds, bounds[1:], shift, strict=False)]


class _FullCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor, left_out: Tensor | None) -> Tensor:
        loss, d_states, d_weight = _mean_loss(states, weight, target, left_out, any(ctx.needs_input_grad))
        if d_states is not None and d_weight is not None:
            ctx.save_for_backward(d_states, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight = ctx.saved_tensors
        if grad == 1:  # a product would copy what may be as large as the item table
            return d_states, d_weight, None, None
        return d_states * grad, d_weight * grad, None, None


class _FullCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], left_out: Tensor | None
    ) -> Tensor:
        ctx.counts = list(counts)
        own_pairs = split(left_out, ctx.counts)
        parts = zip(states.split(ctx.counts), weight, target.split(ctx.counts), own_pairs, strict=True)
        losses, d_states, d_weight = zip(*(_mean_loss(*own, True) for own in parts), strict=True)
        ctx.save_for_backward(torch.cat(d_states), torch.stack(d_weight))
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight = ctx.saved_tensors
        each = grad.repeat_interleave(torch.tensor(ctx.counts))[:, None]
        return d_states * each, d_weight * grad[:, None, None], None, None, None


def _mean_loss(
    states: Tensor, weight: Tensor, target: Tensor, left_out: Tensor | None, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and, where asked for, its gradients dX (N, D) and dW (V, D)."""
    N = states.shape[0]
    target_weight = weight[target]  # (N, D)
    bounded = bool(_largest_norm(states) * _largest_norm(weight) <= SAFE_LOGIT)
    in_pieces = _in_blocks if weight.shape[0] <= LONGEST_ROW else _in_tiles
    loss, d_states, d_weight = in_pieces(states, weight, left_out, bounded, with_gradients)
    loss = ((loss - (states * target_weight).sum(dtype=torch.float64)) / N).to(states.dtype)
    if d_states is None or d_weight is None:
        return loss, None, None
    d_states.add_(target_weight, alpha=-1 / N)
    return loss, d_states, d_weight.index_add_(0, target, states.detach(), alpha=-1 / N)


def _in_blocks(
    states: Tensor, weight: Tensor, left_out: Tensor | None, bounded: bool, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of log z + shift, and where asked for the gradients of its mean, from blocks of positions."""
    N, V = states.shape[0], weight.shape[0]
    rows = max(16, min(common_size(N, states), BLOCK_ELEMENTS // V))
    loss = states.new_zeros((), dtype=torch.float64)
    weight = fastest_layout(weight)
    if with_gradients:
        columns = weight.T.contiguous()  # (D, V)
        d_states, d_columns = torch.empty_like(states), torch.zeros_like(columns)
    room = weight.new_empty(rows, V)
    blanks = _Blanks(left_out, N, V, rows=rows, items=V)
    for first in range(0, N, rows):
        own = states[first : first + rows]
        n = len(own)
        x = _filled_up(own, rows)
        logits = blanks.fill(product(x, weight, room=room[: len(x)]), first, 0)
        odds, total, shift = exponentials(logits, shifted=not bounded)
        if shift is not None:
            loss += shift[:n].sum(dtype=torch.float64)
        loss += total[:n].log().sum(dtype=torch.float64)
        if with_gradients:
            share = 1 / (N * total)
            torch.mul(product(odds, columns)[:n], share[:n], out=d_states[first : first + rows])
            add_product(d_columns, (x * share).T, odds.T)
    return (loss, d_states, d_columns.T.contiguous()) if with_gradients else (loss, None, None)


def _in_tiles(
    states: Tensor, weight: Tensor, left_out: Tensor | None, bounded: bool, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same from tiles of positions by items."""
    N = len(states)
    states = _filled_up(states, POSITIONS)
    blanks = _Blanks(left_out, N, len(weight), rows=POSITIONS, items=ITEMS)
    sums = _exponential_sums(states, weight, blanks, bounded=bounded)
    loss = sums.total[:N].log().sum(dtype=torch.float64)
    if sums.shift is not None:
        loss = loss + sums.shift[:N].sum(dtype=torch.float64)
    if not with_gradients:
        return loss, None, None
    d_states, d_weight = _gradients(states, weight, sums, blanks, count=N)
    return loss, d_states[:N], d_weight


def _filled_up(states: Tensor, rows: int) -> Tensor:
    """With states of 0, which move no weight, so that the last block of ``rows`` has a size that others have too."""
    last = (len(states) - 1) % rows + 1
    return F.pad(states, (0, 0, 0, min(rows, common_size(last, states)) - last))


def _largest_norm(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return norms.amax()


class _Sums(NamedTuple):
    """What a position's exponentials add up to: total * exp(shift)."""

    shift: Tensor | None  # (N, 1), the largest logit; None where exp needs no shift
    total: Tensor  # (N, 1)


class _Blanks:
    """The pairs that are left out, by the piece of N positions by V items in which they are.

    Args:
        left_out: (2, P) as ``full_cross_entropy`` takes them, or None.
        rows, items: of a piece.
    """

    def __init__(self, left_out: Tensor | None, N: int, V: int, *, rows: int, items: int) -> None:
        self.rows, self.items, self.across = rows, items, -(-V // items)
        self.pairs, self.bounds = left_out, [0]
        if left_out is None:
            return
        position, item = left_out
        piece = position.div(rows, rounding_mode="floor") * self.across + item.div(items, rounding_mode="floor")
        if self.across > 1:
            piece, order = piece.sort(stable=True)
            self.pairs = left_out[:, order]
        ends = torch.arange(-(-N // rows) * self.across, device=piece.device)
        self.bounds += torch.searchsorted(piece.contiguous(), ends, right=True).tolist()

    def fill(self, logits: Tensor, first_row: int, first_item: int) -> Tensor:
        """The logits of a piece, with ``NOTHING`` written into them where a pair is left out."""
        if self.pairs is None:
            return logits
        piece = first_row // self.rows * self.across + first_item // self.items
        position, item = self.pairs[:, self.bounds[piece] : self.bounds[piece + 1]]
        return logits.index_put_((position - first_row, item - first_item), logits.new_tensor(NOTHING))


def _exponential_sums(states: Tensor, weight: Tensor, blanks: _Blanks, *, bounded: bool) -> _Sums:
    """The first pass; ``bounded`` says that no logit can leave the range in which exp is safe."""
    total = states.new_zeros(len(states), 1)
    shift = None if bounded else states.new_full((len(states), 1), float("-inf"))
    for items in _pieces(len(weight), ITEMS):
        for rows in _pieces(len(states), POSITIONS):
            logits = blanks.fill(product(states[rows], weight[items]), rows.start, items.start)
            if shift is not None:
                higher = torch.maximum(shift[rows], logits.amax(dim=1, keepdim=True))
                total[rows] *= (shift[rows] - higher).exp_()
                shift[rows] = higher
                logits -= higher
            total[rows] += exponentials(logits, shifted=False)[1]
    return _Sums(shift, total)


def _gradients(states: Tensor, weight: Tensor, sums: _Sums, blanks: _Blanks, *, count: int) -> tuple[Tensor, Tensor]:
    """The second pass: dX (N, D) and dW (V, D) of the mean of log z + m over ``count`` positions, the others' x 0."""
    share = 1 / (count * sums.total)
    scaled = states * share
    d_states, d_weight = torch.zeros_like(states), torch.empty_like(weight)
    for items in _pieces(len(weight), ITEMS):
        columns = weight[items].T.contiguous()
        d_columns = torch.zeros_like(columns)  # (D, v), the way its product is fastest
        for rows in _pieces(len(states), POSITIONS):
            logits = blanks.fill(product(states[rows], weight[items]), rows.start, items.start)
            if sums.shift is not None:
                logits -= sums.shift[rows]
            odds, _, _ = exponentials(logits, shifted=False)
            add_product(d_states[rows], odds, columns)
            add_product(d_columns, scaled[rows].T, odds.T)
        d_weight[items] = d_columns.T
    return d_states.mul_(share), d_weight


def _pieces(num: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, num)) for first in range(0, num, size)]
