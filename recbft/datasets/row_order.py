"""Whether rows stand in the order of time: where nobody has named a column of times, their order is taken as it is.

A warning says where a column that looks like times contradicts it, and where the order of equal times is likely the
wrong way round.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
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
) -> None:
    """Say where the first of the columns that holds times contradicts the row order, or where none can be read.

    Args:
        users: their numbers, one per row.
        order: the rows', in a word or two.
        advice: how to sort by a column.
        stacklevel: 1 for the function that calls this one.
    """
    taken = f"{source}: rows are taken in {order} order"
    for name, times in columns.items():
        backwards = steps_back(users, times)
        if backwards:
            warnings.warn(
                f"{taken}, but column {name!r} goes backwards within a user {backwards:,} times; {advice}",
                stacklevel=stacklevel + 1,
            )
        if backwards is not None:
            return
    for name, times in columns.items():
        text = times[0].as_py() if len(times) and is_text(times.type) else None
        if text is not None and _DATE_OF_SOME_KIND.search(text):
            warnings.warn(
                f"{taken}; column {name!r} could not be checked, since not all of its dates (the first is {text!r}) "
                f"are written like 2024-01-31 12:30:00; if the rows are out of order, write them so and {advice}",
                stacklevel=stacklevel + 1,
            )
            return


def warn_if_rows_go_back(events: Events, columns: Mapping[str, Any], order: str, *, stacklevel: int) -> None:
    """``warn_if_out_of_order`` of events that are taken in row order."""
    if columns:
        users = events.user.dictionary_encode().indices.to_numpy()
        advice = "name it as the time column to sort by it"
        warn_if_out_of_order(events.source, users, columns, order=order, advice=advice, stacklevel=stacklevel + 1)


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
    users, ticks = users[~np.isnan(ticks)], ticks[~np.isnan(ticks)]
    order = np.argsort(users, kind="stable")
    users, ticks = users[order], ticks[order]
    return int(((ticks[1:] < ticks[:-1]) & (users[1:] == users[:-1])).sum())
