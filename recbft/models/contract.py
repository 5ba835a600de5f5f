"""What evaluation and recommendation ask of a model: a state per history and a table of items.

    score(user, item) = state_user . weight_item + bias_item                                     (1)

Shapes: S histories, V items, D state width (a model's own).
"""

from __future__ import annotations

import abc
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from recbft.datasets.batches import Batch


class UserStates(NamedTuple):
    """What the model knows of each history after its last event."""

    state: Tensor  # (S, D)
    precision: Tensor | None  # (S,) mean posterior precision of the state, None where the model keeps none


class ItemTable(NamedTuple):
    """The item side of (1); row 0 is padding and never a candidate."""

    weight: Tensor  # (V + 1, D)
    bias: Tensor | None  # (V + 1,)


class SequenceModel(Protocol):
    """A model that can be evaluated and can recommend."""

    max_length: int  # events of a history that it reads, the last ones

    def user_states(self, batch: Batch) -> UserStates:
        """One state per history of the batch, in the batch's order."""
        ...

    def item_table(self) -> ItemTable:
        """The item side of the score."""
        ...


class TrainableModel(nn.Module, abc.ABC):
    """A ``SequenceModel`` that the training loop can train."""

    max_length: int

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
