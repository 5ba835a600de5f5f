"""What a data set looks like: counts, lengths, density, ties in time, test targets never seen in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recbft.datasets.dataset import Dataset
from recbft.datasets.events import shown_time, unit_of_our_time
from recbft.datasets.row_order import item_order
from recbft.datasets.split import counts_lines

WORTH_SAYING = 0.01  # of neighbours
LENGTH_QUANTILES = {"min": 0.0, "25%": 0.25, "50%": 0.5, "75%": 0.75, "90%": 0.9, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """The figures of ``recbft data show``; shares are in [0, 1], tie shares None where the data has no times."""

    name: str
    num_users: int
    num_tested: int  # of the users
    num_items: int
    num_events: int
    mean_length: float
    length_quantiles: dict[str, float]
    density: float  # events / (users x items)
    first_time: str | None  # a date where it looks like one; None where the data has no times
    last_time: str | None
    tied_neighbours: float | None  # of two rows in a row of one user: share with equal times
    tied_last_two: float | None  # share of test targets that tie with the event before: they hang on the row order
    unseen_targets: float  # share of test targets without a training event
    repeated_events: float  # share of events whose user had the item before
    weights: str | None  # of the events, in words; None where they have none
    reliability: str | None  # the same
    content_hash: str
    target_hash: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(dataset: Dataset) -> DatasetStatistics:
    """Compute the statistics of a data set."""
    test = dataset.split.test
    quantiles = np.quantile(dataset.lengths, list(LENGTH_QUANTILES.values()))
    tied_neighbours, tied_last_two, first_time, last_time = None, None, None, None
    tied = tied_with_before(dataset)
    if dataset.times is not None and tied is not None:
        unit = dataset.preparation.get("time_unit") or unit_of_our_time(int(dataset.times.max()))
        first_time, last_time = (shown_time(int(one), unit) for one in (dataset.times.min(), dataset.times.max()))
        tied_neighbours = float(tied.sum() / (dataset.num_events - dataset.num_users))
        tied_last_two = float(tied[test.event].mean())
    users = np.repeat(np.arange(dataset.num_users), dataset.lengths)
    num_pairs = len(distinct(users * (dataset.num_items + 1) + dataset.items))
    return DatasetStatistics(
        name=dataset.name,
        num_users=dataset.num_users,
        num_tested=dataset.num_tested,
        num_items=dataset.num_items,
        num_events=dataset.num_events,
        mean_length=dataset.num_events / dataset.num_users,
        length_quantiles=dict(zip(LENGTH_QUANTILES, quantiles.tolist(), strict=True)),
        density=dataset.num_events / (dataset.num_users * dataset.num_items),
        first_time=first_time,
        last_time=last_time,
        tied_neighbours=tied_neighbours,
        tied_last_two=tied_last_two,
        unseen_targets=float((dataset.training_counts[test.target] == 0).mean()),
        repeated_events=1 - num_pairs / dataset.num_events,
        weights=_span(dataset.weights, "of weight 0", lambda each: each == 0),
        reliability=_span(dataset.reliability, "without", np.isnan),
        content_hash=dataset.content_hash,
        target_hash=dataset.target_hash,
    )


def _span(numbers: NDArray[np.float64] | None, what: str, counted: Callable[..., Any]) -> str | None:
    """Range and mean of numbers beside events, and how many of these are ``counted``."""
    if numbers is None:
        return None
    known = numbers[~np.isnan(numbers)]
    span = f"{known.min():g} to {known.max():g}, mean {known.mean():.4g}; " if known.size else ""
    return f"{span}{int(counted(numbers).sum()):,} events {what}"


def remarks(dataset: Dataset) -> list[str]:
    """What who trains on a data set should know of it, a line each: users left out, equal times, an empty column."""
    record, lines = dataset.preparation, []
    short = {name: number for name, number in record.get("dropped", {}).items() if name.startswith("users_under_")}
    for name, number in short.items():
        if number:
            more = "; min_history=2 trains on those of 2" if name == "users_under_3_events" else ""
            users = f"{number:,} of {record['before']['users']:,} users"
            lines.append(f"left out: {users}, who have {name.removeprefix('users_').replace('_', ' ')}{more}")
    lines += split_remarks(dataset)
    if dataset.splitting.is_plain and dataset.num_tested < dataset.num_users:
        lines.append(f"trained on and not tested: {dataset.num_users - dataset.num_tested:,} users of 2 events")
    tied = tied_with_before(dataset)
    if tied is not None and (share := tied.sum() / (dataset.num_events - dataset.num_users)) >= WORTH_SAYING:
        rank = np.empty(dataset.num_items, dtype=np.int64)
        rank[np.argsort(dataset.item_ids, kind="stable")] = np.arange(dataset.num_items)
        owner = np.repeat(np.arange(dataset.num_users), dataset.lengths)
        found = item_order(owner, rank[dataset.items - 1], among=tied)
        order = "which says nothing of time" if found is None else f"in which item ids {found}"
        last = f"{describe(dataset).tied_last_two:.1%} of the test items"
        who = f"{share:.1%} of a user's neighbouring events, {last}"
        lines.append(f"equal times: {who}; these stay in the order of the rows, {order}")
    if dataset.reliability is not None and np.isnan(dataset.reliability).all():
        lines.append("reliability: no event has one; check the column, or leave it out")
    return lines


def split_remarks(dataset: Dataset) -> list[str]:
    """What the parts of a split other than plain leave-one-out hold, how much of it is new, and what is left out."""
    split = dataset.split
    if split.counts is None:
        return []
    lines, test = [f"split: {split.text}", *counts_lines(split.counts)], split.counts["test"]
    if dataset.splitting.split_targets != "successive" and test["targets_left_out"] > test["targets"]:
        lines.append("most test targets are left out; split_targets=successive ranks all but a user's first event")
    return lines


def tied_with_before(dataset: Dataset) -> NDArray[np.bool_] | None:
    """Which events have the time of the same user's event before, (E,); None where the data has no times."""
    if dataset.times is None:
        return None
    tied = np.append(False, dataset.times[1:] == dataset.times[:-1])
    tied[dataset.offsets[:-1]] = False
    return tied


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values, (n,), in order, each once, found by sorting.

    ``np.unique`` of numpy 2.3 and later fills a hash table instead, which takes 5 to 15 times as long where whole
    numbers are many: 11 s instead of 1.7 for 20 million pairs of a user and an item.

    >>> distinct(np.array([3, 1, 3, 2, 1])).tolist()
    [1, 2, 3]
    """
    ordered = np.sort(values)
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return np.asarray(ordered[first])
