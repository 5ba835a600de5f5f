"""Scores of users by items in blocks, so that a ranking never holds more of them than a given memory.

    score   s_ui = state_u . weight_i + bias_i                                (6.2)

Shapes: N users, V items, D state width; a block has n users by w items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.statistics import distinct
from recbft.datasets.vocabulary import shown_id
from recbft.errors import RunError, UserError
from recbft.kernels.product import common_size, fastest_layout, product
from recbft.models.contract import ComparedContent, ItemTable

IntArray = NDArray[np.int64]

# A block of about this many scores stays in a processor's cache between its product and its use, which is quicker
# than a larger one; fewer rows than this make the matrix product slow. What oneDNN returns is new memory, which beyond
# so many bytes glibc takes from the system each time, to be cleared page by page: three times as slow.
_CACHED_SCORES = 1_600_000
_ENOUGH_ROWS = 64
_LARGEST_KEPT = 2**25 - 2**12  # with what malloc adds


class Candidates(NamedTuple):
    """The items that can be ranked: the item table without its padding row."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    compared: ComparedContent | None = None  # what scores have beside, of users in the order of the states

    def for_blocks(self, num_users: int, rows: int) -> Candidates:
        """The same, stored as products read them fastest where more than one block of ``rows`` users pays for it."""
        return self._replace(weight=fastest_layout(self.weight)) if num_users > rows else self


def align(states: Tensor, table: ItemTable) -> tuple[Tensor, Candidates]:
    """States and candidates in one dtype of at least single precision, gradients and padding left behind."""
    dtype = torch.promote_types(torch.promote_types(states.dtype, table.weight.dtype), torch.float32)
    weight = table.weight.detach().to(dtype)[1:]
    bias = None if table.bias is None else table.bias.detach().to(dtype)[1:]
    return states.detach().to(dtype), Candidates(weight, bias)


