"""Whole histories packed into rows, so that the cost of a batch follows its real tokens.

A batch of S histories (each cut to its last ``max_length`` events) fills rows as wide as the longest of them, several
short histories to a row. What a token may see is told by its ``segment`` (the history's number within the batch) and
its ``position`` (0 for the oldest kept event). A history's tokens stand side by side, oldest first, as memory mixers
need; attention never asks where in a row a token stands.

Shapes: S histories, B rows, T tokens per row.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
HISTORIES_PER_BATCH = 256  # read at once in evaluation; on a CPU more take more memory and no less time


class Batch(NamedTuple):
    """Packed histories; all tensors int64."""

    items: Tensor  # (B, T) item index, 0 padding
    segment: Tensor  # (B, T) history number within the batch, -1 padding
    position: Tensor  # (B, T) 0 for the oldest kept event of its history, 0 padding
    time: Tensor | None  # (B, T) the data's own unit, 0 padding; None when the data has no real times
    target: Tensor | None  # (B, T) the next item where there is one to learn, 0 elsewhere; None in evaluation
    last: Tensor  # (S,) flat index (row * T + column) of each history's last token
    next_time: Tensor | None = None  # (B, T) time of the event after each token, for models that are shown it

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device, in one copy that is not waited for where the device allows it."""
        if torch.device(device) == self.items.device:
            return self
        own = [x for x in self if x is not None]
        joined = torch.cat([x.flatten() for x in own])
        if joined.device.type == "cpu" and torch.cuda.is_available():
            joined = joined.pin_memory()
        parts = iter(joined.to(device, non_blocking=True).split([x.numel() for x in own]))
        return Batch(*(None if x is None else next(parts).view(x.shape) for x in self))  # type: ignore[arg-type]

    def of_rows(self, rows: Tensor) -> Batch:
        """What some rows hold, (R,), as a batch of its own, whose histories are counted anew."""
        num_rows, width = self.items.shape
        new_row = self.items.new_full((num_rows,), -1).index_copy_(0, rows, torch.arange(len(rows)))
        row = new_row[self.last // width]  # (S,), -1 where a history is left out
        number = (row >= 0).cumsum(0) - 1
        chosen = Batch(*(None if x is None or x is self.last else x[rows] for x in self))  # type: ignore[arg-type]
        return chosen._replace(
            segment=torch.where(chosen.segment >= 0, number[chosen.segment.clamp(min=0)], -1),
            last=(row * width + self.last % width)[row >= 0],
        )


def pack_histories(
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    times: IntArray | None = None,
    with_targets: bool = False,
    with_next_times: bool = False,
    append: int | None = None,
) -> Batch:
    """Pack ``items[start:stop]`` of each history into rows; with targets, event t+1 is the target of token t.

    Args:
        items: all events, (E,), item indices >= 1.
        start, stop: bounds of each history, (S,), stop > start, or stop >= start with ``append``.
        times: time per event, (E,), or None.
        with_targets: the history's target at its last token is ``items[stop]``, which the caller warrants to exist.
        with_next_times: every token gets the time of the event after it, with the same warrant for ``times[stop]``.
        append: an item put after each history's last event, such as a mask, at the time of that event.

    Returns:
        The batch, rows as wide as the longest history.
    """
    lengths = stop - start + (append is not None)
    assert lengths.size > 0 and lengths.min() > 0, "every packed history holds at least one event"
    assert append is None or not (with_targets or with_next_times), "what is appended has no event after it"
    row, column, num_rows, width = place_histories(lengths)
    segment = np.repeat(np.arange(lengths.size), lengths)
    position = np.arange(segment.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    event = np.repeat(start, lengths) + position
    cell = np.repeat(row * width + column, lengths) + position
    appended = None
    if append is not None:
        appended = np.cumsum(lengths) - 1
        event[appended] = np.maximum(event[appended] - 1, 0)  # whatever stands there is replaced; its time is kept

    def fill(values: IntArray, empty: int) -> Tensor:
        grid = np.full(num_rows * width, empty, dtype=np.int64)
        grid[cell] = values
        return torch.from_numpy(grid.reshape(num_rows, width))

    read = items[event]
    if appended is not None:
        read[appended] = append
    assert times is not None or not with_next_times
    return Batch(
        items=fill(read, 0),
        segment=fill(segment, -1),
        position=fill(position, 0),
        time=None if times is None else fill(times[event], 0),
        target=fill(items[event + 1], 0) if with_targets else None,
        last=torch.from_numpy(row * width + column + lengths - 1),
        next_time=fill(times[event + 1], 0) if times is not None and with_next_times else None,
    )


def history_batches(
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    max_length: int,
    times: IntArray | None = None,
    histories_per_batch: int = HISTORIES_PER_BATCH,
    with_next_times: bool = False,
    append: int | None = None,
) -> Iterator[Batch]:
    """Batches of histories in the given order, for evaluation.

    Each is cut to its last ``max_length`` tokens, of which ``append``, where there is one, is the last.
    """
    start = np.maximum(start, stop - max_length + (append is not None))
    for first in range(0, start.size, histories_per_batch):
        chosen = slice(first, first + histories_per_batch)
        yield pack_histories(
            items, start[chosen], stop[chosen], times=times, with_next_times=with_next_times, append=append
        )


class EpochBatches(abc.ABC):
    """What the training loop asks of its batches. They depend on the seed and the epoch's number alone.

    So a resumed run continues with the batches it would have seen.
    """

    batch_size: int  # histories per batch
    seed: int
    start: IntArray  # (S,) the events that are read of each history
    stop: IntArray  # (S,)

    @property
    def num_histories(self) -> int:
        """Histories per epoch."""
        return self.start.size

    @property
    def num_batches(self) -> int:
        """Optimiser steps per epoch."""
        return -(-self.num_histories // self.batch_size)

    @property
    def num_tokens(self) -> int:
        """Tokens read per epoch, at most."""
        return int((self.stop - self.start).sum())

    @property
    @abc.abstractmethod
    def num_targets(self) -> float:
        """Targets per epoch; their expectation where they are drawn."""

    @abc.abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""

    def _chosen(self, epoch: int) -> Iterator[IntArray]:
        """The histories of each batch of an epoch."""
        seed, count = self.seed, self.num_histories
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for first in range(0, order.size, self.batch_size):
            yield order[first : first + self.batch_size]


class TrainingBatches(EpochBatches):
    """Batches for next-item models: every user with two or more training events.

    A history's last ``max_length`` + 1 training events give ``max_length`` inputs and their next items.
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
        with_next_times: bool = False,
    ) -> None:
        trainable = stop - start >= 2
        self.items, self.times, self.batch_size, self.seed = items, times, batch_size, seed
        self.with_next_times = with_next_times
        # Inputs end one event before the last training event, which is the last target.
        self.stop = stop[trainable] - 1
        self.start = np.maximum(start[trainable], self.stop - max_length)

    @property
    def num_targets(self) -> float:
        """One per token."""
        return self.num_tokens

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""
        how: dict[str, Any] = {"times": self.times, "with_targets": True, "with_next_times": self.with_next_times}
        for chosen in self._chosen(epoch):
            yield pack_histories(self.items, self.start[chosen], self.stop[chosen], **how)


class ClozeBatches(EpochBatches):
    """Batches of the Cloze objective: masked items to be found from both sides.

    Every user with two or more training events is read once an epoch, its last ``max_length`` of them. With probability
    ``last_item_probability`` the history is cut after a random event and that event alone is masked, which is what
    prediction asks (without ``cut`` the history stays whole, and its last event alone is masked); otherwise each event
    is masked with ``mask_probability``, and at least one. What is masked depends on (mask_seed, epoch) and the
    histories, not on their order. A masked last event has the time of the one before it, as the mask has at prediction.

    Args:
        mask: the item index that stands for a masked item.
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
        mask: int,
        mask_probability: float = 0.2,
        last_item_probability: float = 0.5,
        mask_seed: int = 0,
        times: IntArray | None = None,
        cut: bool = True,
    ) -> None:
        trainable = stop - start >= 2
        self.items, self.times, self.batch_size, self.seed = items, times, batch_size, seed
        self.stop = stop[trainable]
        self.start = np.maximum(start[trainable], self.stop - max_length)
        self.mask, self.mask_seed = mask, mask_seed
        self.mask_probability, self.last_item_probability = mask_probability, last_item_probability
        self.cut = cut

    @property
    def num_targets(self) -> float:
        """Events expected to be masked per epoch: of a history of L events last + (1 - last) (L p + (1 - p)^L)."""
        lengths, p = self.stop - self.start, self.mask_probability
        several = lengths * p + (1 - p) ** lengths  # the second term: where none would be masked, one is
        return float((self.last_item_probability + (1 - self.last_item_probability) * several).sum())

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""
        masked, ends = self._draw(epoch)
        hidden = np.where(masked, self.mask, self.items)
        targets = np.where(masked, self.items, 0)
        times = self.times
        if times is not None:
            asked = (ends - 1)[masked[ends - 1]]
            times = times.copy()
            times[asked] = times[asked - 1]
        for chosen in self._chosen(epoch):
            start, stop = self.start[chosen], ends[chosen]
            batch = pack_histories(hidden, start, stop, times=times)
            yield batch._replace(target=pack_histories(targets, start, stop).items)

    def _draw(self, epoch: int) -> tuple[NDArray[np.bool_], IntArray]:
        """The events that are masked in this epoch, (E,) True, and where each history ends in it, (S,)."""
        rng = np.random.default_rng([self.mask_seed, epoch])
        lengths = self.stop - self.start
        first = np.cumsum(lengths) - lengths  # of each history among the tokens that are read
        draw = rng.random(int(lengths.sum()))
        least = np.repeat(np.minimum.reduceat(draw, first), lengths) if lengths.size else draw
        chosen = (draw < self.mask_probability) | (draw == least)
        only_last = rng.random(lengths.size) < self.last_item_probability
        # An item is seen before the last one.
        kept = np.where(only_last & self.cut, rng.integers(2, lengths + 1), lengths)
        chosen[np.repeat(only_last, lengths)] = False
        chosen[(first + kept - 1)[only_last]] = True
        masked = np.zeros(self.items.size, dtype=np.bool_)
        masked[np.repeat(self.start - first, lengths) + np.arange(chosen.size)] = chosen
        return masked, self.start + kept


def place_histories(lengths: IntArray, width: int | None = None) -> tuple[IntArray, IntArray, int, int]:
    """Best-fit decreasing: the row and first column of each history, the number of rows and their width.

    Args:
        lengths: tokens of each history, (S,), at least 1 and at most ``width``.
        width: tokens per row; the longest history's unless given.
    """
    width = int(lengths.max()) if width is None else width
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
