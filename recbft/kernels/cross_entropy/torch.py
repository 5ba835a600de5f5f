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

With shares c_n of the positions, these stand in the place of 1 / N: r = c / z, and W_target and X_target times c.

What a position leaves out of its sum has the logit ``NOTHING`` in either form, whose exponential is 0. With a_k added
to the logit of position n and item i,

    d loss / d a_k = (exp(l_ni - shift) / z_n - [i is the target of n]) / N                              (c)

A block's pairs are added, and their shares of z kept, row by row with the exponentials, while the row is in the cache.

Shapes: N positions, V items, D width, S seeds, P pairs that are left out, A pairs that something is added to; a tile
has n positions by v items.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose
from recbft.kernels.product import add_product, common_size, fastest_layout, product

if TYPE_CHECKING:
    from recbft.kernels.cross_entropy import Pairs

BLOCK_ELEMENTS = 1_600_000  # about 6 MB in float32: the block of logits stays in a shared cache
LONGEST_ROW = 50_000  # of logits; from here on tiles are faster: 1.1 times at 50,000 items, 3.4 times at 1,000,000
POSITIONS, ITEMS = 256, 4096  # of a tile: 4 MB of logits in float32
NOTHING = -1e30  # a logit without weight; finite, as the largest of a tile may be one
SAFE_LOGIT = 60.0  # exp(+-60) times a vocabulary of any size is far from float32's limits


