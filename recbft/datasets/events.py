"""Events: who took which item, and when, with raw ids and in the order of the source.

An id is an integer or a text and is kept exactly: the text ``007`` is not the integer 7. In a text file a column whose
ids are all written as whole numbers holds integers. A time is a date or a number
>= 0, kept as int64: whole numbers exactly, also written as floats (``881250949.0``), fractions of seconds and dates as
ticks of the coarsest unit that loses nothing (at most nanoseconds); anything else is refused. Where numbers are dates
of our time in more than one unit, each is taken in its own, with a warning.

Dates in text are those of ISO 8601. The first value says what a column holds: where it is a date, all are; where it has
an offset from UTC, all have one. Without an offset a date is taken as UTC.

    2024-01-31    2024-01-31 12:30    2024-01-31T12:30:00.250Z    2024-01-31 12:30:00+02:00    2024-01-31 12:30:00 UTC
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import (
    SPREADSHEET_NUMBER,
    check_columns,
    flat,
    is_blank,
    is_list,
    is_text,
    refuse_first,
    stands_for_nothing,
)
from recbft.datasets.event_numbers import read_reliabilities, read_weights
from recbft.datasets.parts import read_parts
from recbft.errors import UserError

FLOAT_DIGITS = {16: 11, 32: 24, 64: 53}  # bits of a float -> binary digits that it holds
USUAL_TIME = "timestamp"  # the column that holds times in most data
TICKS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
LARGEST = np.iinfo(np.int64).max

BLANK_ID = "but an id may not be blank; fill it in or drop the row"
BLANK_TIME = "but a time may not be blank; fill it in, drop the row, or name no time column to use the row order"
NO_TIME = "but a time must be a number from 0 to 2**63 or a date since 1970, such as 2024-01-31 or 2024-01-31 12:30:00"
ALIKE = (
    "write all dates alike, such as 2024-01-31 or 2024-01-31 12:30:00, up to the year 2262, all with an offset from "
    "UTC (Z, +02:00) or all without"
)
UNITS = tuple(TICKS_PER_SECOND)  # each a thousand times finer than the one before
OUR_TIME = (631_152_000, 4_102_444_800)  # the years 1990 to 2099, in seconds since 1970
LIST = r"^\s*\[.*\]\s*$"  # written in a cell
MOST_DIGITS = 18  # after the point of a number in a rare spelling
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,4})?$")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}($|[T ])")
_FIRST_DAY, _LAST_DAY = "1677-09-22", "2262-04-11"  # of what 64 bits of nanoseconds reach
_UTC = " ?(UTC|GMT)$"
_OFFSET = re.compile(r".{10}.*(Z|[+-][0-9]{2}(:?[0-9]{2})?)$")


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Columns of equal length, one row per event.

    ``user`` and ``item`` are arrow arrays of int64 or large_string without blanks; ``time`` is int64 >= 0, or None
    where the row order is all there is; ``time_unit`` is known only where the source column held dates; ``weight``,
    ``reliability`` and ``part`` are None where the source says nothing of them; ``extra`` holds the columns a row
    filter asks for.
    """

    source: str
    user: Any
    item: Any
    time: NDArray[np.int64] | None = None
    time_unit: str | None = None
    weight: NDArray[np.float64] | None = None
    reliability: NDArray[np.float64] | None = None  # NaN where it is missing
    part: NDArray[np.int8] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.user)

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        source: str,
        user: str,
        item: str,
        time: str | None = None,
        session: str | None = None,
        weight: str | None = None,
        reliability: str | None = None,
        split_column: str | None = None,
        extra: Sequence[str] = (),
    ) -> Events:
        """Check the named columns of a pyarrow table and keep them.

        With ``session`` each session of a user is a user of its own, USER/SESSION. Where the cells of ``item`` are
        lists, each is a history: a row stands for as many events.

        Raises:
            UserError: a named column is missing, is named twice, or holds a blank, an id that is neither integer nor
                text, a time that is neither a date nor a whole number >= 0, a weight that is no number >= 0, or a
                reliability that is no number. A reliability may have the column of another role but an id's.
        """
        roles = [user, item, *(name for name in (time, session, weight, split_column) if name is not None)]
        if len(set(roles)) < len(roles) or reliability in (user, item):
            raise UserError(
                f"{source}: user, item, time and session must be columns of their own, not {', '.join(roles)} "
                "(so must weight and split_column)"
            )
        wanted = [*roles, *(() if reliability is None else (reliability,)), *extra]
        check_columns(table.column_names, wanted, source)
        table = _one_event_per_row(table, wanted, user, item, source)
        times, unit = (None, None) if time is None else read_times(flat(table, time), time, source)
        users = read_ids(flat(table, user), user, source)
        if session is not None:
            parts = [one.cast(pa.large_string()) for one in (users, read_ids(flat(table, session), session, source))]
            users = pc.binary_join_element_wise(*parts, pa.scalar("/", pa.large_string()))
            holds = [pc.any(pc.match_substring(one, "/")).as_py() for one in parts]
            pairs = pa.table({"user": parts[0], "session": parts[1]}) if all(holds) else None
            if pairs is not None and len(pairs.group_by(["user", "session"]).aggregate([])) > len(users.unique()):
                raise UserError(
                    f"{source}: two sessions of different users have the same name USER/SESSION, since ids hold '/'; "
                    f"write {user!r} or {session!r} without it"
                )
        return cls(
            source=source,
            user=users,
            item=read_ids(flat(table, item), item, source),
            time=times,
            time_unit=unit,
            weight=None if weight is None else read_weights(flat(table, weight), weight, source),
            reliability=(
                None if reliability is None else read_reliabilities(flat(table, reliability), reliability, source)
            ),
            part=None if split_column is None else read_parts(flat(table, split_column), split_column, source),
            extra={name: flat(table, name) for name in extra},
        )


