"""The k best items per user, ties broken by the smaller item index, in blocks of bounded memory.

Shapes: N users, V items, D state width; a block has n users by w items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.errors import UserError
from recbft.evaluation.score_blocks import NanWatch, align, block_shape, score_block, spans
from recbft.models.contract import ItemTable

IntArray = NDArray[np.int64]


class TopK(NamedTuple):
    """The best items of each user, best first."""

    items: IntArray  # (N, k) item index, >= 1
    scores: NDArray[np.floating]  # (N, k)


def top_k(
    states: Tensor,
    table: ItemTable,
    k: int,
    *,
    exclude_items: IntArray | None = None,
    exclude_offsets: IntArray | None = None,
    barred: IntArray | None = None,
    memory_mb: float = 256.0,
    user_ids: NDArray[np.generic] | None = None,
) -> TopK:
    """The k items of highest score for every user.

    Args:
        states: one per user, (N, D).
        table: the items; row 0 is padding and never recommended.
        k: items per user, >= 1.
        exclude_items, exclude_offsets: items never recommended to user u,
            ``exclude_items[exclude_offsets[u]:exclude_offsets[u + 1]]``; None excludes nothing.
        barred: items recommended to nobody, each once.
        memory_mb: bound on the block of scores.
        user_ids: names for messages, (N,).

    Raises:
        UserError: a user has fewer than k items left, k is not positive, or the memory is not.
        RunError: a score is NaN.
    """
    states, candidates = align(states, table)
    num_users, num_items = len(states), len(candidates.weight)
    barred = np.empty(0, np.int64) if barred is None else np.sort(barred)
    excluded = _Excluded.of(exclude_items, exclude_offsets, num_users, num_items, barred)
    _check_k(k, num_items, excluded, user_ids)
    watch = NanWatch(states, candidates)
    rows, width = block_shape(num_users, num_items, states.element_size(), memory_mb)
    candidates = candidates.for_blocks(num_users, rows)
    room = states.new_empty(rows * width)
    best = TopK(np.empty((num_users, k), np.int64), np.empty((num_users, k), states.new_empty(0).cpu().numpy().dtype))
    for users in spans(num_users, rows):
        values, items = states.new_empty(0), torch.empty(0, dtype=torch.int64)
        for columns in spans(num_items, width):
            block = score_block(states[users], candidates, columns, room)
            watch.look(block, users)
            excluded.mask(block, users, columns)
            block_values, block_items = _best_of_block(block, k)
            del block  # before the next one is made
            if columns.start == 0:
                values, items = block_values, block_items + 1
            else:  # earlier blocks hold the smaller indices and stand first, so a stable sort keeps the order of ties
                values = torch.cat([values, block_values], dim=1)
                items = torch.cat([items, block_items + 1 + columns.start], dim=1)
                values, order = values.sort(dim=1, descending=True, stable=True)
                values, items = values[:, :k], items.gather(1, order[:, :k])
        best.items[users], best.scores[users] = items.cpu().numpy(), values.cpu().numpy()
    watch.close(user_ids)
    return best


def _best_of_block(block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and columns of each row's best k (all, if fewer), by score, then by column: (n, w) -> (n, k) twice."""
    k = min(k, block.shape[1])
    # One more than asked for shows whether items of equal score fall on both sides of the cut.
    values, columns = block.topk(min(k + 1, block.shape[1]), dim=1)
    if values.shape[1] > k:
        split = (values[:, k] == values[:, k - 1]).nonzero()[:, 0]
        columns = columns[:, :k].contiguous()
        for row in split.tolist():
            columns[row] = _first_of_equal(block[row], values[row, k - 1], k)
    columns = columns.sort(dim=1).values
    values, order = block.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _first_of_equal(scores: Tensor, cut: Tensor, k: int) -> Tensor:
    """The k best columns where ``cut`` is the k-th best score and several columns have it: (w,) -> (k,)."""
    above = (scores > cut).nonzero()[:, 0]
    level = (scores == cut).nonzero()[:, 0]
    return torch.cat([above, level[: k - len(above)]])


class _Excluded(NamedTuple):
    """Distinct pairs of a user and an item not to recommend, by user."""

    user: IntArray  # (E,)
    item: IntArray  # (E,) none of them barred
    offsets: IntArray  # (N + 1,)
    barred: IntArray  # items for nobody, in order

    @classmethod
    def of(
        cls, items: IntArray | None, offsets: IntArray | None, num_users: int, num_items: int, barred: IntArray
    ) -> _Excluded:
        if items is None or offsets is None:
            nothing = np.empty(0, np.int64)
            return cls(nothing, nothing, np.zeros(num_users + 1, np.int64), barred)
        user = np.repeat(np.arange(num_users), np.diff(offsets))
        pairs = np.unique(user * (num_items + 1) + items[offsets[0] : offsets[-1]])
        user, item = pairs // (num_items + 1), pairs % (num_items + 1)
        real = (item > 0) & ~np.isin(item, barred)
        user, item = user[real], item[real]
        return cls(user, item, np.searchsorted(user, np.arange(num_users + 1)), barred)

    def mask(self, block: Tensor, users: slice, columns: slice) -> None:
        """Give the excluded items of a block, in place, a score below all others."""
        own = slice(self.offsets[users.start], self.offsets[users.stop])
        column = self.item[own] - 1 - columns.start
        here = (column >= 0) & (column < block.shape[1])
        place = (self.user[own][here] - users.start) * block.shape[1] + column[here]
        block.view(-1)[torch.from_numpy(place).to(block.device)] = -torch.inf
        first, end = np.searchsorted(self.barred - 1, [columns.start, columns.stop])
        if end > first:
            out = torch.from_numpy(self.barred[first:end] - 1 - columns.start).to(block.device)
            block.index_fill_(1, out, -torch.inf)


def _check_k(k: int, num_items: int, excluded: _Excluded, user_ids: NDArray[np.generic] | None) -> None:
    if k < 1:
        raise UserError(f"k is {k}; ask for at least 1 item")
    left = num_items - len(excluded.barred) - np.diff(excluded.offsets)
    if left.size and k > left.min():
        worst = int(left.argmin())
        name = f"row {worst}" if user_ids is None else f"user {user_ids[worst : worst + 1].tolist()[0]!r}"
        seen = len(excluded.item) > 0
        remedy = " or exclude fewer" if seen or len(excluded.barred) else ""
        remedy += " (filter_seen=False, or --keep-seen, leaves no item of a history out)" if seen else ""
        raise UserError(f"k is {k}, but only {left[worst]} of {num_items} items are left for {name}; lower k{remedy}")
