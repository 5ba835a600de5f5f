"""Full cross-entropy in blocks of positions: the (N, V) logits never exist, gradients are formed on the way.

A block of logits that stays in the cache becomes exp(l - shift) in place, in C (``kernel.c``) where that serves; with z
its row sums and r = 1 / (N z),

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
from ctypes import c_int64
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose
from recbft.kernels.product import add_product, common_size, fastest_layout, product

BLOCK_ELEMENTS = 1_600_000  # about 6 MB in float32: the block of logits stays in a shared cache
LONGEST_ROW = 50_000  # of logits; from here on tiles are faster: 1.1 times at 50,000 items, 3.4 times at 1,000,000
POSITIONS, ITEMS = 256, 4096  # of a tile: 4 MB of logits in float32
NOTHING = -1e30  # a logit without weight; finite, as the largest of a tile may be one
SAFE_LOGIT = 60.0  # exp(+-60) times a vocabulary of any size is far from float32's limits


def full_cross_entropies(
    states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], left_out: Tensor | None = None
) -> Tensor:
    """The same as the reference."""
    losses: Tensor = applied(_FullCrossEntropies, states, weight, target, counts, left_out)
    return losses


def split(left_out: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The pairs of each seed, whose positions are counted from its first."""
    ends = torch.tensor(counts, device=left_out.device).cumsum(0)
    bounds = [0, *torch.searchsorted(left_out[0].contiguous(), ends).tolist()]
    shifts = [left_out.new_tensor([[n], [0]]) for n in (0, *ends.tolist())]
    return [left_out[:, a:b] - shift for a, b, shift in zip(bounds, bounds[1:], shifts, strict=False)]


class _FullCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int], left_out: Tensor | None
    ) -> Tensor:
        ctx.counts, learns = list(counts), any(ctx.needs_input_grad)
        pairs = [None] * len(ctx.counts) if left_out is None else split(left_out, ctx.counts)
        parts = zip(states.split(ctx.counts), weight, target.split(ctx.counts), pairs, strict=True)
        losses, d_states, d_weight = zip(*(_mean_loss(*own, learns) for own in parts), strict=True)
        if learns:
            ctx.save_for_backward(_joined(d_states), _joined(d_weight).reshape(weight.shape))
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight = ctx.saved_tensors
        if (grad == 1).all():  # a product would copy what may be as large as the item table
            return d_states, d_weight, None, None, None
        each = grad.repeat_interleave(torch.tensor(ctx.counts))[:, None]
        return d_states * each, d_weight * grad[:, None, None], None, None, None


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Those of one seed are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    total, shift = _exponential_sums(states, weight, blanks, bounded=bounded)
    loss = total[:N].log().sum(dtype=torch.float64)
    if shift is not None:
        loss = loss + shift[:N].sum(dtype=torch.float64)
    if not with_gradients:
        return loss, None, None
    d_states, d_weight = _gradients(states, weight, total, shift, blanks, count=N)
    return loss, d_states[:N], d_weight


def _filled_up(states: Tensor, rows: int) -> Tensor:
    """With states of 0, which move no weight, so that the last block of ``rows`` has a size that others have too."""
    last = (len(states) - 1) % rows + 1
    return F.pad(states, (0, 0, 0, min(rows, common_size(last, states)) - last))


def _largest_norm(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return norms.amax()


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
        ends = torch.arange(1, -(-N // rows) * self.across + 1)
        if self.across == 1:  # in the order of the pieces already
            self.bounds += torch.searchsorted(position.contiguous(), ends * rows).tolist()
            return
        piece = position.div(rows, rounding_mode="floor") * self.across + item.div(items, rounding_mode="floor")
        piece, order = piece.sort(stable=True)
        self.pairs = left_out[:, order]
        self.bounds += torch.searchsorted(piece, ends).tolist()

    def fill(self, logits: Tensor, first_row: int, first_item: int) -> Tensor:
        """The logits of a piece, with ``NOTHING`` written into them where a pair is left out."""
        if self.pairs is None:
            return logits
        piece = first_row // self.rows * self.across + first_item // self.items
        position, item = self.pairs[:, self.bounds[piece] : self.bounds[piece + 1]]
        return logits.index_put_((position - first_row, item - first_item), logits.new_tensor(NOTHING))


def _exponential_sums(
    states: Tensor, weight: Tensor, blanks: _Blanks, *, bounded: bool
) -> tuple[Tensor, Tensor | None]:
    """The first pass: z and m of each position, (N, 1); m is None where ``bounded``: exp needs no shift."""
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
    return total, shift


def _gradients(
    states: Tensor, weight: Tensor, total: Tensor, shift: Tensor | None, blanks: _Blanks, *, count: int
) -> tuple[Tensor, Tensor]:
    """The second pass: dX (N, D) and dW (V, D) of the mean of log z + m over ``count`` positions, the others' x 0."""
    share = 1 / (count * total)
    scaled = states * share
    d_states, d_weight = torch.zeros_like(states), torch.empty_like(weight)
    for items in _pieces(len(weight), ITEMS):
        columns = weight[items].T.contiguous()
        d_columns = torch.zeros_like(columns)  # (D, v), the way its product is fastest
        for rows in _pieces(len(states), POSITIONS):
            logits = blanks.fill(product(states[rows], weight[items]), rows.start, items.start)
            if shift is not None:
                logits -= shift[rows]
            odds, _, _ = exponentials(logits, shifted=False)
            add_product(d_states[rows], odds, columns)
            add_product(d_columns, scaled[rows].T, odds.T)
        d_weight[items] = d_columns.T
    return d_states.mul_(share), d_weight


def _pieces(num: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, num)) for first in range(0, num, size)]


def exponentials(logits: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp(l - m) written over l, (N, V), its sums and m, (N, 1) each; m is the row maximum, or None for 0."""
    odds, total, shift = choose("auto", EXPONENTIALS, logits)(logits, shifted)
    return odds, total, shift


def _exponentials_ref(logits: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    shift = logits.amax(dim=1, keepdim=True) if shifted else None
    odds = (logits if shift is None else logits.sub_(shift)).exp_()
    return odds, odds.sum(dim=1, keepdim=True), shift


def _exponentials_in_c(logits: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    N, V = logits.shape
    total = logits.new_empty(N, 1)
    shift = logits.new_empty(N, 1) if shifted else None
    sizes = (c_int64(n) for n in (N, V, logits.stride(0)))
    c_library.library().exponential_sums(*sizes, *c_library.pointers(logits, shift, total))
    return logits, total, shift


def _decline_c(logits: Tensor) -> str | None:
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] == 0:
        return "needs rows of float32"
    return c_library.missing()


EXPONENTIALS = {
    "c": Path(lambda: _exponentials_in_c, "cpu", _decline_c, opened=True, takes_halves=True),
    "reference": Path(lambda: _exponentials_ref, takes_halves=True),
}
