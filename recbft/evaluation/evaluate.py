"""Rank every user's held-out items with a model: the one pass behind every number.

Both settings (all items, seen items masked) come from the same pass; ``filter_seen`` says which one is the headline.
Asked for, the lists of the best items are made beside the ranks: how much of the catalogue do they show, how evenly,
and how popular is it?

    n_i          = number of users whose k best items hold item i                          (a)
    coverage@k   = share of the V items with n_i > 0                                       (b)
    gini@k       = sum_i (2 i - V - 1) n_(i) / (V sum_i n_i),  n_(1) <= ... <= n_(V)        (c)
    popularity@k = sum_i n_i c_i / sum_i n_i,  c_i the training events of item i           (d)

(c) is 0 where all items are shown to equally many users and 1 - 1 / V where one item is shown to all; (d) is the mean
over all places of all lists, by the data that are evaluated, which may be others than were trained on. What users took
themselves is what (d) can be held against: the mean training count of the targets.

Source: Shani and Gunawardana, Evaluating Recommendation Systems (2011), section 3.3 for (b) and (c); RecBole has them
as ItemCoverage, GiniIndex and AveragePopularity.
Shapes: N targets, as many as users unless the split gives them several; V items, k items per list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from recbft.datasets.batches import HISTORIES_PER_BATCH
from recbft.datasets.dataset import Dataset
from recbft.datasets.split import View
from recbft.evaluation.metrics import KS, SETTINGS, headline_setting, metrics_from_ranks
from recbft.evaluation.ranks import Ranks, full_ranks
from recbft.evaluation.top_k import top_k
from recbft.evaluation.views import (
    Part,
    compared_of_view,
    evaluation_mode,
    events_of,
    seen_of,
    some_users,
    states_of_view,
    view_of,
)
from recbft.models.contract import SequenceModel

IntArray = NDArray[np.int64]
T = TypeVar("T")
LISTED_SCORES = 1_000_000_000  # lists are made of so many users by items,
LISTED_USERS = 1000  # or of so many users where that is more


class Sharing(Protocol):
    """Processes that evaluate together, each its part of the users."""

    def each_does(self, count: int, work: Callable[[slice], T]) -> list[T]:
        """What all of them make of their parts of ``count`` users, in order; a part may be empty."""
        ...


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Ranks of one part of a data set and what follows from them.

    Args:
        part: "validation" or "test".
        filter_seen: whether seen items are masked in the headline.
        per_user: one row per target, users in the data set's order: user (raw id), history_length (events ranked from,
            before the cut to the model's length), target (raw id), target_count (its training events in this data
            set), rank_unfiltered, rank_filtered; of a split other than plain leave-one-out also training_length (the
            user's training events).
        metrics: "unfiltered" and "filtered", each metric by name.
        precision: the posterior precision behind each row's scores, (N,); None where the model keeps none.
        exposure: "unfiltered" and "filtered", (b) to (d) by name; None where no lists were asked for.
    """

    part: Part
    filter_seen: bool
    per_user: pd.DataFrame
    metrics: dict[str, dict[str, float]]
    precision: NDArray[np.floating] | None
    exposure: dict[str, dict[str, float]] | None = None

    @property
    def headline(self) -> dict[str, float]:
        """The metrics of the chosen setting."""
        return self.metrics[headline_setting(self.filter_seen)]

    def __repr__(self) -> str:
        among = "all items but those seen" if self.filter_seen else "all items"
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.headline.items())
        return f"<Evaluation, {self.part} targets of {self.per_user['user'].nunique():,} users among {among}: {values}>"


