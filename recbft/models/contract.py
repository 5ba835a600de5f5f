"""What evaluation and recommendation ask of a model: a state per history and a table of items.

    score(user, item) = state_user . weight_item + bias_item                                     (1)

Shapes: S histories, V items, D state width (a model's own).
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch, history_batches
from recbft.errors import UserError

IntArray = NDArray[np.int64]


class UserStates(NamedTuple):
    """What the model knows of each history after its last event."""

    state: Tensor  # (S, D)
    precision: Tensor | None  # (S,) mean posterior precision of the state, None where the model keeps none


class ItemTable(NamedTuple):
    """The item side of (1); row 0 is padding and never a candidate."""

    weight: Tensor  # (V + 1, D)
    bias: Tensor | None  # (V + 1,)


class SequenceModel(Protocol):
    """A model that can be evaluated and can recommend.

    What it reads of a history is its last ``max_length`` events, unless it says more by these attributes, which it may
    leave out: ``append`` (an item index put after the last event, such as a mask, one of the ``max_length`` tokens),
    ``reads_times`` (it needs the time of every event) and ``shows_target_time`` (and that of the event after each).
    """

    max_length: int  # tokens of a history that it reads, the last ones

    def user_states(self, batch: Batch) -> UserStates:
        """One state per history of the batch, in the batch's order."""
        ...

    def item_table(self) -> ItemTable:
        """The item side of the score."""
        ...


def read_histories(
    model: SequenceModel,
    items: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    times: IntArray | None = None,
    source: str,
    histories_per_batch: int = HISTORIES_PER_BATCH,
) -> Iterator[Batch]:
    """What the model reads of each history ``items[start:stop]``, in batches.

    Args:
        times: time per event, or None; a model that is shown target times also reads ``times[stop]``.
        source: what the histories are, for messages.

    Raises:
        UserError: the model reads times and there are none.
    """
    reads_times = getattr(model, "reads_times", False)
    if reads_times and times is None:
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
        histories_per_batch=histories_per_batch,
        with_next_times=getattr(model, "shows_target_time", False),
        append=getattr(model, "append", None),
    )


class TrainableModel(nn.Module, abc.ABC):
    """A ``SequenceModel`` that the training loop can train."""

    max_length: int
    append: int | None = None
    reads_times: bool = False
    shows_target_time: bool = False
    per_item: tuple[str, ...] = ()  # parameters and buffers with a row per token: padding, the items, then what is none

    @abc.abstractmethod
    def user_states(self, batch: Batch) -> UserStates:
        """One state per history of the batch, in the batch's order."""

    @abc.abstractmethod
    def item_table(self) -> ItemTable:
        """The item side of the score."""

    @abc.abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the positions that have a target; a scalar."""

    @abc.abstractmethod
    def set_ramp(self, ramp: float) -> None:
        """Set the warm-up w in [0, 1], before an optimiser step."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Bring what is kept from the weights up to date: at the start of an epoch and before evaluation."""

    @abc.abstractmethod
    def is_precision_parameter(self, name: str) -> bool:
        """Whether a parameter, by its full name, belongs to the optimiser's precision group."""

    @abc.abstractmethod
    def is_dynamics_parameter(self, name: str) -> bool:
        """Whether a parameter belongs to the optimiser's group of stochastic dynamics."""
