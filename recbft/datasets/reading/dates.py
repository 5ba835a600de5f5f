"""Dates written as text, by ISO 8601.

    2024-01-31    2024-01-31 12:30    2024-01-31T12:30:00.250Z    2024-01-31 12:30:00+02:00    2024-01-31 12:30:00 UTC

The first value says what a column holds: where it is a date, all are; where it has an offset from UTC, all have one.
Without an offset a date is taken as UTC.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recbft.errors import UserError

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}($|[T ])")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}(:?\d{2}(:?\d{2}(\.\d{1,9})?)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$")
_FIRST_DAY, _LAST_DAY = "1677-09-22", "2262-04-11"  # of what 64 bits of nanoseconds reach
_UTC = " ?(UTC|GMT)$"
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
    written = pc.replace_substring_regex(text, _UTC, "Z") if re.search(_UTC, first) else text
    kind = pa.timestamp("ns", tz="UTC" if _OFFSET.match(written[0].as_py()) else None)
    try:
        return _cast(written, kind)
    except pa.ArrowInvalid:
        row = _first_unreadable(written, kind)
    value = written[row].as_py()
    if _DATE.match(value) and (_OFFSET.match(value) is None) == (kind.tz is None):
        fault = "is no date of a calendar between 1677 and 2262"
    elif row:
        fault = f"is no date as the column's first, {first!r}"
    else:
        fault = "begins with a day and does not go on as a date"
    raise UserError(
        f"{source}: row {row + 1}: column {name!r} holds {text[row].as_py()!r}, which {fault}; write all dates alike, "
        "such as 2024-01-31 or 2024-01-31 12:30:00, all with an offset from UTC (Z, +02:00) or all without"
    )


def _cast(text: Any, kind: Any) -> Any:
    """Arrow's cast, which up to version 21 at least lets what nanoseconds do not reach run over without a word."""
    stamps = text.cast(kind)
    days = pc.min_max(pc.utf8_slice_codeunits(text, 0, len(_LAST_DAY))).as_py()
    if days["min"] < _FIRST_DAY or days["max"] > _LAST_DAY:
        raise pa.ArrowInvalid("beyond nanoseconds")
    return stamps


def _first_unreadable(text: Any, kind: Any) -> int:
    """The first row that arrow cannot cast, where there is one."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _cast(text[low:middle], kind)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
