"""Dates written as text, by ISO 8601.

    2024-01-31      2024-01-31 12:30      2024-01-31T12:30:00.250Z      2024-01-31 12:30:00+02:00

The first value says what a column holds: where it is a date, all are; where it has an offset from UTC, all have one.
Without an offset a date is taken as UTC.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from recbft.errors import UserError

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}($|[T ])")
_OFFSET = re.compile(r".{10}.*(Z|[+-][0-9]{2}(:?[0-9]{2})?)$")


def are_dates(column: Any) -> bool:
    """Whether a column of text begins with a date."""
    first = column[0].as_py() if len(column) else None
    return first is not None and _DAY.match(first.strip()) is not None


def timestamps(text: Any, name: str, source: str) -> Any:
    """The dates of a column that begins with one, spaces around them left out, as arrow's timestamps in nanoseconds.

    Raises:
        UserError: a value is no date, or has an offset from UTC where the first has none, or the other way round.
    """
    first = text[0].as_py()
    kind = pa.timestamp("ns", tz="UTC" if _OFFSET.match(first) else None)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        row = _first_unreadable(text, kind)
    alike = f"as the column's first, {first!r}" if row else "of a calendar between 1677 and 2262"
    raise UserError(
        f"{source}: row {row + 1}: column {name!r} holds {text[row].as_py()!r}, which is no date {alike}; write all "
        "dates alike, such as 2024-01-31 or 2024-01-31 12:30:00, all with an offset from UTC (Z, +02:00) or all without"
    )


def _first_unreadable(text: Any, kind: Any) -> int:
    """The first row that arrow cannot cast, where there is one."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            text[low:middle].cast(kind)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
