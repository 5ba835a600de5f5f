"""Rank one target per user among all items.

    rank of t   1 + #{i : s_ui > s_ut} + #{i != t : s_ui = s_ut}
                  = #{i : i = t or s_ui >= s_ut}             ties count against t  (a)
    filtered    (a) without the items that the user has seen, t kept               (b)

Both settings come from one pass: (b) is (a) less the seen items that count in it. Scores come in blocks of users by
items; (a) turns a block into zeros and ones in place, and a sum is all that is left to do.

A matrix product rounds equal columns differently at the edges of its blocks, which would break ties at random. Items
whose rows in the table are equal are therefore scored once and counted with their number.

Shapes: N users, V items, G groups of equal items (G <= V), D state width; a block has n users by w groups.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.statistics import distinct
from recbft.evaluation.score_blocks import Candidates, NanWatch, align, by_products, score_block, spans, user_blocks
from recbft.kernels.product import product
from recbft.models.contract import ComparedContent, ItemTable

IntArray = NDArray[np.int64]

# Sums of 0/1 terms are exact in single precision up to here.
_EXACT = 1 << 24


class Ranks(NamedTuple):
    """Rank of each user's target, 1 the best."""

    unfiltered: IntArray  # (N,) among all items
    filtered: IntArray  # (N,) among the target and the items that the user has not seen


def full_ranks(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    seen_items: IntArray,
    seen_offsets: IntArray,
    *,
    memory_mb: float = 256.0,
    user_ids: NDArray[np.generic] | None = None,
    compared: ComparedContent | None = None,
) -> Ranks:
    """Rank every user's target by (a) and (b).

    Args:
        states: one per user, (N, D).
        table: the items to rank; row 0 is padding and never a candidate.
        targets: item index per user, (N,), >= 1.
        seen_items, seen_offsets: what user u has seen, ``seen_items[seen_offsets[u]:seen_offsets[u + 1]]``; repeats
            do no harm, nor does the target among them.
        memory_mb: bound on the block of scores.
        user_ids: names for the message about NaN, (N,).
        compared: as ``SequenceModel.compared`` has it, of these users.

    Returns:
        The ranks, which do not depend on how the scores were cut into blocks (but for rounding).

    Raises:
        RunError: a score is NaN.
        UserError: the memory is not positive.
    """
    states, candidates = align(states, table)
    watch = NanWatch(states, candidates)
    groups = _group_equal(candidates)
    num_users, num_groups = len(states), len(groups.candidates.weight)
    assert targets.size == 0 or 1 <= targets.min() <= targets.max() < groups.of_item.size, "targets are items 1..V"
    rows, width, chunks = user_blocks(states, num_groups, memory_mb)
    width = min(width, _EXACT)
    states, candidates = by_products(states, groups.candidates, None if groups.size is not None else compared, width)
    candidates = candidates.for_blocks(num_users, rows)
    room = states.new_empty(rows * width)
    ranks = Ranks(np.zeros(num_users, np.int64), np.zeros(num_users, np.int64))
    for users in chunks:
        chunk, own = states[users], groups.of_item[targets[users]]
        seen = _Seen.others(seen_items, seen_offsets, users, targets)
        score = None if width == num_groups else _own_scores(chunk, candidates, own)
        for columns in spans(num_groups, width):
            block = score_block(chunk, candidates, columns, room, users)
            watch.look(block, users)
            at_least = _mark_at_least(block, own - columns.start, score)
            ranks.unfiltered[users] += groups.num_marked(at_least, columns)
            ranks.filtered[users] -= seen.num_marked(at_least, groups.of_item, columns.start)
            del block, at_least  # before the next one is made
    watch.close(user_ids)
    return Ranks(ranks.unfiltered, ranks.unfiltered + ranks.filtered)