def evaluate(
    model: SequenceModel,
    dataset: Dataset,
    part: Part,
    *,
    filter_seen: bool = False,
    ks: Sequence[int] = KS,
    memory_mb: float = 256.0,
    sharing: Sharing | None = None,
    lists: bool = False,
) -> Evaluation:
    """Rank all users of a part and average.

    Args:
        memory_mb: bound on the block of scores, and on the states held at a time.
        sharing: processes that call this alike and share the work; every one of them gets the whole.
        lists: make the lists of the best items too, in both settings, and say which items they show; of some users,
            drawn from a fixed seed, where users by items are more than a billion.

    Raises:
        UserError: the part is unknown or there is no user.
        RunError: a score is NaN.
    """
    view = view_of(dataset, part)
    num_rows, first, owner = len(view.target), view.first_rows, view.owner
    listed = first[listed_users(first.size, dataset.num_items)] if lists else np.empty(0, np.int64)

    def rank(users: slice) -> _Found:
        return _rank(model, dataset, view, users, ks=ks if lists else (), listed=listed, memory_mb=memory_mb)

    parts = [rank(slice(0, num_rows))] if sharing is None else sharing.each_does(num_rows, rank)
    ranks = _joined([part.ranks for part in parts])
    precisions = [part.precision for part in parts if part.precision is not None]
    counts = np.sum([part.shown for part in parts], axis=0)
    how = dataset.splitting
    of_lists = how.split != "leave_one_out" and how.split_targets == "all"  # all of a user's in one list
    more = {} if dataset.splitting.is_plain else {"training_length": dataset.split.training_length[view.user]}
    return Evaluation(
        part=part,
        filter_seen=filter_seen,
        per_user=pd.DataFrame(
            {
                "user": dataset.user_ids[view.user],
                "history_length": view.stop - view.start,
                "target": dataset.decode(view.target),
                "target_count": dataset.training_counts[view.target],
                "rank_unfiltered": ranks.unfiltered,
                "rank_filtered": ranks.filtered,
                **more,
            }
        ),
        metrics={
            "unfiltered": metrics_from_ranks(ranks.unfiltered, ks, owner, of_lists=of_lists),
            "filtered": metrics_from_ranks(ranks.filtered, ks, owner, of_lists=of_lists),
        },
        precision=np.concatenate(precisions) if precisions else None,
        exposure={
            setting: exposure(each, dataset.training_counts[1:], ks)
            for setting, each in zip(SETTINGS, counts, strict=True)
        }
        if lists
        else None,
    )


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


class _Found(NamedTuple):
    """What is known of n rows of a view."""

    ranks: Ranks
    precision: NDArray[np.floating] | None  # (n,)
    shown: IntArray  # how many of their lists show an item, by setting and k, (2, len(ks), V)


def _rank(
    model: SequenceModel,
    dataset: Dataset,
    view: View,
    users: slice,
    *,
    ks: Sequence[int],
    listed: IntArray,
    memory_mb: float,
) -> _Found:
    """Ranks of some users, and what the lists of those who are listed show, with the model in evaluation mode."""
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        at_once = max(HISTORIES_PER_BATCH, int(memory_mb * 2**20) // (4 * table.weight.shape[1]))
        ranks, precisions = [], []
        counts = np.zeros((2, len(ks), dataset.num_items), np.int64)
        for first in range(users.start, users.stop, at_once):
            chunk = slice(first, min(first + at_once, users.stop))
            part = view.rows(chunk)
            states, precision = states_of_view(model, dataset, part, table.weight.device)
            seen, ids = seen_of(part), dataset.user_ids[part.user]
            compared = compared_of_view(model, dataset, part)
            ranks.append(
                full_ranks(states, table, part.target, *seen, memory_mb=memory_mb, user_ids=ids, compared=compared)
            )
            if precision is not None:
                precisions.append(precision)
            who = listed[slice(*np.searchsorted(listed, [chunk.start, chunk.stop]))] - chunk.start
            own = events_of(view.items, part.start[who], part.stop[who])
            for one, (barred, by_user) in zip(counts, ((None, None), own), strict=True) if who.size else ():
                best = top_k(
                    states[torch.from_numpy(who).to(states.device)], table, min(max(ks), dataset.num_items),
                    exclude_items=barred, exclude_offsets=by_user, memory_mb=memory_mb,
                    compared=None if compared is None else compared.of(who),
                )  # fmt: skip
                one += shown(best.items, dataset.num_items, ks)
    return _Found(_joined(ranks), np.concatenate(precisions) if precisions else None, counts)


def _joined(parts: Sequence[Ranks]) -> Ranks:
    """The ranks of several parts, one after another; there may be no part."""
    none = np.empty(0, np.int64)
    return Ranks(
        np.concatenate([none, *(part.unfiltered for part in parts)]),
        np.concatenate([none, *(part.filtered for part in parts)]),
    )
