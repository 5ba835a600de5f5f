"""What evaluation and recommendation ask of a model: a state per history and a table of items.

    score(user, item) = state_user . weight_item + bias_item  (6.2)

Shapes: S histories, V items, D state width (a model's own).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch, history_batches
from recbft.errors import UserError
from recbft.mixers.interface import Group, TrainedPart, optimiser_groups
from recbft.models.precision_channel import CoreConfig

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class UserStates(NamedTuple):
    """What the model knows of each history after its last event."""

    state: Tensor  # (S, D)
    precision: Tensor | None  # (S,) mean posterior precision of the state, None where the model keeps none


class ItemTable(NamedTuple):
    """The item side of (6.2); row 0 is padding and never a candidate."""

    weight: Tensor  # (V + 1, D)
    bias: Tensor | None  # (V + 1,)


class ComparedContent(NamedTuple):
    """The part of (6.2) that compares contents, (6.16), from products that are kept: quicker than from the contents."""

    width: int  # so many last columns of states and item table are what it stands for
    products: Tensor  # (V + 1, V) x_j . x_i
    weight: Tensor  # (V,) w
    items: Tensor  # (S, L) latest events of each history
    decay: Tensor  # (S, L)

    def of(self, rows: IntArray) -> ComparedContent:
        """That of some histories, in the order asked."""
        chosen = torch.from_numpy(rows)
        return self._replace(items=self.items[chosen], decay=self.decay[chosen])


class SequenceModel(abc.ABC):
    """A model that can be evaluated and can recommend: it reads the last ``max_length`` tokens of a history."""

    max_length: int
    append: int | None = None  # an item put after the last event, such as a mask, one of the ``max_length`` tokens
    reads_times: bool = False  # whether it needs the time of every event
    reads_reliability: bool = False  # whether it looks at the reliability of events, where it is known
    shows_target_time: bool = False  # and that of the event after each
    same_for_all: bool = False  # whether every history, an empty one too, has the same state
    core: CoreConfig | None = None  # the settings of its precision channel, where it has one

    @abc.abstractmethod
    def user_states(self, batch: Batch) -> UserStates:
        """One state per history of the batch, in the batch's order."""

    @abc.abstractmethod
    def item_table(self) -> ItemTable:
        """The item side of the score."""

    def compared(self, batches: Iterable[Batch]) -> ComparedContent | None:
        """A part of the scores of all histories of batches, where there is a quicker way to it; None where not."""
        return None


def read_histories(
    model: SequenceModel,
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    times: IntArray | None = None,
    reliability: FloatArray | None = None,
    source: str,
    histories_per_batch: int = HISTORIES_PER_BATCH,
) -> Iterator[Batch]:
    """What the model reads of each history ``items[start:stop]``, in batches.

    Args:
        times: time per event, or None; a model that is shown target times also reads ``times[stop]``.
        reliability: that of each event, NaN where it is missing, or None where it is of all.
        source: what the histories are, for messages.
    """
    if model.reads_times and times is None:
        raise UserError(
            f"the model reads event times (time_bias or mixing.time is true), but {source} has no real times; "
            "give data with a time column (in a shell --time names it), or train without it"
        )
    return history_batches(
        items,
        start,
        stop,
        max_length=model.max_length,
        times=times,
        reliability=reliability if model.reads_reliability else None,
        histories_per_batch=histories_per_batch,
        with_next_times=model.shows_target_time,
        append=model.append,
    )


class TrainableModel(TrainedPart, SequenceModel):
    """A ``SequenceModel`` that the training loop can train."""

    per_item: tuple[str, ...] = ()  # parameters and buffers with a row per token: padding, the items, then what is none

    @abc.abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the positions that have a target; a scalar."""

    @abc.abstractmethod
    def set_ramp(self, ramp: float) -> None:
        """Set the warm-up w in [0, 1], before an optimiser step."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Bring what is kept from the weights up to date: at the start of an epoch and before evaluation."""

    def optimiser_groups(self) -> dict[str, Group]:
        """The optimiser group of every parameter by its name, as the model's parts say."""
        return optimiser_groups(self)