def largest_exact(bits: int) -> int:
    """The largest whole number that a float of this many bits holds and to which no other is rounded.

    >>> largest_exact(64) == 2**53 - 1  # 2**53 may have been 2**53 + 1
    True
    """
    return int(2 ** FLOAT_DIGITS.get(bits, 53)) - 1


def _one_event_per_row(table: Any, wanted: Sequence[str], user: str, item: str, source: str) -> Any:
    """A table whose lists of items, and of whatever stands beside them, have become rows."""
    items = table.column(item)
    if not is_list(items.type) or is_list(table.schema.field(user).type):
        return table
    items = items.combine_chunks()
    lengths, rows = pc.fill_null(pc.list_value_length(items), 0), pc.list_parent_indices(items)
    made = {}
    for name in dict.fromkeys(wanted):
        column = table.column(name).combine_chunks()
        if not is_list(column.type):
            made[name] = column.take(rows)
            continue
        others = pc.fill_null(pc.list_value_length(column), 0)
        row = pc.index(pc.not_equal(others, lengths), True).as_py()
        if row >= 0:
            raise UserError(
                f"{source}: row {row + 1}: column {item!r} holds a list of {lengths[row]} and {name!r} one of "
                f"{others[row]}; write lists of equal length"
            )
        made[name] = pc.list_flatten(column)
    return pa.table(made)


def read_ids(column: Any, name: str, source: str) -> Any:
    """An arrow column of ids as ``Events`` keep them."""
    kind = column.type
    refuse_first(is_blank(column), column, name, source, BLANK_ID)
    if is_text(kind):
        refuse_first(pc.equal(pc.utf8_trim_whitespace(column), ""), column, name, source, BLANK_ID)
        if len(column) and pc.all(pc.match_substring_regex(column.slice(0, 1000), LIST)).as_py():
            raise UserError(
                f"{source}: column {name!r} holds lists as text, such as {column[0].as_py()[:60]!r}; write one event "
                "per row, or lists as such (Parquet, JSON lines, a frame)"
            )
        return column
    if pa.types.is_floating(kind):
        return pa.array(_whole_numbers(column, name, source, "but an id must be a whole number or a text"))
    if pa.types.is_uint64(kind) and len(column) and pc.max(column).as_py() > LARGEST:
        return column.cast(pa.large_string())  # hashes of 64 bits: same canonical text, no overflow
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return column.cast(pa.int64())
    if len(column) == 0:
        return column
    raise UserError(
        f"{source}: column {name!r} has type {str(kind)[:60]}, but ids must be whole numbers or text, one per row; "
        "make it text (in pandas: .astype(str))"
    )


def _whole_numbers(column: Any, name: str, source: str, not_whole: str) -> NDArray[np.int64]:
    """Floats without blanks as integers; refuses what is not whole and what may have been another number."""
    bits = column.type.bit_width
    numbers: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    inexact = f"but whole numbers above 2**{FLOAT_DIGITS[bits]} are not exact as float{bits}; store integers"
    refuse_first(~(np.abs(numbers) <= largest_exact(bits)), column, name, source, inexact)
    refuse_first(numbers != np.round(numbers), column, name, source, not_whole)
    return numbers.astype(np.int64)


