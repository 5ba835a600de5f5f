"""Whole histories packed into rows, so that the cost of a batch follows its real tokens.

A batch of S histories (each cut to its last ``max_length`` events) fills rows as wide as the longest of them, several
short histories to a row. What a token may see is told by its ``segment`` (the history's number within the batch) and
its ``position`` (0 for the oldest kept event). A history's tokens stand side by side, oldest first, as memory mixers
need; attention never asks where in a row a token stands.

Shapes: S histories, B rows, T tokens per row.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.samples import IntArray, SampleKind, Samples, ranges

FloatArray = NDArray[np.float64]
HISTORIES_PER_BATCH = 256  # read at once in evaluation; on a CPU more take more memory and no less time


class Batch(NamedTuple):
    """Packed histories; all tensors int64 but for weights and reliability, which are float64."""

    items: Tensor  # (B, T) item index, 0 padding
    segment: Tensor  # (B, T) history number within the batch, -1 padding
    position: Tensor  # (B, T) 0 for the oldest kept event of its history, 0 padding
    time: Tensor | None  # (B, T) the data's own unit, 0 padding; None when the data has no real times
    target: Tensor | None  # (B, T) the next item where there is one to learn, 0 elsewhere; None in evaluation
    last: Tensor  # (S,) flat index (row * T + column) of each history's last token
    next_time: Tensor | None = None  # (B, T) time of the event after each token, for models that are shown it
    earlier: Tensor | None = None  # (E,) items that stand before what is read, history by history; None where not asked
    num_earlier: Tensor | None = None  # (S,) how many of them are each history's
    weight: Tensor | None = None  # (B, T) of each target, 0 elsewhere; None where all count alike
    reliability: Tensor | None = None  # (B, T) of each event that is read, NaN where it is missing, and elsewhere

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device, in one copy that is not waited for where the device allows it."""
        if torch.device(device) == self.items.device:
            return self
        own = [x for x in self if x is not None]
        joined = torch.cat([x.view(torch.int64).flatten() for x in own])  # of floats their bits
        if joined.device.type == "cpu" and torch.cuda.is_available():
            joined = joined.pin_memory()
        parts = iter(joined.to(device, non_blocking=True).split([x.numel() for x in own]))
        return Batch(*(None if x is None else next(parts).view(x.dtype).view(x.shape) for x in self))  # type: ignore[arg-type]

    def with_last_targets(self) -> Batch:
        """The batch with the target of each history's last token alone."""
        assert self.target is not None
        target = torch.zeros_like(self.target).flatten()
        target[self.last] = self.target.flatten()[self.last]
        return self._replace(target=target.view_as(self.target))

    def with_weights_alone(self) -> Batch:
        """The batch without the targets of weight 0; where it has none else the first stays, and teaches nothing."""
        if self.weight is None:
            return self
        assert self.target is not None
        learns = (self.target > 0) & (self.weight > 0)
        if not learns.any():
            first = (self.target > 0).flatten().to(torch.uint8).argmax()
            learns.view(-1)[first] = True
        return self._replace(target=self.target * learns, weight=self.weight * learns)

    @property
    def learned_weight(self) -> float:
        """What the targets count together: their number where all count alike."""
        assert self.target is not None
        learns = self.target > 0
        return float(learns.sum() if self.weight is None else self.weight[learns].sum())

    def of_rows(self, rows: Tensor) -> Batch:
        """What some rows hold, (R,), as a batch of its own, whose histories are counted anew."""
        num_rows, width = self.items.shape
        new_row = self.items.new_full((num_rows,), -1).index_copy_(0, rows, torch.arange(len(rows)))
        row = new_row[self.last // width]  # (S,), -1 where a history is left out
        number = (row >= 0).cumsum(0) - 1
        whole = (self.last, self.earlier, self.num_earlier)  # what is not a grid of tokens
        grids = (None if x is None or any(x is other for other in whole) else x[rows] for x in self)
        chosen = Batch(*grids)  # type: ignore[arg-type]
        if self.earlier is not None and self.num_earlier is not None:
            earlier = self.earlier[(row >= 0).repeat_interleave(self.num_earlier)]
            chosen = chosen._replace(earlier=earlier, num_earlier=self.num_earlier[row >= 0])
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
    weights: FloatArray | None = None,
    reliability: FloatArray | None = None,
    with_targets: bool = False,
    with_next_times: bool = False,
    append: int | None = None,
    first: IntArray | None = None,
) -> Batch:
    """Pack ``items[start:stop]`` of each history into rows; with targets, event t+1 is the target of token t.

    Args:
        items: all events, (E,), item indices >= 1.
        start, stop: bounds of each history, (S,), stop > start, or stop >= start with ``append``.
        times: time per event, (E,), or None.
        weights: of every event as a target, (E,), or None: each token gets that of its target, the event itself
            without ``with_targets``.
        reliability: per event, (E,), or None; what is appended has none.
        with_targets: the history's target at its last token is ``items[stop]``, which the caller warrants to exist.
        with_next_times: every token gets the time of the event after it, with the same warrant for ``times[stop]``.
        append: an item put after each history's last event, such as a mask, at the time of that event.
        first: the first event of what each history is the end of, (S,); the batch knows the items before it then.

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

    def fill(values: IntArray | FloatArray, empty: float) -> Tensor:
        grid = np.full(num_rows * width, empty, dtype=values.dtype)
        grid[cell] = values
        return torch.from_numpy(grid.reshape(num_rows, width))

    read = items[event]
    if appended is not None:
        read[appended] = append
    known = None if reliability is None else reliability[event]
    if known is not None and appended is not None:
        known[appended] = np.nan
    assert times is not None or not with_next_times
    return Batch(
        items=fill(read, 0),
        segment=fill(segment, -1),
        position=fill(position, 0),
        time=None if times is None else fill(times[event], 0),
        target=fill(items[event + 1], 0) if with_targets else None,
        last=torch.from_numpy(row * width + column + lengths - 1),
        next_time=fill(times[event + 1], 0) if times is not None and with_next_times else None,
        earlier=None if first is None else torch.from_numpy(items[ranges(first, start)]),
        num_earlier=None if first is None else torch.from_numpy(start - first),
        weight=None if weights is None else fill(weights[event + with_targets], 0),
        reliability=None if known is None else fill(known, np.nan),
    )


def history_batches(
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    max_length: int,
    times: IntArray | None = None,
    reliability: FloatArray | None = None,
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
            items,
            start[chosen],
            stop[chosen],
            times=times,
            reliability=reliability,
            with_next_times=with_next_times,
            append=append,
        )


class EpochBatches(abc.ABC):
    """What the training loop asks of its batches. They depend on the seed and the epoch's number alone.

    So a resumed run continues with the batches it would have seen. An epoch always has as many batches, over which its
    pieces of histories are spread, some more or fewer to a batch where their number varies.
    """

    batch_size: int  # pieces per batch
    seed: int
    samples: Samples

    @property
    def num_batches(self) -> int:
        """Optimiser steps per epoch."""
        return -(-self.samples.num_pieces // self.batch_size)

    @property
    def num_tokens(self) -> int:
        """Tokens read per epoch, at most; as the first epoch does."""
        pieces = self.samples.of_epoch(0)
        return int((pieces.stop - pieces.start).sum())

    @property
    @abc.abstractmethod
    def num_targets(self) -> float:
        """Targets per epoch; their expectation where they are drawn."""

    @abc.abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""

    def _chosen(self, epoch: int, num_pieces: int) -> Iterator[IntArray]:
        """The pieces of each batch of an epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(num_pieces)
        usual, number = self.samples.num_pieces, self.num_batches
        cuts = [min(num_pieces, round(n * self.batch_size * num_pieces / usual)) for n in range(number)]
        for first, stop in itertools.pairwise([*cuts, num_pieces]):
            # An epoch may have fewer pieces than batches: there one is read again.
            yield order[first:stop] if first < stop else order[first - 1 : first] if first else order[:1]


