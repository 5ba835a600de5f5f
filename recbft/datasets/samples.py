"""The pieces of histories that an epoch of training reads.

    last       the end of each history
    windows    whole histories, cut into pieces of at most N events that lie side by side; where the first cut of a long
               history falls moves from epoch to epoch
    prefixes   one piece per event: that event with the events before it

A long history of n events is cut after c events, c uniform in 1..N, and then after every N. So it has 1 + (n - 1) / N
windows on average, and an event is the first, second, ... or last of its window equally often.

Shapes: S histories, P pieces.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
SampleKind = Literal["last", "windows", "prefixes"]
SAMPLE_KINDS: tuple[SampleKind, ...] = get_args(SampleKind)


class Pieces(NamedTuple):
    """Bounds of what is read, as indices of events."""

    start: IntArray  # (P,)
    stop: IntArray  # (P,) after the last event
    first: IntArray  # (P,) the first event of the history that each is a part of


class Samples:
    """What every epoch reads of some histories.

    Args:
        kind: see above.
        start, stop: bounds of each history, (S,), stop > start.
        length: N, the most events of a piece.
        least: the fewest events of a piece that is worth reading; shorter ones are avoided, or left out.
        seed: of the cuts, with the number of the epoch.
    """

    def __init__(
        self, kind: SampleKind, start: IntArray, stop: IntArray, *, length: int, least: int = 1, seed: int = 0
    ) -> None:
        assert kind in SAMPLE_KINDS and 1 <= least <= length
        self.kind, self.start, self.stop, self.length, self.least, self.seed = kind, start, stop, length, least, seed

    @cached_property
    def num_pieces(self) -> int:
        """Per epoch; of windows, whose number varies a little from epoch to epoch, the mean."""
        size = self.stop - self.start
        if self.kind == "last":
            return size.size
        if self.kind == "prefixes":
            return int((size - self.least + 1).clip(min=0).sum())
        return round(float(np.where(size > self.length, 1 + (size - 1) / self.length, 1).sum()))

    def of_epoch(self, epoch: int) -> Pieces:
        """The pieces of one epoch, in the order of the histories; they depend on the seed and the epoch alone."""
        if self.kind == "last":
            return Pieces(np.maximum(self.start, self.stop - self.length), self.stop, self.start)
        if self.kind == "prefixes":
            first = self.start + self.least
            stop = ranges(first, np.maximum(self.stop + 1, first))
            owner = np.repeat(self.start, np.maximum(self.stop + 1 - first, 0))
            return Pieces(np.maximum(owner, stop - self.length), stop, owner)
        return self._windows(np.random.default_rng([self.seed, epoch, 1]))

    def _windows(self, rng: np.random.Generator) -> Pieces:
        N, size = self.length, self.stop - self.start
        first = rng.integers(self.least, N + 1, size=size.size)
        remainder = (size - first) % N
        short = (remainder > 0) & (remainder < self.least)  # the last piece: one event is moved there, or taken away
        first = first + np.where(short, np.where(first > self.least, -1, 1), 0)
        first = np.where(size > N, np.minimum(first, N), size)
        count = 1 + -(-(size - first) // N)
        number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        start, first, stop = (np.repeat(x, count) for x in (self.start, first, self.stop))
        end = np.minimum(start + first + number * N, stop)
        begin = np.where(number == 0, start, start + first + (number - 1) * N)
        kept = end - begin >= self.least
        return Pieces(begin[kept], end[kept], start[kept])


def ranges(start: IntArray, stop: IntArray) -> IntArray:
    """``start[0] .. stop[0] - 1, start[1] .. stop[1] - 1, ...`` in one array."""
    size = stop - start
    within: IntArray = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    return within + np.repeat(start, size)
