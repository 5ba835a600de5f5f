"""Which items do lists show? How much of the catalogue, how evenly, and how popular it is.

    n_i          = number of users whose k best items hold item i                          (a)
    coverage@k   = share of the V items with n_i > 0                                       (b)
    gini@k       = sum_i (2 i - V - 1) n_(i) / (V sum_i n_i),  n_(1) <= ... <= n_(V)        (c)
    popularity@k = sum_i n_i c_i / sum_i n_i,  c_i the training events of item i           (d)

(c) is 0 where all items are shown to equally many users and 1 - 1 / V where one item is shown to all; (d) is the mean
over all places of all lists, by the data that are evaluated, which may be others than were trained on. None of them
says whether a list is right, and the target has no part in them. What users took themselves is what (d) can be held
against: the mean training count of the targets.

Source: Shani and Gunawardana, Evaluating Recommendation Systems (2011), section 3.3 for (b) and (c); RecBole has them
as ItemCoverage, GiniIndex and AveragePopularity.
Shapes: N users, V items, k items per list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recbft.evaluation.views import some_users

IntArray = NDArray[np.int64]
MEASURES = ("coverage", "gini", "popularity")
LISTED_SCORES = 1_000_000_000  # lists are made of so many users by items,
LISTED_USERS = 1000  # or of so many users where that is more


def lists_of(num_users: int, num_items: int) -> str | None:
    """Whose lists are made, in words, where they are not everyone's; coverage rises with their number."""
    listed = listed_users(num_users, num_items).size
    return None if listed == num_users else f"{listed:,} of the {num_users:,} users"


def listed_users(num_users: int, num_items: int) -> IntArray:
    """Row numbers of those whose lists are made."""
    return some_users(num_users, num_items, scores=LISTED_SCORES, at_least=LISTED_USERS)


def shown(items: IntArray, num_items: int, ks: Sequence[int]) -> IntArray:
    """Equation (a) for each k, (len(ks), V).

    Args:
        items: item indices of every list, best first, 0 where a list is shorter, (N, max(ks)).
    """
    counts = [np.bincount(items[:, :k].ravel(), minlength=num_items + 1)[1:] for k in ks]
    return np.stack(counts).astype(np.int64)


def exposure(counts: IntArray, training_counts: IntArray, ks: Sequence[int]) -> dict[str, float]:
    """Equations (b) to (d) by name ("coverage@10"); (c) and (d) are left out where no list has an item.

    Args:
        counts: (a) for each k, (len(ks), V).
        training_counts: c of (d), (V,).
    """
    found: dict[str, float] = {}
    num_items = counts.shape[1]
    for k, n in zip(ks, counts, strict=True):
        found[f"coverage@{k}"] = float(np.mean(n > 0))
        if total := int(n.sum()):
            place = 2 * np.arange(1, num_items + 1) - num_items - 1
            found[f"gini@{k}"] = float(place @ np.sort(n)) / (num_items * total)
            found[f"popularity@{k}"] = float(n @ training_counts) / total
    return found


def usual_cutoff(found: Mapping[str, float]) -> int:
    """The k that a table shows: 10 where it was measured, else the largest."""
    ks = [int(name.partition("@")[2]) for name in found]
    return 10 if 10 in ks else max(ks)
