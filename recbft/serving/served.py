"""A trained model as it answers requests: the table of items is made once, and one history takes a shorter way.

Shapes: T events of a history.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.models.contract import ItemTable, SequenceModel, UserStates
from recbft.models.inference import UserEncoder, user_encoder

IntArray = NDArray[np.int64]


class Served(SequenceModel):
    """A model whose weights stay as they are, in evaluation."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.max_length, self.append, self.core = model.max_length, model.append, model.core
        self.reads_times, self.shows_target_time = model.reads_times, model.shows_target_time
        self.reads_reliability, self.same_for_all = model.reads_reliability, model.same_for_all

    def user_states(self, batch: Batch) -> UserStates:
        """Those of the model."""
        states: UserStates = self.model.user_states(batch)
        return states

    def item_table(self) -> ItemTable:
        """That of the model, which is kept."""
        return self._table

    def states_of_one(self, items: IntArray, times: IntArray | None) -> list[UserStates]:
        """Those of one history of item indices, (T,), by ``models.inference``; none where that cannot serve."""
        if self._encoder is None or (self.reads_times and times is None):
            return []
        device = self._table.weight.device
        at = None if times is None else torch.from_numpy(times[None]).to(device)
        return [self._encoder.of_one(torch.from_numpy(items[None]).to(device), at)]

    @cached_property
    def _table(self) -> ItemTable:
        with torch.inference_mode():
            table: ItemTable = self.model.item_table()
        return table

    @cached_property
    def _encoder(self) -> UserEncoder | None:
        with suppress(UserError):
            return user_encoder(self.model)
        return None
