"""The cross-entropy of the validation items over all items, for controllers that steer by it.

    L = mean over users of  -score(user, y) + log sum_i exp score(user, i)                                      (1)

Shapes: N users, V items, D state width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from recbft.datasets import Dataset
from recbft.evaluation.views import evaluation_mode, view_of
from recbft.models.contract import SequenceModel, read_histories

BLOCK_SCORES = 4_000_000  # at a time


def validation_cross_entropy(model: SequenceModel, dataset: Dataset, *, most_users: int = 4096) -> float:
    """Equation (1) over the users of the data set, or over so many of them at equal distances."""
    num_users = dataset.num_users
    chosen = np.unique(np.linspace(0, num_users - 1, min(num_users, most_users)).astype(np.int64))
    view = view_of(dataset, "validation", chosen)
    total, first = 0.0, 0
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        weight, bias = table.weight[1:], None if table.bias is None else table.bias[1:]
        rows = max(1, BLOCK_SCORES // weight.shape[0])
        for batch in read_histories(
            model, dataset.items, view.start, view.stop, times=dataset.times, source=f"data set {dataset.name!r}"
        ):
            states = model.user_states(batch.to(weight.device)).state
            target = torch.from_numpy(view.target[first : first + len(states)] - 1).to(weight.device)
            for part, wanted in zip(states.split(rows), target.split(rows), strict=True):
                total += float(F.cross_entropy(F.linear(part, weight, bias), wanted, reduction="sum"))
            first += len(states)
    return total / len(chosen)
