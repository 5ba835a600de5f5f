"""Attention from a few tokens to all of them: in evaluation the last layer needs one token of each history.

The wanted tokens of a row stand side by side, in as many places as the fullest row has; a row with fewer fills its
places with its first token, whose reading nobody takes.

Shapes: B rows, T tokens, R places of a row, N wanted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from recbft.autograd.transforms import untransformed
from recbft.core.belief import SequenceContext


@dataclass(frozen=True, eq=False)
class Readers:
    """Where the wanted tokens stand.

    Args:
        column: (B, R) integers, the token in each place of a row.
        place: (N,) integers, the place of each wanted token, counted through the rows, as ``pick`` takes them.
    """

    column: Tensor
    place: Tensor

    @classmethod
    def of(cls, only: Tensor, B: int, T: int) -> Readers:
        """Places for tokens that are counted through the rows, ``row * T + column``, (N,), in any order."""
        row = torch.div(only, T, rounding_mode="floor")
        count = torch.bincount(row, minlength=B)
        order = torch.argsort(row, stable=True)
        before = torch.empty_like(row)  # wanted tokens of the same row that come earlier
        before[order] = torch.arange(len(only), device=only.device) - (count.cumsum(0) - count)[row[order]]
        R = max(1, int(count.max()))
        column = only.new_zeros(B, R)
        column[row, before] = only % T
        return cls(column, row * R + before)

    def take(self, x: Tensor) -> Tensor:
        """The readers' share of what all tokens have: (B, T, D) -> (B, R, D)."""
        return x.gather(1, self.column[..., None].expand(-1, -1, x.shape[-1]))

    def context(self, whole: SequenceContext) -> SequenceContext:
        """Who may read whom: what is (B, T, T) of a context is (B, R, T) of this one."""
        known = (whole.segment, whole.position, whole.time, whole.causal, whole.query_time)
        return _ReadBySome(*known, whole=whole, column=self.column)


@dataclass(frozen=True, eq=False)
class _ReadBySome(SequenceContext):
    whole: SequenceContext = field(kw_only=True)
    column: Tensor = field(kw_only=True)

    @property
    def readers(self) -> tuple[Tensor, Tensor]:
        return self.segment.gather(1, self.column), self.position.gather(1, self.column)

    @property
    def read_by_all(self) -> bool:
        return False

    @cached_property
    @untransformed
    def log_elapsed(self) -> Tensor:
        return self.whole.log_elapsed.take_along_dim(self.column[..., None], dim=1)

    @cached_property
    @untransformed
    def first(self) -> Tensor:
        return self.whole.first  # of the keys, none of which is left out


def pick(x: Tensor, only: Tensor | None) -> Tensor:
    """The tokens ``only`` of (B, T, ..), counted through the rows, (N, ..); all as they are where it is None."""
    return x if only is None else x.flatten(0, 1)[only]