def read_times(column: Any, name: str, source: str) -> tuple[NDArray[np.int64], str | None]:
    """An arrow column of times as ``Events`` keep them, and their unit where they are dates or have a fraction."""
    kind, unit = column.type, None
    refuse_first(is_blank(column), column, name, source, BLANK_TIME)
    if is_text(kind):
        text = pc.utf8_trim_whitespace(column)
        if are_dates(text):
            refuse_first(stands_for_nothing(text), column, name, source, BLANK_TIME)
            numbers, unit = _ticks(dates_in(text, name, source))
        else:
            numbers, unit = _numbers_in(text, name, source)
    elif pa.types.is_floating(kind):
        numbers, unit = _numbers_of(column, name, source)
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        numbers, unit = _ticks(column)
    elif pa.types.is_decimal(kind):
        numbers, unit = _numbers_in(column.cast(pa.large_string()), name, source)
    elif pa.types.is_integer(kind) or pa.types.is_null(kind):
        try:
            numbers = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:  # as text the row at fault is found
            numbers, unit = _numbers_in(column.cast(pa.large_string()), name, source)
    else:
        raise UserError(f"{source}: column {name!r} has type {kind}, but times must be numbers or dates")
    refuse_first(numbers < 0, column, name, source, NO_TIME)
    if unit is None:
        numbers = _in_one_unit(numbers, name, source)
    return np.array(numbers, dtype=np.int64), unit  # a copy: arrow's memory is read-only


def _numbers_of(column: Any, name: str, source: str) -> tuple[NDArray[np.int64], str | None]:
    """Floats without blanks as ticks, and their unit where one has a fraction."""
    held: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    exact = np.abs(held.astype(np.float64)) <= largest_exact(column.type.bit_width)
    if not exact.all() or (held == np.round(held)).all():
        return _whole_numbers(column, name, source, NO_TIME), None
    numbers = held.astype(np.float64)
    refuse_first(numbers < 0, column, name, source, NO_TIME)
    coarse, finest = _room(int(numbers.max()))
    for finer in range(1, finest + 1):  # the first that gives the same floats back
        ticks = np.round(numbers * 1000**finer)
        if ((ticks / 1000**finer).astype(held.dtype) == held).all():
            break
    return ticks.astype(np.int64), UNITS[coarse + finer]


def _room(latest: int) -> tuple[int, int]:
    """The place in ``UNITS`` of the unit that numbers up to ``latest`` seem to have, and how many finer there are."""
    place = UNITS.index(guessed_unit(latest))
    return place, len(UNITS) - 1 - place


