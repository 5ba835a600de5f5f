"""Whether rows stand in the order of time: where nobody has named a column of times, their order is taken as it is.

A warning says where a column that looks like times contradicts it, where it is that of the items' ids, where times are
too coarse to order events, and where the order of equal times is likely the wrong way round.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import as_floats, is_text, stands_for_nothing
from recbft.datasets.events import USUAL_TIME, Events, are_dates, dates_in
from recbft.errors import UserError

# Names of the times of events in public data and in logs, in small letters and digits alone. A product's own dates
# (released, updated) are none, and neither are durations.
_TIME_NAME = re.compile(
    r"""(unix|utc|local|event|click|rating|review|unixreview|order|purchase|orderpurchase|invoice|transaction)?
        (timestamp|datetime|time|date)(s|ms|us|ns|utc)?
      | (created|occurred|received|sent|logged|added|clicked|viewed|visited|played|watched|listened|rated|reviewed
        |ordered|purchased|bought)at
      | ts | eventts | tstamp | tdat | epoch | created | dateadded""",
    re.VERBOSE,
)
LOOKED_AT = 2**20  # of the first rows
ENOUGH = 50  # neighbours that tell an order
NEARLY_ALL = 0.98
ALL_BUT_FEW = 0.9  # of neighbours whose times tie: these do not order them
_DATE_OF_SOME_KIND = re.compile(r"\b[0-9]{1,4}[-./ ][0-9]{1,2}[-./, ]+[0-9]{1,4}\b")


def time_columns(names: Sequence[str]) -> list[str]:
    """The columns that by their names hold the times of events, the usual one first; none that occurs twice.

    >>> time_columns(["user_id", "InvoiceDate", "release_date", "timestamp"])
    ['timestamp', 'InvoiceDate']
    """
    found = [
        name
        for name in names
        if _TIME_NAME.fullmatch(re.sub(r"[\W_]", "", name.lower())) and list(names).count(name) == 1
    ]
    return sorted(found, key=lambda name: name != USUAL_TIME)


def warn_if_out_of_order(
    source: str, users: NDArray[np.int64], columns: Mapping[str, Any], *, order: str, advice: str, stacklevel: int
) -> bool:
    """Say where the first of the columns that holds times contradicts the row order, or where none can be read.

    One whose times are nearly all equal comes after a finer one.

    Args:
        users: their numbers, one per row.
        order: the rows', in a word or two.
        advice: how to sort by a column.
        stacklevel: 1 for the function that calls this one.

    Returns:
        Whether there is such a column.
    """
    taken = f"{source}: rows are taken in {order} order"
    for name in sorted(columns, key=lambda name: _is_coarse(users, columns[name])):
        backwards = steps_back(users, columns[name])
        if backwards:
            warnings.warn(
                f"{taken}, but column {name!r} goes backwards within a user {backwards:,} times; {advice}",
                stacklevel=stacklevel + 1,
            )
        if backwards is not None:
            return True
    for name, times in columns.items():
        text = times[0].as_py() if len(times) and is_text(times.type) else None
        if text is not None and _DATE_OF_SOME_KIND.search(text):
            warnings.warn(
                f"{taken}; column {name!r} could not be checked, since not all of its dates (the first is {text!r}) "
                f"are written like 2024-01-31 12:30:00; if the rows are out of order, write them so and {advice}",
                stacklevel=stacklevel + 1,
            )
            return True
    return False


def warn_if_rows_are_unordered(
    events: Events, item: str, time: str | None, likely: Callable[[], Mapping[str, Any]], order: str, *, stacklevel: int
) -> None:
    """Say where the row order that events are taken in, or their times, are likely not the order of events.

    Args:
        item, time: names of their columns.
        likely: other columns that by their names hold times.
        order, stacklevel: as in ``warn_if_out_of_order``.
    """

    def others() -> dict[str, Any]:  # of as many rows: not where lists in cells have become some
        return {name: column for name, column in likely().items() if len(column) == len(events)}

    looked_at = events.user if time is None else events.user.slice(0, LOOKED_AT)
    users = looked_at.dictionary_encode().indices.to_numpy(zero_copy_only=False)

    if time is not None:
        tied = _tied_share(users, np.asarray(events.time)[:LOOKED_AT])
        if tied < ALL_BUT_FEW:
            return
        shares = {name: _share_of(users, column) for name, column in others().items()}
        finer = min((name for name in shares if shares[name] < tied), key=lambda name: shares[name], default=None)
        other = "name a finer column if there is one" if finer is None else f"column {finer!r} is finer: name it"
        warnings.warn(
            f"{events.source}: {tied:.0%} of a user's neighbouring events have equal times in column {time!r}, which "
            f"does not order them: they stay in {order} order; {other}",
            stacklevel=stacklevel + 1,
        )
        return
    advice = "name it as the time column to sort by it"
    if warn_if_out_of_order(events.source, users, others(), order=order, advice=advice, stacklevel=stacklevel + 1):
        return
    found = item_order(users[:LOOKED_AT], _ranks(events.item.slice(0, LOOKED_AT)))
    if found is not None:
        warnings.warn(
            f"{events.source}: rows are taken in {order} order, in which nearly all events of a user {found} by "
            f"{item!r}: that is the order of a sorted table, and likely not that of events; name a column of times, or "
            "give the rows in the order of time",
            stacklevel=stacklevel + 1,
        )


def item_order(
    users: NDArray[np.int64], items: NDArray[np.int64], among: NDArray[np.bool_] | None = None
) -> str | None:
    """Whether nearly all neighbouring events of a user "ascend" or "descend" by their items; None where too few tell.

    Args:
        users, items: numbers, (n,), in which items are sorted as their ids.
        among: which rows to compare with the row of the same user before them, (n,).

    >>> item_order(np.zeros(60, int), np.arange(60))
    'ascend'
    """
    rows = np.argsort(users, kind="stable")
    users, items = users[rows], items[rows]
    step = np.sign(items[1:] - items[:-1])[users[1:] == users[:-1] if among is None else among[rows][1:]]
    step = step[step != 0]
    if len(step) < ENOUGH:
        return None
    up = float((step > 0).mean())
    return "ascend" if up >= NEARLY_ALL else "descend" if up <= 1 - NEARLY_ALL else None


def _ranks(ids: Any) -> NDArray[np.int64]:
    """The place of each id among them all, sorted."""
    coded = ids.dictionary_encode()
    place = np.empty(len(coded.dictionary), dtype=np.int64)
    place[pc.array_sort_indices(coded.dictionary).to_numpy()] = np.arange(len(place))
    ranks: NDArray[np.int64] = place[coded.indices.to_numpy(zero_copy_only=False)]
    return ranks


def _is_coarse(users: NDArray[np.int64], times: Any) -> bool:
    return _share_of(users, times) >= ALL_BUT_FEW


def _share_of(users: NDArray[np.int64], times: Any) -> float:
    """``_tied_share`` of a column; 1 where it holds no times."""
    known = _known_ticks(users[:LOOKED_AT], times.slice(0, LOOKED_AT))
    return 1.0 if known is None else _tied_share(*known)


def _tied_share(users: NDArray[np.int64], times: NDArray[Any]) -> float:
    """Of two neighbours in time of one user, the share with equal times; 0 where too few tell."""
    rows = np.lexsort((times, users))
    users, times = users[rows], times[rows]
    same = users[1:] == users[:-1]
    return float((times[1:] == times[:-1])[same].mean()) if same.sum() >= ENOUGH else 0.0


def warn_if_newest_first(
    source: str, users: NDArray[np.int64], times: NDArray[np.int64], rows: NDArray[np.int64], *, stacklevel: int
) -> None:
    """Say that equal times stay in row order where all rows of a later time stand before those of an earlier one.

    Args:
        users, times: of the events, user by user and sorted by time.
        rows: where the events stand in the source, equal times in that order.
        stacklevel: 1 for the function that calls this one.
    """
    begins = np.flatnonzero((np.diff(users, prepend=-1) != 0) | (np.diff(times, prepend=-1) != 0))  # of equal times
    ties, of_one = len(users) - len(begins), np.diff(users[begins]) == 0
    first, last = rows[begins], rows[np.append(begins[1:], len(rows)) - 1] if len(rows) else rows
    if ties and of_one.any() and (last[1:] < first[:-1])[of_one].all():
        warnings.warn(
            f"{source}: rows stand newest first, and {ties:,} of them have the time of the row before: those stay in "
            "row order, which is likely the wrong way round; turn the rows round (in pandas: frame.iloc[::-1])",
            stacklevel=stacklevel + 1,
        )


def steps_back(users: NDArray[np.int64], times: Any) -> int | None:
    """How often a row has an earlier time than the row of the same user before it; None if the column holds no times.

    Rows without a time count as not there.
    """
    known = _known_ticks(users, times)
    if known is None:
        return None
    users, ticks = known
    order = np.argsort(users, kind="stable")
    users, ticks = users[order], ticks[order]
    return int(((ticks[1:] < ticks[:-1]) & (users[1:] == users[:-1])).sum())


def _known_ticks(users: NDArray[np.int64], times: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """The rows that have a time: their users, and the times as numbers; None if the column holds none."""
    if is_text(times.type):
        times = pc.utf8_trim_whitespace(times.cast(pa.large_string()))
        known = pc.invert(stands_for_nothing(times))
        users, times = users[known.to_numpy(zero_copy_only=False)], times.filter(known)
        if are_dates(times):
            try:
                times = dates_in(times, "", "")
            except UserError:
                return None
    if pa.types.is_timestamp(times.type) or pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    ticks = as_floats(times)
    if ticks is None or np.isnan(ticks).all():
        return None
    return users[~np.isnan(ticks)], ticks[~np.isnan(ticks)]
