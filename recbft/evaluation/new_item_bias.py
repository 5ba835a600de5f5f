"""How high items without a training event stand beside the others: one number, fitted on validation.

    score(i) + delta  for items without events,  sum_u P_u(new; delta) / U = (n + 1/2) / (U + 1)         (6.17)

P_u(new) is what the softmax of user u's scores over the items that u has not seen gives to all items without events,
n of the U validation targets that their users have not seen are such. Up to the halves, which keep delta finite, that
is the delta of the largest likelihood: a model never met these items as targets, so its scores do not say how often
they are some. Seen items are left out because a model that was never asked to rank them low gives them much of its
softmax; what new items stand beside in a list is the rest.

Shapes: S users, V items, D state width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recbft.datasets.dataset import Dataset
from recbft.evaluation.probability import rows_of_new_targets, score_rows
from recbft.evaluation.score_blocks import Excluded
from recbft.evaluation.views import evaluation_mode, seen_of, some_users, states_of_view, view_of
from recbft.models.backbone import Backbone
from recbft.models.contract import SequenceModel

SCORES, AT_LEAST = 10_000_000, 500  # of users by items that the share is taken over
LARGEST = 50.0  # of delta, either way


def level_new_items(model: SequenceModel | nn.Module, dataset: Dataset) -> None:
    """Bring the items without events of a model that reads item features to their level, before it is judged."""
    if isinstance(model, Backbone) and model.item_belief is not None:
        model.refresh()
        model.item_belief.raise_new_items(fit_new_item_bias(model, dataset))


def fit_new_item_bias(model: SequenceModel, dataset: Dataset, *, memory_mb: float = 256.0) -> float:
    """delta of (6.17), on top of what the model adds to the scores of new items already.

    Returns:
        0 where every item has a training event, or none has, or all targets are items that their users have seen.
    """
    new = torch.from_numpy(dataset.training_weights[1:] == 0)
    if not new.any() or new.all():
        return 0.0
    view = view_of(dataset, "validation")
    view = view.rows(rows_of_new_targets(view))
    if not len(view.target):
        return 0.0
    count = int(new[torch.from_numpy(view.target - 1)].sum())
    share = (count + 0.5) / (len(view.target) + 1)
    some = view.rows(some_users(len(view.target), dataset.num_items, scores=SCORES, at_least=AT_LEAST))
    excluded = Excluded.of(*seen_of(some), len(some.target), dataset.num_items)
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, some, table.weight.device)
        new, found, done = new.to(states.device), [], 0
        for block, _ in score_rows(states, table, some.target, memory_mb):
            users = slice(done, done + len(block))
            excluded.mask(block, users, slice(0, dataset.num_items))
            scores, done = block.double(), users.stop
            found.append(scores[:, new].logsumexp(dim=1) - scores[:, ~new].logsumexp(dim=1))
    return _solved(torch.cat(found).cpu().numpy(), share)


def _solved(log_odds: NDArray[np.float64], share: float) -> float:
    """delta with the mean of s(log_odds + delta) equal to ``share``, by halving."""
    low, high = -LARGEST, LARGEST
    for _ in range(60):
        middle = (low + high) / 2
        mean = float((1 / (1 + np.exp(-(log_odds + middle)))).mean())
        low, high = (middle, high) if mean < share else (low, middle)
    return (low + high) / 2