def full_cross_entropies(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    counts: Sequence[int],
    left_out: Tensor | None = None,
    added: Pairs | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The same as the reference."""
    which, values = (None, None) if added is None else added
    losses: Tensor = applied(_FullCrossEntropies, states, weight, target, counts, left_out, which, values, shares)
    return losses


def split(pairs: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The pairs of each seed, whose positions are counted from its first."""
    ends = torch.tensor(counts, device=pairs.device).cumsum(0)
    bounds = [0, *torch.searchsorted(pairs[0].contiguous(), ends).tolist()]
    shifts = [pairs.new_tensor([[n], [0]]) for n in (0, *ends.tolist())]
    parts = zip(bounds, bounds[1:], shifts, strict=False)
    return [pairs[:, a:b] - shift if n else pairs[:, a:b] for n, (a, b, shift) in enumerate(parts)]


class _FullCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        target: Tensor,
        counts: Sequence[int],
        left_out: Tensor | None,
        which: Tensor | None,
        values: Tensor | None,
        shares: Tensor | None,
    ) -> Tensor:
        ctx.counts, learns = list(counts), any(ctx.needs_input_grad)
        nothing = [None] * len(ctx.counts)
        pairs = nothing if left_out is None else split(left_out, ctx.counts)
        added: Any = nothing
        ctx.added = nothing
        if which is not None and values is not None:
            own = split(which, ctx.counts)
            ctx.added = [one.shape[1] for one in own]
            added = list(zip(own, values.split(ctx.added), strict=True))
        c: Any = nothing if shares is None else shares[:, None].split(ctx.counts)
        parts = zip(states.split(ctx.counts), weight, target.split(ctx.counts), pairs, added, strict=True)
        found = [_mean_loss(*own, each, learns) for own, each in zip(parts, c, strict=True)]
        losses, d_states, d_weight, d_values = zip(*found, strict=True)
        if learns:
            more = () if values is None else (_joined(d_values),)
            ctx.save_for_backward(_joined(d_states), _joined(d_weight).reshape(weight.shape), *more)
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        d_states, d_weight, *d_values = ctx.saved_tensors
        if not (grad == 1).all():  # a product would copy what may be as large as the item table
            d_states = d_states * grad.repeat_interleave(torch.tensor(ctx.counts))[:, None]
            d_weight = d_weight * grad[:, None, None]
            d_values = [one * grad.repeat_interleave(torch.tensor(ctx.added)) for one in d_values]
        return d_states, d_weight, None, None, None, None, d_values[0] if d_values else None, None


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Those of one seed are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mean_loss(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    left_out: Tensor | None,
    added: tuple[Tensor, Tensor] | None,
    shares: Tensor | None,
    with_gradients: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss and, where asked for, its gradients dX (N, D), dW (V, D) and those of what is added, (A,).

    ``shares`` is (N, 1), or None.
    """
    (N, _), V = states.shape, len(weight)
    target_weight = weight[target]  # (N, D)
    largest, at_target = _largest_norm(states) * _largest_norm(weight), None
    if added is not None:
        (position, item), values = added
        at_target = item == target[position]
        if len(values):
            largest = largest + values.detach().abs().amax()
    rows, items = (
        (POSITIONS, ITEMS) if V > LONGEST_ROW else (max(16, min(common_size(N, states), BLOCK_ELEMENTS // V)), V)
    )
    pairs = _Pairs(left_out, added, N, V, rows=rows, items=items)
    in_pieces = _in_blocks if V <= LONGEST_ROW else _in_tiles
    loss, d_states, d_weight = in_pieces(states, weight, pairs, shares, bool(largest <= SAFE_LOGIT), with_gradients)
    loss = loss - _total(states * target_weight, shares)
    if added is not None and at_target is not None:
        at = added[0][0][at_target]
        loss = loss - _total(added[1][at_target], None if shares is None else shares[at, 0])
    loss = (loss / N if shares is None else loss).to(states.dtype)
    if d_states is None or d_weight is None:
        return loss, None, None, None
    if shares is None:
        d_states.add_(target_weight, alpha=-1 / N)
        d_weight.index_add_(0, target, states.detach(), alpha=-1 / N)
    else:
        d_states.addcmul_(target_weight, shares, value=-1)
        d_weight.index_add_(0, target, states.detach() * shares, alpha=-1)
    return loss, d_states, d_weight, None if at_target is None else pairs.gradient(at_target, N, shares)


def _total(each: Tensor, shares: Tensor | None) -> Tensor:
    """The sum of what positions have, times their shares where there are some."""
    return (each if shares is None else each * shares).sum(dtype=torch.float64)


def _in_blocks(
    states: Tensor, weight: Tensor, pairs: _Pairs, shares: Tensor | None, bounded: bool, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of log z + shift, and where asked for the gradients of its mean, from blocks of positions."""
    N, rows = len(states), pairs.rows
    loss = states.new_zeros((), dtype=torch.float64)
    weight = fastest_layout(weight)
    if with_gradients:
        columns = weight.T.contiguous()  # (D, V)
        d_states, d_columns = torch.empty_like(states), torch.zeros_like(columns)
    room = weight.new_empty(rows, len(weight))
    for first in range(0, N, rows):
        own = states[first : first + rows]
        n = len(own)
        x = _filled_up(own, rows)
        c = None if shares is None else shares[first : first + rows]
        logits = pairs.leave_out(product(x, weight, room=room[: len(x)]), first, 0)
        odds, total, shift = exponentials(logits, shifted=not bounded, added=pairs.of(first))
        if shift is not None:
            loss += _total(shift[:n], c)
        loss += _total(total[:n].log(), c)
        if with_gradients:
            share = 1 / (N * total) if c is None else F.pad(c, (0, 0, 0, len(x) - n)) / total
            torch.mul(product(odds, columns)[:n], share[:n], out=d_states[first : first + rows])
            add_product(d_columns, (x * share).T, odds.T)
    return (loss, d_states, d_columns.T.contiguous()) if with_gradients else (loss, None, None)


def _in_tiles(
    states: Tensor, weight: Tensor, pairs: _Pairs, shares: Tensor | None, bounded: bool, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same from tiles of positions by items."""
    N = len(states)
    states = _filled_up(states, POSITIONS)
    total, shift = _exponential_sums(states, weight, pairs, bounded=bounded)
    loss = _total(total[:N].log(), shares)
    if shift is not None:
        loss = loss + _total(shift[:N], shares)
    if not with_gradients:
        return loss, None, None
    d_states, d_weight = _gradients(states, weight, total, shift, pairs, shares, count=N)
    return loss, d_states[:N], d_weight


def _filled_up(states: Tensor, rows: int) -> Tensor:
    """With states of 0, which move no weight, so that the last block of ``rows`` has a size that others have too."""
    last = (len(states) - 1) % rows + 1
    return F.pad(states, (0, 0, 0, min(rows, common_size(last, states)) - last))


def _largest_norm(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return norms.amax()


class _Pairs:
    """What is added to logits or left out, by the piece of N positions by V items in which it is.

    Args:
        left_out: (2, P) as ``full_cross_entropy`` takes them, or None.
        added: pairs, (2, A), and numbers, (A,), or None.
        rows, items: of a piece.
    """

    def __init__(
        self,
        left_out: Tensor | None,
        added: tuple[Tensor, Tensor] | None,
        N: int,
        V: int,
        *,
        rows: int,
        items: int,
    ) -> None:
        self.rows, self.items, self.across, self.num_pieces = (
            rows,
            items,
            -(-V // items),
            -(-N // rows) * -(-V // items),
        )
        self.left_out, self.left_bounds, _ = self._by_piece(left_out)
        pairs, values = (None, None) if added is None else added
        if pairs is not None and pairs.numel() and not 0 <= pairs[1].min() <= pairs[1].max() < V:
            raise IndexError(f"something is added to an item that is not among the {V} of weight")
        self.position = None if pairs is None else pairs[0]
        self.added, self.bounds, self.order = self._by_piece(None if pairs is None else pairs.contiguous())
        if values is not None:
            self.values = values.detach().contiguous() if self.order is None else values.detach()[self.order]
            self.shares = torch.zeros_like(self.values)  # of z

    def _by_piece(self, pairs: Tensor | None) -> tuple[Tensor | None, list[int], Tensor | None]:
        """The pairs in the order of the pieces, where those of each begin and end, and that order if it is new."""
        if pairs is None:
            return None, [], None
        ends = torch.arange(1, self.num_pieces + 1)
        if self.across == 1:  # in the order of the pieces already
            return pairs, [0, *torch.searchsorted(pairs[0].contiguous(), ends * self.rows).tolist()], None
        position, item = pairs
        piece = position.div(self.rows, rounding_mode="floor") * self.across
        piece, order = (piece + item.div(self.items, rounding_mode="floor")).sort(stable=True)
        return pairs[:, order], [0, *torch.searchsorted(piece, ends).tolist()], order

    def _piece(self, first_row: int, first_item: int) -> int:
        return first_row // self.rows * self.across + first_item // self.items

    def of(self, first_row: int, first_item: int = 0) -> Added | None:
        """What is added in a piece."""
        if self.added is None:
            return None
        piece = self._piece(first_row, first_item)
        own = slice(self.bounds[piece], self.bounds[piece + 1])
        position, item = self.added[:, own]
        return Added(first_row, position, item, self.values[own], self.shares[own])

    def leave_out(self, logits: Tensor, first_row: int, first_item: int) -> Tensor:
        """The logits of a piece, with ``NOTHING`` written where a pair is left out."""
        if self.left_out is not None:
            piece = self._piece(first_row, first_item)
            position, item = self.left_out[:, self.left_bounds[piece] : self.left_bounds[piece + 1]]
            logits.index_put_((position - first_row, item - first_item), logits.new_tensor(NOTHING))
        return logits

    def fill(self, logits: Tensor, first_row: int, first_item: int) -> Tensor:
        """The same, what is added to them added."""
        if (own := self.of(first_row, first_item)) is not None:
            place = (own.position - first_row, own.item - first_item)
            logits.index_put_(place, own.values, accumulate=True)
        return self.leave_out(logits, first_row, first_item)

    def keep(self, odds: Tensor, total: Tensor, first_row: int, first_item: int) -> None:
        """Keep the probabilities of the pairs of a piece: exp(l - shift), (n, v), over z, (n, 1)."""
        if self.added is None:
            return
        piece = self._piece(first_row, first_item)
        own = slice(self.bounds[piece], self.bounds[piece + 1])
        position, item = self.added[:, own]
        self.shares[own] = odds[position - first_row, item - first_item] / total[position - first_row, 0]

    def gradient(self, at_target: Tensor, N: int, shares: Tensor | None) -> Tensor:
        """(c), in the order in which the pairs were given; ``at_target`` (A,) whether a pair's item is the target."""
        given = (
            self.shares if self.order is None else torch.empty_like(self.shares).index_copy_(0, self.order, self.shares)
        )
        grad = given - at_target.to(given.dtype)
        return grad / N if shares is None else grad * shares[self.position, 0]


class Added(NamedTuple):
    """What is added in a block of positions, in their order."""

    first: int  # position of the block
    position: Tensor  # (A,)
    item: Tensor  # (A,)
    values: Tensor  # (A,)
    share: Tensor  # (A,) that each gets of its position's sum: to be written


def _exponential_sums(states: Tensor, weight: Tensor, pairs: _Pairs, *, bounded: bool) -> tuple[Tensor, Tensor | None]:
    """The first pass: z and m of each position, (N, 1); m is None where ``bounded``: exp needs no shift."""
    total = states.new_zeros(len(states), 1)
    shift = None if bounded else states.new_full((len(states), 1), float("-inf"))
    for items in _pieces(len(weight), ITEMS):
        for rows in _pieces(len(states), POSITIONS):
            logits = pairs.fill(product(states[rows], weight[items]), rows.start, items.start)
            if shift is not None:
                higher = torch.maximum(shift[rows], logits.amax(dim=1, keepdim=True))
                total[rows] *= (shift[rows] - higher).exp_()
                shift[rows] = higher
                logits -= higher
            total[rows] += exponentials(logits, shifted=False)[1]
    return total, shift


def _gradients(
    states: Tensor,
    weight: Tensor,
    total: Tensor,
    shift: Tensor | None,
    pairs: _Pairs,
    shares: Tensor | None,
    *,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The second pass: dX (N, D) and dW (V, D) of the mean of log z + m over ``count`` positions, the others' x 0."""
    share = 1 / (count * total) if shares is None else F.pad(shares, (0, 0, 0, len(states) - count)) / total
    scaled = states * share
    d_states, d_weight = torch.zeros_like(states), torch.empty_like(weight)
    for items in _pieces(len(weight), ITEMS):
        columns = weight[items].T.contiguous()
        d_columns = torch.zeros_like(columns)  # (D, v), the way its product is fastest
        for rows in _pieces(len(states), POSITIONS):
            logits = pairs.fill(product(states[rows], weight[items]), rows.start, items.start)
            if shift is not None:
                logits -= shift[rows]
            odds, _, _ = exponentials(logits, shifted=False)
            pairs.keep(odds, total[rows], rows.start, items.start)
            add_product(d_states[rows], odds, columns)
            add_product(d_columns, scaled[rows].T, odds.T)
        d_weight[items] = d_columns.T
    return d_states.mul_(share), d_weight


def _pieces(num: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, num)) for first in range(0, num, size)]


def exponentials(logits: Tensor, *, shifted: bool, added: Added | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp(l - m) written over l, (N, V), its sums and m, (N, 1) each; m is the row maximum, or None for 0.

    What is ``added`` is added to l before.
    """
    odds, total, shift = choose("auto", EXPONENTIALS, logits, added=added)(logits, shifted, added)
    return odds, total, shift


def _exponentials_ref(
    logits: Tensor, shifted: bool, added: Added | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if added is not None:
        row = added.position - added.first
        logits.index_put_((row, added.item), added.values, accumulate=True)
    shift = logits.amax(dim=1, keepdim=True) if shifted else None
    odds = (logits if shift is None else logits.sub_(shift)).exp_()
    total = odds.sum(dim=1, keepdim=True)
    if added is not None:
        added.share.copy_(odds[row, added.item] / total[row, 0])
    return odds, total, shift


class _PairsInC(Structure):
    """``pairs`` of ``kernel.c``."""

    _fields_ = [
        *((name, c_int64) for name in ("count", "first")),
        *((name, c_void_p) for name in ("position", "item", "added", "share")),
    ]


def _exponentials_in_c(
    logits: Tensor, shifted: bool, added: Added | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    N, V = logits.shape
    total = logits.new_empty(N, 1)
    shift = logits.new_empty(N, 1) if shifted else None
    sizes = (c_int64(n) for n in (N, V, logits.stride(0)))
    pairs = None
    if added is not None:
        first, *tensors = added
        pairs = byref(_PairsInC(len(added.item), first, *map(c_library.pointer, tensors)))
    c_library.library().exponential_sums(*sizes, *c_library.pointers(logits, shift, total), pairs)
    return logits, total, shift


def _decline_c(logits: Tensor, added: Added | None = None) -> str | None:
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] == 0:
        return "needs rows of float32"
    if added is not None and (added.item.dtype, added.values.dtype) != (torch.int64, torch.float32):
        return "needs pairs of int64 and float32"
    return c_library.missing()


EXPONENTIALS = {
    "c": Path(lambda: _exponentials_in_c, "cpu", _decline_c, opened=True, takes_halves=True),
    "reference": Path(lambda: _exponentials_ref, takes_halves=True),
}
