"""The k best items per user, ties broken by the smaller item index, in blocks of bounded memory.

Shapes: N users, V items, D state width; a block has n users by w items.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.distinct import distinct
from recbft.errors import UserError
from recbft.evaluation.score_blocks import NanWatch, align, block_shape, score_block, spans
from recbft.models.contract import ItemTable

IntArray = NDArray[np.int64]


class TopK(NamedTuple):
    """The best items of each user, best first; a list that is shorter than k ends in padding."""

    items: IntArray  # (N, k) item index, >= 1; 0 is padding
    scores: NDArray[np.floating]  # (N, k) NaN at padding
    lengths: IntArray  # (N,) items that are no padding, <= k


def top_k(
    states: Tensor,
    table: ItemTable,
    k: int,
    *,
    exclude_items: IntArray | None = None,
    exclude_offsets: IntArray | None = None,
    among: IntArray | None = None,
    barred: IntArray | None = None,
    memory_mb: float = 256.0,
    user_ids: NDArray[np.generic] | None = None,
) -> TopK:
    """The k items of highest score for every user.

    Args:
        states: one per user, (N, D).
        table: the items; row 0 is padding and never recommended.
        k: items per user, >= 1; a user of whom fewer are left gets those.
        exclude_items, exclude_offsets: items never recommended to user u,
            ``exclude_items[exclude_offsets[u]:exclude_offsets[u + 1]]``; None excludes nothing.
        among: items that alone are scored, each once and in order; None scores all.
        barred: items recommended to nobody, each once.
        memory_mb: bound on the block of scores.
        user_ids: names for messages, (N,).

    Raises:
        UserError: k is not positive, or the memory is not.
        RunError: a score is NaN.
    """
    if k < 1:
        raise UserError(f"k is {k}; ask for at least 1 item")
    if among is not None:
        chosen = np.concatenate([[0], among])
        at = torch.from_numpy(chosen).to(table.weight.device)
        narrow = ItemTable(table.weight[at], None if table.bias is None else table.bias[at])
        own = None if exclude_items is None else _places(exclude_items, among)
        kept = None if barred is None else np.setdiff1d(_places(barred, among), [0])
        given: dict[str, Any] = {"exclude_offsets": exclude_offsets, "memory_mb": memory_mb, "user_ids": user_ids}
        best = top_k(states, narrow, k, exclude_items=own, barred=kept, **given)
        return best._replace(items=chosen[best.items])
    states, candidates = align(states, table)
    num_users, num_items = len(states), len(candidates.weight)
    barred = np.empty(0, np.int64) if barred is None else np.sort(barred)
    excluded = _Excluded.of(exclude_items, exclude_offsets, num_users, num_items, barred)
    lengths = np.minimum(k, num_items - len(barred) - np.diff(excluded.offsets))
    best = _padding(lengths, k, states.new_empty(0).cpu().numpy().dtype)
    if not lengths.any():
        return best
    watch = NanWatch(states, candidates)
    rows, width = block_shape(num_users, num_items, states.element_size(), memory_mb)
    candidates = candidates.for_blocks(num_users, rows)
    room = states.new_empty(rows * width)
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
        filled = np.arange(min(k, num_items)) < lengths[users, None]
        best.items[users, :num_items][filled] = items.cpu().numpy()[filled]
        best.scores[users, :num_items][filled] = values.cpu().numpy()[filled]
    watch.close(user_ids)
    return best


def _places(items: IntArray, among: IntArray) -> IntArray:
    """Where each item stands among others, from 1 on; 0 where it does not."""
    place = np.searchsorted(among, items)
    found = among[np.minimum(place, len(among) - 1)] == items if len(among) else np.zeros(len(items), bool)
    return np.where(found, place + 1, 0)


def _padding(lengths: IntArray, k: int, dtype: np.dtype[Any]) -> TopK:
    """Lists in which nothing stands yet."""
    return TopK(np.zeros((len(lengths), k), np.int64), np.full((len(lengths), k), np.nan, dtype), lengths)


def _best_of_block(block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and columns of each row's best k (all, if fewer), by score, then by column: (n, w) -> (n, k) twice."""
    k = min(k, block.shape[1])
    # One more than asked for shows whether items of equal score fall on both sides of the cut.
    values, columns = block.topk(min(k + 1, block.shape[1]), dim=1)
    if values.shape[1] > k:
        # At -inf they do among the excluded, none of which is kept.
        split = ((values[:, k] == values[:, k - 1]) & (values[:, k] > -torch.inf)).nonzero()[:, 0]
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
        pairs = distinct(user * (num_items + 1) + items[offsets[0] : offsets[-1]])
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
