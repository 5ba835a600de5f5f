"""Popularity: every user gets the items by training count, the reference that a model must beat.

    state_u = 1      weight_i = training events of item i  (6.2)

Shapes: S histories, V items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.datasets.batches import Batch
from recbft.models.contract import ItemTable, SequenceModel, UserStates


@dataclass(frozen=True, kw_only=True)
class PopularityConfig:
    """Nothing to choose."""


class Popularity(nn.Module, SequenceModel):
    """Scores an item by its training count, whoever asks.

    Args:
        training_counts: events per item index, (V + 1,), whole numbers >= 0.
    """

    counts: Tensor

    def __init__(self, training_counts: Tensor | NDArray[np.int64]) -> None:
        super().__init__()
        self.max_length = 1  # events read of a history, of which none matters
        # Double precision holds every count exactly, so equal scores are equal counts.
        self.register_buffer("counts", torch.as_tensor(training_counts, dtype=torch.float64))

    def user_states(self, batch: Batch) -> UserStates:
        """The same state, 1, for every history."""
        return UserStates(self.counts.new_ones(batch.last.numel(), 1), None)

    def item_table(self) -> ItemTable:
        """The counts as weights of width 1."""
        return ItemTable(self.counts[:, None], None)
