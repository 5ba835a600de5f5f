"""The belief a position carries, what attention reports, and which positions may inform which.

Shapes: B rows, H heads, T tokens per row, K head width, D model width; R places of a row, N wanted tokens.
Source: Precision Tracked Transformer (arXiv 2605.18832), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recbft.autograd.transforms import outside_transforms, untransformed

Made = TypeVar("Made")


class Belief(NamedTuple):
    """What a layer knows of every position: a mean and a precision (1 / variance), coordinate by coordinate."""

    mean: Tensor  # (B, T, D)
    precision: Tensor  # (B, T, D), > 0


class Moments(NamedTuple):
    """Statistics of row-normalised attention weights; zeros where a token may read nothing."""

    mean: Tensor  # (B, H, T, K)  e, the weighted mean of the values
    residual_variance: Tensor  # (B, H, T, K)  S, the weighted variance of the values, >= 0
    effective_sample_size: Tensor  # (B, H, T)  n, Kish's 1 / sum a^2, between 1 and the number of keys


class SiluMoments(NamedTuple):
    """Sums over weights a of any kind, SiLU's above all; zeros where a token may read nothing."""

    mean: Tensor  # (B, H, T, K)  sum a v, the innovation
    weight_sum: Tensor  # (B, H, T)  sum a
    square_sum: Tensor  # (B, H, T)  sum a^2
    square_mean: Tensor  # (B, H, T, K)  sum a^2 v
    square_second: Tensor  # (B, H, T, K)  sum a^2 v^2


@dataclass(frozen=True, eq=False)
class SequenceContext:
    """Where each token of a packed batch stands in its own history; equal to itself alone, as tensors have no truth.

    Args:
        segment: (B, T) integers; tokens of a row with the same number belong to one history, -1 is padding.
        position: (B, T) integers, the place in the history; distinct within a segment.
        time: (B, T) integers or None, real event times.
        causal: a token sees itself and earlier positions only; False lets it see its whole segment.
        query_time: (B, T) integers or None, the time a token reads at where that is not its own.
    """

    segment: Tensor
    position: Tensor
    time: Tensor | None = None
    causal: bool = True
    query_time: Tensor | None = None

    @cached_property
    @untransformed
    def valid(self) -> Tensor:
        """(B, T) bool, True for real tokens."""
        return self.segment >= 0

    @property
    def readers(self) -> tuple[Tensor, Tensor]:
        """Segment and position of the tokens that read, (B, T) each."""
        return self.segment, self.position

    @property
    def read_by_all(self) -> bool:
        """Whether all tokens read, so that queries and keys stand in the same columns."""
        return True

    @cached_property
    @untransformed
    def allowed(self) -> Tensor:
        """(B, T, T) bool, True where token t (second axis) may read token j (third axis)."""
        segment, position = self.readers
        same = segment[:, :, None] == self.segment[:, None, :]
        allowed = same & self.valid[:, None, :]
        if self.causal:
            allowed = allowed & (self.position[:, None, :] <= position[:, :, None])
        return allowed

    @cached_property
    @untransformed
    def blind(self) -> Tensor | None:
        """(B, T) bool, True for tokens that may read nothing; None where there are none."""
        blind = ~self.allowed.any(dim=-1)
        return blind if bool(blind.any()) else None

    @cached_property
    @untransformed
    def lag(self) -> Tensor:
        """(B, T, T) integers, the distance in positions between token t and token j."""
        _, position = self.readers
        return (position[:, :, None] - self.position[:, None, :]).abs()

    @cached_property
    @untransformed
    def log_elapsed(self) -> Tensor:
        """(B, T, T) floats >= 0, the log of the time between token t and token j, of 1 where it is less."""
        if self.time is None:
            raise ValueError("the context has no times; give it the time of every token")
        query = self.time if self.query_time is None else self.query_time
        return (query[:, :, None] - self.time[:, None, :]).abs().clamp_(min=1).float().log_()

    @cached_property
    @untransformed
    def first(self) -> Tensor:
        """(B, T) integers, the column of the earliest token of each token's segment; its own column for padding."""
        if len(self.segment) == 1 and not self.segment.any():  # one history alone, as a service is asked about
            return self.position.argmin(dim=1, keepdim=True).expand_as(self.position)
        early = self.position.argsort(dim=1)
        order = early.gather(1, self.segment.gather(1, early).argsort(dim=1, stable=True))  # by segment, then position
        segment = self.segment.gather(1, order)
        begins = torch.ones_like(self.valid)
        begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
        own = torch.arange(segment.shape[1], device=segment.device)
        start = torch.where(begins, own, 0).cummax(dim=1).values
        earliest = torch.empty_like(order).scatter(1, order, order.gather(1, start))
        return torch.where(self.valid, earliest, own)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """(B, T, T), 0 where allowed and -inf elsewhere."""

        def make() -> Tensor:
            return torch.zeros_like(self.allowed, dtype=dtype).masked_fill_(~self.allowed, float("-inf"))

        return self.keep(("mask", dtype), make)

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` makes of this batch, ``outside_transforms``: made once, and kept with it for all layers."""
        if key not in self._kept:
            with outside_transforms():
                self._kept[key] = make()
        made: Made = self._kept[key]
        return made


@dataclass(frozen=True, eq=False)
class Readers:
    """Attention from a few tokens to all of them: in evaluation the last layer needs one token of each history.

    The wanted tokens of a row stand side by side, in as many places R as the fullest row has; a row with fewer fills
    its places with its first token, whose reading nobody takes.

    Args:
        column: (B, R) integers, the token in each place of a row.
        place: (N,) integers, the place of each wanted token, counted through the rows, as ``pick`` takes them.
    """

    column: Tensor
    place: Tensor

    @classmethod
    def of(cls, only: Tensor, B: int, T: int) -> Readers:
        """Places for tokens that are counted through the rows, ``row * T + column``, (N,), in any order."""
        if B == 1:
            return cls(only[None], torch.arange(len(only), device=only.device))
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