def block_shape(
    num_users: int, num_items: int, item_size: int, memory_mb: float, *, cached: bool = True
) -> tuple[int, int]:
    """Users and items per block: all items where enough users fit beside them into memory that is kept, else tiles.

    Args:
        item_size: bytes per score.
        memory_mb: bound on the block.
        cached: whether blocks should stay in a processor's cache; a GPU, which is waited for after each, wants few.
    """
    if not memory_mb > 0:
        raise UserError(f"memory for scores is {memory_mb} MB; give a positive number, such as 256")
    budget = max(1, int(memory_mb * 2**20) // item_size)
    num_users, num_items = max(1, num_users), max(1, num_items)
    enough = min(_ENOUGH_ROWS, num_users)
    if not cached:
        rows = min(num_users, max(budget // num_items, min(enough, math.isqrt(budget))))
        return rows, min(num_items, budget // rows)
    if enough * num_items <= min(budget, _LARGEST_KEPT // item_size):
        return min(max(_CACHED_SCORES // num_items, enough), budget // num_items, num_users), num_items
    rows = min(2 * _ENOUGH_ROWS, num_users, math.isqrt(budget))
    return rows, min(num_items, min(budget, _CACHED_SCORES) // rows)


def spans(num: int, size: int) -> Iterator[slice]:
    """Cut 0..num into the fewest pieces of at most ``size``, equal but for one."""
    pieces = -(-num // size)
    for piece in range(pieces):
        yield slice(num * piece // pieces, num * (piece + 1) // pieces)


def user_blocks(states: Tensor, num_items: int, memory_mb: float) -> tuple[int, int, list[slice]]:
    """``block_shape`` for users, (N, D), and the fewest pieces to cut them into, of sizes that products often have."""
    num_users = len(states)
    rows, width = block_shape(
        common_size(num_users, states), num_items, states.element_size(), memory_mb,
        cached=states.device.type == "cpu",
    )  # fmt: skip
    pieces = max(1, -(-num_users // rows))
    size = min(rows, common_size(-(-num_users // pieces), states))
    return rows, width, [slice(first, min(first + size, num_users)) for first in range(0, num_users, max(1, size))]


def by_products(
    states: Tensor, candidates: Candidates, compared: ComparedContent | None, width: int
) -> tuple[Tensor, Candidates]:
    """The same scores with products of contents that are kept, where blocks hold all items, as those do."""
    if compared is None or width < len(candidates.weight) or states.dtype != compared.products.dtype:
        return states, candidates
    narrow = states.shape[1] - compared.width
    kept = Candidates(candidates.weight[:, :narrow].contiguous(), candidates.bias, compared)
    return states[:, :narrow].contiguous(), kept


def score_block(
    chunk: Tensor, candidates: Candidates, columns: slice, room: Tensor, users: slice | None = None
) -> Tensor:
    """Scores (6.2) of a chunk of users, (n, D), for a range of candidates: (n, w), written over ``room`` (>= n w,).

    ``users`` are their rows among all, for what is compared.
    """
    n, w = len(chunk), columns.stop - columns.start
    bias = None if candidates.bias is None else candidates.bias[columns]
    filled_up = min(room.numel() // w, common_size(n, chunk))
    x = F.pad(chunk, (0, 0, 0, filled_up - n)) if filled_up > n else chunk
    block = product(x, candidates.weight[columns], bias, room=room[: len(x) * w].view(-1, w))[:n]
    if (more := candidates.compared) is not None:
        alike = F.embedding_bag(more.items[users], more.products, per_sample_weights=more.decay[users], mode="sum")
        block.addcmul_(alike, more.weight)
    return block


class Excluded(NamedTuple):
    """Distinct pairs of a user and an item not to recommend, by user."""

    user: IntArray  # (E,)
    item: IntArray  # (E,) none of them barred
    offsets: IntArray  # (N + 1,)
    barred: IntArray  # items for nobody, in order

    @classmethod
    def of(
        cls,
        items: IntArray | None,
        offsets: IntArray | None,
        num_users: int,
        num_items: int,
        barred: IntArray | None = None,
    ) -> Excluded:
        """User u's are ``items[offsets[u]:offsets[u + 1]]``, none without ``items``; ``barred`` are everyone's."""
        barred = np.empty(0, np.int64) if barred is None else np.sort(barred)
        if items is None or offsets is None:
            nothing = np.empty(0, np.int64)
            return cls(nothing, nothing, np.zeros(num_users + 1, np.int64), barred)
        user = np.repeat(np.arange(num_users), np.diff(offsets))
        pairs = distinct(user * (num_items + 1) + items[offsets[0] : offsets[-1]])
        user, item = pairs // (num_items + 1), pairs % (num_items + 1)
        real = (item > 0) & ~np.isin(item, barred)
        user, item = user[real], item[real]
        return cls(user, item, np.searchsorted(user, np.arange(num_users + 1)), barred)

    def left(self, num_items: int) -> IntArray:
        """How many items each user's list may hold, (N,)."""
        return num_items - len(self.barred) - np.diff(self.offsets)

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


class Allowed(NamedTuple):
    """Distinct pairs of a user and an item that may be recommended, by user, and no others."""

    user: IntArray  # (E,)
    item: IntArray  # (E,)
    offsets: IntArray  # (N + 1,)

    @classmethod
    def of(cls, items: IntArray, offsets: IntArray, num_items: int, but: Excluded) -> Allowed:
        """User u's are ``items[offsets[u]:offsets[u + 1]]``, without those that are excluded."""
        num_users = len(offsets) - 1
        user = np.repeat(np.arange(num_users), np.diff(offsets))
        pairs = distinct(user * (num_items + 1) + items[offsets[0] : offsets[-1]])
        pairs = np.setdiff1d(pairs, but.user * (num_items + 1) + but.item, assume_unique=True)
        user, item = pairs // (num_items + 1), pairs % (num_items + 1)
        real = (item > 0) & ~np.isin(item, but.barred)
        user, item = user[real], item[real]
        return cls(user, item, np.searchsorted(user, np.arange(num_users + 1)))

    def left(self, num_items: int) -> IntArray:
        """How many items each user's list may hold, (N,)."""
        return np.diff(self.offsets)

    def mask(self, block: Tensor, users: slice, columns: slice) -> None:
        """Give all other items of a block, in place, a score below theirs."""
        own = slice(self.offsets[users.start], self.offsets[users.stop])
        column = self.item[own] - 1 - columns.start
        here = (column >= 0) & (column < block.shape[1])
        place = (self.user[own][here] - users.start) * block.shape[1] + column[here]
        at = torch.from_numpy(place).to(block.device)
        kept = block.view(-1)[at]
        block.fill_(-torch.inf)
        block.view(-1)[at] = kept


class NanWatch:
    """Collects the users whose scores are NaN; looks for them where it is cheap, or something could cause one."""

    def __init__(self, states: Tensor, candidates: Candidates) -> None:
        self.num_users = len(states)
        # Few users have fewer scores to look at than the table has entries.
        self.needed = 2 * self.num_users < candidates.weight.shape[1] or not _bounded(states, candidates)
        self.broken: set[int] = set()

    def look(self, block: Tensor, users: slice) -> None:
        """Note the rows of a block that hold a NaN."""
        if self.needed:
            rows = block.amin(1).isnan().nonzero()[:, 0]  # a minimum passes NaN on
            self.broken.update((rows + users.start).tolist())

    def close(self, user_ids: Sequence[Any] | NDArray[np.generic] | None) -> None:
        """End the watch: RunError where there was a NaN."""
        if self.broken:
            first = min(self.broken)
            name = f"row {first}" if user_ids is None else f"user {shown_id(user_ids[first])}"
            raise RunError(
                f"the model's scores are NaN for {len(self.broken)} of {self.num_users} users, first for {name}; "
                "its weights are broken: train again with a lower learning rate or with gradient clipping"
            )


def _bounded(states: Tensor, candidates: Candidates) -> bool:
    """True if no score can be NaN: all inputs are finite, and too small for a sum to overflow."""
    if states.numel() == 0 or candidates.weight.numel() == 0:
        return True
    largest = _magnitude(states) * _magnitude(candidates.weight) * states.shape[1]
    if candidates.bias is not None:
        largest += _magnitude(candidates.bias)
    return largest < float(torch.finfo(states.dtype).max)


def _magnitude(x: Tensor) -> float:
    """The largest absolute value, or NaN where there is one; no copy is made of what may be a large table."""
    least, most = torch.aminmax(x)
    return float(torch.maximum(-least, most))
