from __future__ import annotations

import numpy as np
import torch

from recbft.datasets.batches import pack_histories
from recbft.models.popularity import Popularity


def test_every_history_scores_items_by_their_training_count():
    model = Popularity(np.array([0, 3, 0, 2**24 + 1]))
    batch = pack_histories(np.array([1, 2, 3, 1]), np.array([0, 3]), np.array([3, 4]))
    states, table = model.user_states(batch), model.item_table()
    assert (states.state @ table.weight.T).tolist() == [[0, 3, 0, 2**24 + 1]] * 2
    assert states.precision is None and table.bias is None


def test_the_counts_travel_with_the_state_dict():
    model = Popularity(torch.zeros(4, dtype=torch.int64))
    model.load_state_dict(Popularity(np.array([0, 3, 0, 5])).state_dict())
    assert model.counts.tolist() == [0, 3, 0, 5]
