"""Whole histories packed into rows, so that the cost of a batch follows its real tokens.

A batch of S histories (each cut to its last ``max_length`` events) fills rows as wide as the longest of them, several
short histories to a row. What a token may see is told by its ``segment`` (the history's number within the batch) and
its ``position`` (0 for the oldest kept event), never by where it stands in the row.

Shapes: S histories, B rows, T tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


class Batch(NamedTuple):
    """Packed histories; all tensors int64."""

    items: Tensor  # (B, T) item index, 0 padding
    segment: Tensor  # (B, T) history number within the batch, -1 padding
    position: Tensor  # (B, T) 0 for the oldest kept event of its history, 0 padding
    time: Tensor | None  # (B, T) the data's own unit, 0 padding; None when the data has no real times
    target: Tensor | None  # (B, T) the next item where there is one to learn, 0 elsewhere; None in evaluation
    last: Tensor  # (S,) flat index (row * T + column) of each history's last token

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            items=self.items.to(device),
            segment=self.segment.to(device),
            position=self.position.to(device),
            time=None if self.time is None else self.time.to(device),
            target=None if self.target is None else self.target.to(device),
            last=self.last.to(device),
        )


def pack_histories(
    items: IntArray, start: IntArray, stop: IntArray, *, times: IntArray | None = None, with_targets: bool = False
) -> Batch:
    """Pack ``items[start:stop]`` of each history into rows; with targets, event t+1 is the target of token t.

    Args:
        items: all events, (E,), item indices >= 1.
        start, stop: bounds of each history, (S,), stop > start.
        times: time per event, (E,), or None.
        with_targets: the history's target at its last token is ``items[stop]``, which the caller warrants to exist.

    Returns:
        The batch, rows as wide as the longest history.
    """
    lengths = stop - start
    assert lengths.size > 0 and lengths.min() > 0, "every packed history holds at least one event"
    row, column, num_rows, width = _place(lengths)
    segment = np.repeat(np.arange(lengths.size), lengths)
    position = np.arange(segment.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    event = np.repeat(start, lengths) + position
    cell = np.repeat(row * width + column, lengths) + position

    def fill(values: IntArray, empty: int) -> Tensor:
        grid = np.full(num_rows * width, empty, dtype=np.int64)
        grid[cell] = values
        return torch.from_numpy(grid.reshape(num_rows, width))

    return Batch(
        items=fill(items[event], 0),
        segment=fill(segment, -1),
        position=fill(position, 0),
        time=None if times is None else fill(times[event], 0),
        target=fill(items[event + 1], 0) if with_targets else None,
        last=torch.from_numpy(row * width + column + lengths - 1),
    )


def history_batches(
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    max_length: int,
    times: IntArray | None = None,
    histories_per_batch: int = 1024,
) -> Iterator[Batch]:
    """Batches of histories in the given order, each cut to its last ``max_length`` events: for evaluation."""
    start = np.maximum(start, stop - max_length)
    for first in range(0, start.size, histories_per_batch):
        chosen = slice(first, first + histories_per_batch)
        yield pack_histories(items, start[chosen], stop[chosen], times=times)


class TrainingBatches:
    """The batches of one epoch: every user with two or more training events, in an order drawn from (seed, epoch).

    A history's last ``max_length`` + 1 training events give ``max_length`` inputs and their next items. The order
    depends on the seed and the epoch alone, so a resumed run continues with the batches it would have seen.
    """

    def __init__(
        self,
        items: IntArray,
        start: IntArray,
        stop: IntArray,
        *,
        max_length: int,
        batch_size: int,
        seed: int,
        times: IntArray | None = None,
    ) -> None:
        trainable = stop - start >= 2
        self.items, self.times, self.batch_size, self.seed = items, times, batch_size, seed
        # Inputs end one event before the last training event, which is the last target.
        self.stop = stop[trainable] - 1
        self.start = np.maximum(start[trainable], self.stop - max_length)

    @property
    def num_batches(self) -> int:
        """Optimiser steps per epoch."""
        return -(-self.start.size // self.batch_size)

    @property
    def num_tokens(self) -> int:
        """Training positions per epoch."""
        return int((self.stop - self.start).sum())

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.start.size)
        for first in range(0, order.size, self.batch_size):
            chosen = order[first : first + self.batch_size]
            yield pack_histories(self.items, self.start[chosen], self.stop[chosen], times=self.times, with_targets=True)


def _place(lengths: IntArray) -> tuple[IntArray, IntArray, int, int]:
    """Best-fit decreasing: the row and first column of each history, the number of rows and their width."""
    width = int(lengths.max())
    row, column = np.empty_like(lengths), np.empty_like(lengths)
    open_rows: list[list[int]] = [[] for _ in range(width + 1)]  # rows by the space they have left
    spaces, num_rows = 0, 0  # spaces: bit r is set where open_rows[r] holds a row
    for history in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[history])
        fitting = spaces >> length
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + length
            target_row = open_rows[space].pop()
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            space, target_row, num_rows = width, num_rows, num_rows + 1
        row[history], column[history] = target_row, width - space
        if space > length:
            open_rows[space - length].append(target_row)
            spaces |= 1 << (space - length)
    return row, column, num_rows, width
