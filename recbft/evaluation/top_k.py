"""The k best items per user, ties broken by the smaller item index, in blocks of bounded memory.

With a ``Calibration`` they have probabilities, by (6.7), over the items that the list may hold.

Shapes: N users, V items, D state width; a block has n users by w items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.errors import UserError
from recbft.evaluation.probability import Calibration, LogSum
from recbft.evaluation.score_blocks import (
    Allowed,
    Excluded,
    NanWatch,
    align,
    by_products,
    score_block,
    spans,
    user_blocks,
)
from recbft.models.contract import ComparedContent, ItemTable

IntArray = NDArray[np.int64]


class TopK(NamedTuple):
    """The best items of each user, best first; a list that is shorter than k ends in padding."""

    items: IntArray  # (N, k) item index, >= 1; 0 is padding
    scores: NDArray[np.floating]  # (N, k) NaN at padding
    lengths: IntArray  # (N,) items that are no padding, <= k
    probabilities: NDArray[np.float64]  # (N, k) NaN at padding, and without a calibration


def top_k(
    states: Tensor,
    table: ItemTable,
    k: int,
    *,
    exclude_items: IntArray | None = None,
    exclude_offsets: IntArray | None = None,
    only_items: IntArray | None = None,
    only_offsets: IntArray | None = None,
    among: IntArray | None = None,
    barred: IntArray | None = None,
    calibration: Calibration | None = None,
    memory_mb: float = 256.0,
    user_ids: Sequence[Any] | NDArray[np.generic] | None = None,
    compared: ComparedContent | None = None,
) -> TopK:
    """The k items of highest score for every user.

    Args:
        states: one per user, (N, D).
        table: the items; row 0 is padding and never recommended.
        k: items per user, >= 1; a user of whom fewer are left gets those.
        exclude_items, exclude_offsets: items never recommended to user u,
            ``exclude_items[exclude_offsets[u]:exclude_offsets[u + 1]]``; None excludes nothing.
        only_items, only_offsets: in the same form the only items that user u may be recommended; None allows all.
        among: items that alone are scored, each once and in order; None scores all.
        barred: items recommended to nobody, each once.
        calibration: what makes probabilities of scores; there are none without it.
        memory_mb: bound on the block of scores, and on what probabilities need of it.
        user_ids: names for messages, (N,).
        compared: as in ``full_ranks``; without ``among``.

    Raises:
        UserError, RunError: k is not positive, and as ``full_ranks``.
    """
    if k < 1:
        raise UserError(f"k is {k}; ask for at least 1 item")
    if among is not None:
        chosen = np.concatenate([[0], among])
        at = torch.from_numpy(chosen).to(table.weight.device)
        narrow = ItemTable(table.weight[at], None if table.bias is None else table.bias[at])
        own = None if exclude_items is None else _places(exclude_items, among)
        only = None if only_items is None else _places(only_items, among)
        kept = None if barred is None else np.setdiff1d(_places(barred, among), [0])
        best = top_k(
            states, narrow, k, exclude_items=own, exclude_offsets=exclude_offsets, only_items=only,
            only_offsets=only_offsets, barred=kept, calibration=calibration, memory_mb=memory_mb, user_ids=user_ids,
        )  # fmt: skip
        return best._replace(items=chosen[best.items])
    states, candidates = align(states, table)
    num_users, num_items = len(states), len(candidates.weight)
    excluded = Excluded.of(exclude_items, exclude_offsets, num_users, num_items, barred)
    choice: Excluded | Allowed = excluded
    if only_items is not None and only_offsets is not None:
        choice = Allowed.of(only_items, only_offsets, num_items, but=excluded)
    left = choice.left(num_items)
    lengths = np.minimum(k, left)
    shape, dtype = (num_users, k), states.new_empty(0).cpu().numpy().dtype
    best = TopK(np.zeros(shape, np.int64), np.full(shape, np.nan, dtype), lengths, np.full(shape, np.nan))
    if not lengths.any():
        return best
    watch = NanWatch(states, candidates)
    blocks = 1 if calibration is None else 2
    rows, width, chunks = user_blocks(states, num_items, memory_mb / blocks)
    states, candidates = by_products(states, candidates, compared, width)
    candidates = candidates.for_blocks(num_users, rows)
    room = states.new_empty(rows * width)
    log_sum = None if calibration is None else LogSum(calibration.temperature, torch.empty_like(room))
    for users in chunks:
        values, items = states.new_empty(0), torch.empty(0, dtype=torch.int64)
        for columns in spans(num_items, width):
            block = score_block(states[users], candidates, columns, room, users)
            watch.look(block, users)
            choice.mask(block, users, columns)
            if log_sum is not None:
                log_sum.add(block, first=columns.start == 0)
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
        if log_sum is not None:
            best.probabilities[users, :num_items][filled] = log_sum.log_softmax(values).exp().cpu().numpy()[filled]
    watch.close(user_ids)
    if calibration is not None:
        chance = 1 / np.maximum(left, 1)[:, None]
        best.probabilities[:] += calibration.lapse * (chance - best.probabilities)
    return best


def _places(items: IntArray, among: IntArray) -> IntArray:
    """Where each item stands among others, from 1 on; 0 where it does not."""
    place = np.searchsorted(among, items)
    found = among[np.minimum(place, len(among) - 1)] == items if len(among) else np.zeros(len(items), bool)
    return np.where(found, place + 1, 0)


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