class TrainingBatches(EpochBatches):
    """Batches for next-item models: every user with two or more training events.

    A piece of at most ``max_length`` events gives as many inputs, whose targets are their next events; of a prefix, the
    last input alone has one. With ``windows`` and ``prefixes`` every training event but a history's first is a target
    once an epoch, with ``last`` the last ``max_length`` of them are.
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
        samples: SampleKind = "last",
        times: IntArray | None = None,
        weights: FloatArray | None = None,
        reliability: FloatArray | None = None,
        with_next_times: bool = False,
        with_earlier: bool = False,
    ) -> None:
        trainable = stop - start >= 2
        self.items, self.times, self.batch_size, self.seed = items, times, batch_size, seed
        self.weights, self.reliability = _telling(weights, start, stop), reliability
        self.with_next_times, self.with_earlier = with_next_times, with_earlier
        # Inputs end one event before the last training event, which is the last target.
        self.samples = Samples(samples, start[trainable], stop[trainable] - 1, length=max_length, seed=seed)

    @property
    def num_targets(self) -> float:
        """One per token, or per prefix."""
        return self.samples.num_pieces if self.samples.kind == "prefixes" else self.num_tokens

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""
        how: dict[str, Any] = {"times": self.times, "weights": self.weights, "reliability": self.reliability}
        how |= {"with_targets": True, "with_next_times": self.with_next_times}
        start, stop, first = self.samples.of_epoch(epoch)
        for chosen in self._chosen(epoch, start.size):
            how["first"] = first[chosen] if self.with_earlier else None
            batch = pack_histories(self.items, start[chosen], stop[chosen], **how)
            batch = batch.with_last_targets() if self.samples.kind == "prefixes" else batch
            yield batch.with_weights_alone()


class ClozeBatches(EpochBatches):
    """Batches of the Cloze objective: masked items to be found from both sides.

    Users with two or more training events are read, in pieces of two to ``max_length`` of them. With probability
    ``last_item_probability`` a piece is cut after a random event and that event alone is masked, which is what
    prediction asks (a prefix stays whole, and its last event alone is masked); otherwise each event is masked with
    ``mask_probability``, and at least one. What is masked depends on (mask_seed, epoch) and the pieces, not on their
    order; for prefixes, on their order too. A masked last event has the time of the one before it, as the mask has at
    prediction.

    Args:
        mask: the item index that stands for a masked item.
        cut: False leaves all pieces whole, as prefixes are.
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
        samples: SampleKind = "last",
        mask_probability: float = 0.2,
        last_item_probability: float = 0.5,
        mask_seed: int = 0,
        times: IntArray | None = None,
        weights: FloatArray | None = None,
        reliability: FloatArray | None = None,
        cut: bool = True,
        with_earlier: bool = False,
    ) -> None:
        trainable = stop - start >= 2
        self.items, self.times, self.batch_size, self.seed = items, times, batch_size, seed
        self.weights, self.reliability = _telling(weights, start, stop), reliability
        self.samples = Samples(samples, start[trainable], stop[trainable], length=max_length, least=2, seed=seed)
        self.mask, self.mask_seed = mask, mask_seed
        self.mask_probability, self.last_item_probability = mask_probability, last_item_probability
        self.cut, self.with_earlier = cut and samples != "prefixes", with_earlier

    @property
    def num_targets(self) -> float:
        """Events expected to be masked per epoch: of a piece of L events last + (1 - last) (L p + (1 - p)^L)."""
        pieces = self.samples.of_epoch(0)
        lengths, p = pieces.stop - pieces.start, self.mask_probability
        several = lengths * p + (1 - p) ** lengths  # the second term: where none would be masked, one is
        return float((self.last_item_probability + (1 - self.last_item_probability) * several).sum())

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in that epoch's order."""
        start, stop, first = self.samples.of_epoch(epoch)
        at_once = None if self.samples.kind == "prefixes" else self._draw([self.mask_seed, epoch], stop - start)
        for number, chosen in enumerate(self._chosen(epoch, start.size)):
            masks = None if at_once is None else at_once.of(chosen)
            if masks is None:  # the tokens of all prefixes are many times the events: a batch of masks at a time
                masks = self._draw([self.mask_seed, epoch, 1 + number], (stop - start)[chosen])
            yield self._masked(start[chosen], first[chosen], masks)

    def _masked(self, start: IntArray, whole: IntArray, masks: _Masks) -> Batch:
        """The batch of pieces that begin at these events, of histories that begin at ``whole``."""
        kept = masks.kept
        event = ranges(start, start + kept)
        masked = masks.masked[ranges(masks.first, masks.first + kept)]
        items = self.items[event]
        end = np.cumsum(kept)
        times = None if self.times is None else self.times[event]
        if times is not None:
            asked = (end - 1)[masked[end - 1]]
            times[asked] = times[asked - 1]
        weights = None if self.weights is None else self.weights[event]
        # what is masked is not known, and neither is how reliable it was
        known = None if self.reliability is None else np.where(masked, np.nan, self.reliability[event])
        batch = pack_histories(
            np.where(masked, self.mask, items), end - kept, end, times=times, weights=weights, reliability=known
        )
        if self.with_earlier:
            earlier = torch.from_numpy(self.items[ranges(whole, start)])
            batch = batch._replace(earlier=earlier, num_earlier=torch.from_numpy(start - whole))
        target = pack_histories(np.where(masked, items, 0), end - kept, end).items
        return batch._replace(target=target).with_weights_alone()

    def _draw(self, entropy: list[int], lengths: IntArray) -> _Masks:
        """What is masked of pieces of these lengths."""
        rng = np.random.default_rng(entropy)
        first = np.cumsum(lengths) - lengths
        draw = rng.random(int(lengths.sum()))
        least = np.repeat(np.minimum.reduceat(draw, first), lengths) if lengths.size else draw
        chosen = (draw < self.mask_probability) | (draw == least)
        only_last = rng.random(lengths.size) < self.last_item_probability
        # An item is seen before the last one.
        kept = np.where(only_last & self.cut, rng.integers(2, lengths + 1), lengths)
        chosen[np.repeat(only_last, lengths)] = False
        chosen[(first + kept - 1)[only_last]] = True
        return _Masks(chosen, first, kept)


class _Masks(NamedTuple):
    """Which events of some pieces are masked, and how much of each is read."""

    masked: NDArray[np.bool_]  # of all pieces end to end
    first: IntArray  # where each begins there
    kept: IntArray  # its events that are read

    def of(self, chosen: IntArray) -> _Masks:
        """Those of some pieces."""
        return _Masks(self.masked, self.first[chosen], self.kept[chosen])


def _telling(weights: FloatArray | None, start: IntArray, stop: IntArray) -> FloatArray | None:
    """The weights of all events, or None where those that train count alike: a mean is the same without them."""
    if weights is None:
        return None
    train = weights[ranges(start, stop)]
    return None if train.size and train.min() == train.max() > 0 else weights


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
