"""Long rows in blocks whose weights stay in the cache: what is in a block, and tensors joined from what they give.

A block is some tokens of some rows, against the keys from the first to the last that any of them may read. When a
causal row holds its history in order, the blocks leave out half of the pairs that nothing may read.

Shapes: B rows, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recbft.core.belief import SequenceContext

SHORT = 100  # rows up to this many tokens are one block: blocks gain nothing there
TOKENS = 50  # of a row in a block
PAIRS = 160_000  # weights in a block, about


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