def _numbers_in(text: Any, name: str, source: str) -> tuple[NDArray[np.int64], str | None]:
    """Numbers in text as ticks, and their unit where one has a fraction; what is finer than nanoseconds is cut off."""
    plain = pc.match_substring_regex(text, r"^\d{1,18}(\.\d*)?$").to_numpy(zero_copy_only=False)
    usual = text.filter(pa.array(plain))
    whole = pc.replace_substring_regex(usual, r"\..*$", "").cast(pa.int64()).to_numpy(zero_copy_only=False)
    fraction = (
        pc.replace_substring_regex(usual, r"^\d+\.?|0+$", "")
        if pc.any(pc.match_substring(usual, ".")).as_py()
        else None
    )
    others = {} if plain.all() else _rare_numbers(text, np.flatnonzero(~plain), name, source)
    digits = 0 if fraction is None else pc.max(pc.utf8_length(fraction)).as_py()
    digits = max([digits, *map(_digits, others.values())])
    numbers, unit, finer = np.zeros(len(text), dtype=np.int64), None, 0
    numbers[plain] = whole
    if digits:
        coarse, finest = _room(max([int(whole.max(initial=0)), *map(int, others.values())]))
        finer = min(-(-digits // 3), finest)
        unit = UNITS[coarse + finer]
        refuse_first(numbers >= LARGEST // 1000**finer, text, name, source, NO_TIME)
        numbers *= 1000**finer
    if finer and fraction is not None:
        cut = pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 3 * finer, "0"), 0, 3 * finer)
        numbers[plain] += cut.cast(pa.int64()).to_numpy(zero_copy_only=False)
    for row, number in others.items():
        numbers[row] = int(number * 1000**finer)
    return numbers, unit


def _rare_numbers(text: Any, rows: NDArray[np.int64], name: str, source: str) -> dict[int, Decimal]:
    """Numbers of rare spellings, such as 9.78E8, by row; refuses what is no time."""
    refuse_first(stands_for_nothing(text), text, name, source, BLANK_TIME)
    rounded = text.filter(pc.match_substring_regex(text, SPREADSHEET_NUMBER))
    if len(rounded):
        warnings.warn(
            f"{source}: column {name!r} holds {rounded[0].as_py()!r} and the like in {len(rounded):,} rows: a "
            "spreadsheet has rounded these numbers, so their order is lost; export the column as text",
            stacklevel=6,
        )
    found = {}
    for row in rows.tolist():
        written = text[row].as_py()
        number = Decimal(written) if _NUMBER.match(written) else Decimal(-1)
        if not 0 <= number <= LARGEST or _digits(number) > MOST_DIGITS:
            raise UserError(f"{source}: row {row + 1}: column {name!r} holds {written!r}, {NO_TIME}")
        found[row] = number
    return found


def _digits(number: Decimal) -> int:
    """After the point; negative where as many zeros stand before it."""
    return -int(number.normalize().as_tuple().exponent)


def _in_one_unit(numbers: NDArray[np.int64], name: str, source: str) -> NDArray[np.int64]:
    """Numbers that are dates of our time in several units, in the finest of these; others as they are.

    Warns of several units, and of zeros among dates, which order events as the first of all.
    """
    of_unit = [are_of_our_time(numbers, unit) for unit in UNITS] if _may_be_dates(numbers) else []
    units = [unit for unit, mask in zip(UNITS, of_unit, strict=False) if mask.any()]
    zeros = numbers == 0
    if not units or sum(int(mask.sum()) for mask in of_unit) + int(zeros.sum()) < len(numbers):
        return numbers
    if zeros.any():
        warnings.warn(
            f"{source}: column {name!r} holds 0 in {int(zeros.sum()):,} rows, first in row {int(zeros.argmax()) + 1}, "
            f"beside dates in {units[0]}: these events come first, as of 1970; if their times are missing, leave the "
            "rows out",
            stacklevel=5,
        )
    if len(units) == 1:
        return numbers
    made: NDArray[np.int64] = numbers.copy()
    finest = units[-1]
    for unit, mask in zip(UNITS, of_unit, strict=True):
        if unit in units:
            made[mask] *= TICKS_PER_SECOND[finest] // TICKS_PER_SECOND[unit]
    counts = {unit: int(mask.sum()) for unit, mask in zip(UNITS, of_unit, strict=True) if unit in units}
    rarer = min(units, key=lambda unit: counts[unit])
    row = int(of_unit[UNITS.index(rarer)].argmax())
    told = ", ".join(f"{number:,} in {unit}" for unit, number in counts.items())
    warnings.warn(
        f"{source}: column {name!r} holds times in several units ({told}; row {row + 1} holds {numbers[row]}, in "
        f"{rarer}): each is taken in its own unit, all are kept in {finest}; write them alike",
        stacklevel=5,
    )
    return made


def _may_be_dates(numbers: NDArray[np.int64]) -> bool:
    """Whether numbers have anything to be told of their unit: a zero, or sizes that lie a unit apart."""
    if not len(numbers):
        return False
    least, latest = int(numbers.min()), int(numbers.max())
    return latest >= OUR_TIME[0] and (least == 0 or guessed_unit(least) != guessed_unit(latest))


def are_of_our_time(numbers: NDArray[np.int64], unit: str) -> NDArray[np.bool_]:
    """Which numbers, as ticks of a unit since 1970, are dates of the years 1990 to 2099."""
    first, last = (seconds * TICKS_PER_SECOND[unit] for seconds in OUR_TIME)
    inside: NDArray[np.bool_] = (first <= numbers) & (numbers <= last)
    return inside


def unit_of_our_time(ticks: int) -> str | None:
    """The unit in which a number is a date of our time, if there is one."""
    return next((unit for unit in UNITS if are_of_our_time(np.array(ticks), unit)), None)


def unit_of_all(ticks: NDArray[np.int64]) -> str | None:
    """The unit in which all numbers are dates of our time, if there is one."""
    if not len(ticks):
        return None
    unit = unit_of_our_time(int(ticks.min()))
    return unit if unit == unit_of_our_time(int(ticks.max())) else None


def shown_time(ticks: int, unit: str | None) -> str:
    """A time as a message shows it: as a date where its unit is known, or its size is that of a date of our time.

    >>> shown_time(1_706_704_200, None), shown_time(1_706_704_200_250, "ms"), shown_time(17, None)
    ('2024-01-31 12:30:00', '2024-01-31 12:30:00.250', '17')
    """
    unit = unit or unit_of_our_time(ticks)
    return str(ticks) if unit is None else str(np.array(ticks).astype(f"datetime64[{unit}]")).replace("T", " ")


def are_dates(text: Any) -> bool:
    """Whether a column of text, spaces around it left out, begins with a date."""
    first = text[0].as_py() if len(text) else None
    return first is not None and DATE.match(first) is not None


def dates_in(text: Any, name: str, source: str) -> Any:
    """The dates of a column that begins with one, spaces around them left out, as arrow's timestamps in nanoseconds."""
    first = text[0].as_py()
    written = pc.replace_substring_regex(text, _UTC, "Z") if re.search(_UTC, first) else text
    kind = pa.timestamp("ns", tz="UTC" if _OFFSET.match(written[0].as_py()) else None)
    try:
        stamps = written.cast(kind)
    except pa.ArrowInvalid:
        unread = np.arange(len(text)) == _first_that_fails(written, kind)
        refuse_first(unread, text, name, source, f"but {ALIKE}")
        raise
    # Arrow up to version 21 at least overflows silently where nanoseconds do not reach.
    days = pc.utf8_slice_codeunits(text, 0, len(_LAST_DAY))
    beyond = pc.or_(pc.less(days, _FIRST_DAY), pc.greater(days, _LAST_DAY))
    refuse_first(beyond, text, name, source, f"but {ALIKE}")
    return stamps


def _first_that_fails(text: Any, kind: Any) -> int:
    """The row of the first text that cannot be cast, by halving."""
    first, end = 0, len(text)
    while end - first > 1:
        middle = (first + end) // 2
        try:
            text.slice(first, middle - first).cast(kind)
            first = middle
        except pa.ArrowInvalid:
            end = middle
    return first


def _ticks(column: Any) -> tuple[NDArray[np.int64], str]:
    """Dates as whole ticks since 1970 of the coarsest unit that loses nothing."""
    stamps = column.cast(pa.timestamp("ms")) if pa.types.is_date(column.type) else column
    unit = stamps.type.unit
    ticks = stamps.cast(pa.int64()).to_numpy(zero_copy_only=False)
    for coarser in ("s", "ms", "us"):
        ratio = TICKS_PER_SECOND[unit] // TICKS_PER_SECOND[coarser]
        if ratio >= 1 and not (ticks % ratio).any():
            return ticks // ratio, coarser
    return ticks, unit


def in_unit(ticks: NDArray[np.int64], unit: str, wanted: str, *, cut: bool = False) -> NDArray[np.int64] | None:
    """Ticks of one unit as those of another; None where they do not fit in 64 bits, or are no whole number there.

    Args:
        cut: drop what is finer than the unit that is wanted.
    """
    if TICKS_PER_SECOND[wanted] < TICKS_PER_SECOND[unit]:
        ratio = TICKS_PER_SECOND[unit] // TICKS_PER_SECOND[wanted]
        return None if (ticks % ratio).any() and not cut else ticks // ratio
    ratio = TICKS_PER_SECOND[wanted] // TICKS_PER_SECOND[unit]
    return None if (ticks > LARGEST // ratio).any() else ticks * ratio


def guessed_unit(latest: int) -> str:
    """The unit in which a date of our time is such a number: in seconds it has ten digits.

    >>> guessed_unit(1_700_000_000), guessed_unit(1_700_000_000_000)
    ('s', 'ms')
    """
    return next((unit for unit, ticks in TICKS_PER_SECOND.items() if latest < 1e11 * ticks), "ns")


def check_unit(times: NDArray[np.int64], own: str, source: str, *, stacklevel: int) -> None:
    """Hold whole numbers against the unit of the dates that a model was trained on.

    Dates of our time in a finer unit are refused. Those in a coarser one lie in early 1970 in the model's, which some
    data do on purpose: a warning says so.

    Args:
        stacklevel: 1 for the function that calls this one.
    """
    latest = int(times.max(initial=0))
    unit = guessed_unit(latest)
    told = f"the times of {source} are whole numbers up to {latest}, which look like dates in {unit}, but the model"
    advice = f"reads them in {own}, as of its training data; give dates, or numbers in {own}"
    if TICKS_PER_SECOND[unit] > TICKS_PER_SECOND[own]:
        raise UserError(f"{told} {advice}")
    if unit != own and latest >= 10**9 * TICKS_PER_SECOND[unit]:  # a date since 2001
        warnings.warn(f"{told} takes them for dates of 1970: it {advice}", stacklevel=stacklevel + 1)
