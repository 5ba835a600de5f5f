"""How high items with few training events are to stand: one number, fitted by what it costs on validation.

    score(i) + l  for items with fewer than RARE events                                                        (1)
    l the largest of LEVELS at which, as at all smaller ones, NDCG@10 >= (1 - cost) NDCG@10(l = 0)               (2)

A list has ten places, so what rare targets gain others lose. Likelihood asks for little of it, since few events are of
rare items; who wants rare items listed says what that may cost. (2) is taken over validation targets that their users
have not seen, seen items masked.

Shapes: N targets, L levels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from recbft.datasets.dataset import Dataset
from recbft.errors import UserError
from recbft.evaluation.metrics import ndcg, over_users, owner_of
from recbft.evaluation.new_items import JUDGED_SCORES, JUDGED_USERS, ShiftedScores
from recbft.evaluation.probability import rows_of_new_targets
from recbft.evaluation.score_blocks import align
from recbft.evaluation.views import evaluation_mode, some_users, states_of_view, view_of
from recbft.models.contract import SequenceModel

LEVELS = np.arange(101) / 20  # of l


class RareLevel(NamedTuple):
    """What was fitted."""

    level: float  # l of (1)
    ndcg: tuple[float, float]  # NDCG@10 of all targets, at l = 0 and at l
    ndcg_rare: tuple[float, float]  # of rare targets, likewise


def fit_rare_level(
    model: SequenceModel, dataset: Dataset, cost: float, *, fewer_than: int, memory_mb: float = 256.0
) -> RareLevel:
    """l of (2), on top of what the model gives rare items already.

    Args:
        cost: the share of NDCG@10 that may be lost, from 0 to 1.
        fewer_than: training events that an item is rare below.

    Raises:
        UserError: no validation target that its user has not seen is rare.
    """
    is_rare = np.asarray(dataset.training_counts)[1:] < fewer_than
    view = view_of(dataset, "validation")
    new = rows_of_new_targets(view)
    view = view.rows(new[some_users(len(new), dataset.num_items, scores=JUDGED_SCORES, at_least=JUDGED_USERS)])
    of_rare = is_rare[view.target - 1]
    if not of_rare.any():
        raise UserError(
            f"no validation target of data set {dataset.name!r} is an item with fewer than {fewer_than} training "
            "events, so what raising these costs cannot be seen; leave it out"
        )
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, candidates = align(states_of_view(model, dataset, view, table.weight.device)[0], table)
        ranks, _, _ = ShiftedScores(states, candidates, view, is_rare, True, memory_mb).ranks(LEVELS)
    values = ndcg(ranks, 10)  # (L, N)
    means = over_users(values, owner_of(view.user)).mean(axis=1)
    rare = over_users(values[:, of_rare], owner_of(view.user[of_rare])).mean(axis=1)
    allowed = means >= (1 - cost) * means[0]
    last = len(LEVELS) - 1 if allowed.all() else int(allowed.argmin()) - 1
    return RareLevel(float(LEVELS[last]), (float(means[0]), float(means[last])), (float(rare[0]), float(rare[last])))