def _mark_at_least(block: Tensor, own: IntArray, score: Tensor | None) -> Tensor:
    """Turn scores into the terms of (a), in place: 1 for the target itself and where the score is at least its own.

    Args:
        block: scores, (n, w).
        own: the target's column in this block, (n,); below 0 or beyond w where another block holds it.
        score: the targets' scores, (n, 1); None where this block holds them all.
    """
    here = np.flatnonzero((own >= 0) & (own < block.shape[1]))
    place = torch.from_numpy(here * block.shape[1] + own[here]).to(block.device)
    flat = block.view(-1)
    block.ge_(flat[place][:, None] if score is None else score)
    # A score taken from another product may differ in its last bit from the block's: the target counts by its place.
    flat[place] = 1.0
    return block


class _Groups(NamedTuple):
    """The candidates, equal ones once."""

    candidates: Candidates  # (G, D), (G,)
    of_item: IntArray  # (V + 1,) each item's row in the candidates, -1 for padding
    size: Tensor | None  # (G,) items per row, in the dtype of the scores; None where it is 1 throughout

    def num_marked(self, marks: Tensor, columns: slice) -> IntArray:
        """Items that a block of 0 and 1 marks, (n, w) -> (n,)."""
        count = marks.sum(1) if self.size is None else marks.mv(self.size[columns])
        return count.cpu().numpy().astype(np.int64)


class _Seen(NamedTuple):
    """What the users of a chunk have seen, their targets left out."""

    user: IntArray  # (E,) row within the chunk
    item: IntArray  # (E,)

    @classmethod
    def others(cls, items: IntArray, offsets: IntArray, users: slice, targets: IntArray) -> _Seen:
        bounds = offsets[users.start : users.stop + 1]
        user = np.repeat(np.arange(bounds.size - 1), np.diff(bounds))
        item = items[bounds[0] : bounds[-1]]
        other = item != targets[users][user]
        return cls(user[other], item[other])

    def num_marked(self, marks: Tensor, group: IntArray, first: int) -> IntArray:
        """Distinct seen items that a block of 0 and 1, from group ``first`` on, marks: (n, w) -> (n,)."""
        num_users, width = marks.shape
        column = group[self.item] - first
        here = (column >= 0) & (column < width)
        user, item = self.user[here], self.item[here]
        place = torch.from_numpy(user * width + column[here]).to(marks.device)
        marked = (marks.view(-1)[place] > 0).cpu().numpy()
        pairs = distinct(user[marked] * group.size + item[marked])
        return np.bincount(pairs // group.size, minlength=num_users)


def _own_scores(chunk: Tensor, candidates: Candidates, own: IntArray) -> Tensor:
    """Score of one candidate per user, (n, 1), by the product that scores the others: a sum would be rounded apart."""
    rows = torch.from_numpy(own).to(chunk.device)
    bias = None if candidates.bias is None else candidates.bias[rows]
    return product(chunk, candidates.weight[rows], bias).diagonal()[:, None]


def _group_equal(candidates: Candidates) -> _Groups:
    """Find the candidates whose rows are equal, so that they tie however a product rounds."""
    weight, bias, _ = candidates
    num_items, D = weight.shape
    of_item = np.arange(-1, num_items)
    # The sum over group sizes must stay exact, so a larger vocabulary leaves equal items to the product.
    if num_items >= _EXACT or _all_different(candidates):
        return _Groups(candidates, of_item, None)
    rows = weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)
    unique, group, size = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    of_item[1:] = group.cpu().numpy()
    kept = Candidates(unique[:, :D].contiguous(), None if bias is None else unique[:, D].contiguous())
    return _Groups(kept, of_item, size.to(weight.dtype))


def _all_different(candidates: Candidates) -> bool:
    """True if a wrapping sum over the bits of each row, which equal rows share, takes V different values."""
    weight, bias, _ = candidates
    num_items, D = weight.shape
    bits = torch.int64 if weight.dtype == torch.float64 else torch.int32
    factor = torch.randint(1 << 62, (D + 1,), generator=torch.Generator().manual_seed(0)).to(weight.device) | 1
    keys = torch.empty(num_items, dtype=torch.int64, device=weight.device)
    for rows in spans(num_items, 1 << 14):
        keys[rows] = ((weight[rows] + 0.0).view(bits) * factor[:D]).sum(1)  # + 0.0 makes one zero of the two
        if bias is not None:
            keys[rows] += (bias[rows] + 0.0).view(bits) * factor[D]
    return len(torch.unique(keys)) == num_items
