"""Events: who took which item, and when, with raw ids and in the order of the source.

An id is an integer or a text and is kept exactly: the text ``007`` is not the integer 7. A time is a date or a whole
number >= 0, kept as int64: whole numbers written as floats (``1.0``, ``881250949.0``) are taken exactly, dates as ticks
of the coarsest unit that loses nothing; anything else is refused.
Rows are numbered from 1, the header not counted; every refusal names source, row, column and value.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.reading import dates
from recbft.datasets.reading.missing import SPREADSHEET_NUMBER, stands_for_nothing
from recbft.datasets.reading.missing import WORDS as MISSING_WORDS
from recbft.errors import UserError, did_you_mean

FLOAT_DIGITS = {16: 11, 32: 24, 64: 53}  # bits of a float -> binary digits that it holds
USUAL_TIME = "timestamp"  # the column that holds times in most data
TICKS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Columns of equal length, one row per event.

    ``user`` and ``item`` are arrow arrays of int64 or large_string without blanks; ``time`` is int64 >= 0, or None
    where the row order is all there is; ``time_unit`` is known only where the source column held dates; ``extra`` holds
    the columns a row filter asks for.
    """

    source: str
    user: Any
    item: Any
    time: NDArray[np.int64] | None = None
    time_unit: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.user)

    @classmethod
    def from_table(
        cls, table: Any, *, source: str, user: str, item: str, time: str | None = None, extra: Sequence[str] = ()
    ) -> Events:
        """Check the named columns of a pyarrow table and keep them.

        Raises:
            UserError: a named column is missing, is named twice, or holds a blank, an id that is neither integer nor
                text, or a time that is neither a date nor a whole number >= 0.
        """
        roles = {"user": user, "item": item} | ({} if time is None else {"time": time})
        for column in roles.values():
            both = [other for other, name in roles.items() if name == column]
            if len(both) > 1:
                raise UserError(f"{source}: column {column!r} is named as {' and '.join(both)}; give each its own")
        wanted = [*roles.values(), *extra]
        check_columns(table.column_names, wanted, source)
        times, unit = (None, None) if time is None else _times(flat(table, time), time, source)
        return cls(
            source=source,
            user=_ids(flat(table, user), user, source),
            item=_ids(flat(table, item), item, source),
            time=times,
            time_unit=unit,
            extra={name: flat(table, name) for name in extra},
        )


def largest_exact(bits: int) -> int:
    """The largest whole number that a float of this many bits holds and to which no other is rounded.

    >>> largest_exact(64) == 2**53 - 1  # 2**53 may have been 2**53 + 1
    True
    """
    return int(2 ** FLOAT_DIGITS.get(bits, 53)) - 1


def read_times(column: Any, name: str, source: str) -> tuple[NDArray[np.int64], str | None]:
    """An arrow column of times as ``Events`` keep them, and their unit where they are dates.

    Raises:
        UserError: as ``Events.from_table``, of times.
    """
    return _times(flat(pa.table({name: column}), name), name, source)


def from_pandas(column: Any) -> Any:
    """A pandas column as an arrow array that has lost nothing of it.

    In a column of objects arrow cuts off what is finer than a microsecond, and the time of day where a mere day stands
    before it, takes dates without a time zone for UTC where there are others, and numbers for ticks since 1970.

    Raises:
        pa.ArrowException, OverflowError, UnicodeEncodeError: arrow has no type for it.
    """
    try:
        array = pa.Array.from_pandas(column)
    except TypeError as error:  # of Python itself for Decimal("Infinity")
        raise pa.ArrowTypeError(str(error)) from None
    if column.dtype != object:
        return array
    are_dates = pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)
    if are_dates and any(isinstance(value, (int, float, np.number)) for value in column.dropna()):
        raise pa.ArrowTypeError("numbers beside dates")
    if pa.types.is_date(array.type) and any(isinstance(value, datetime) for value in column):
        raise pa.ArrowTypeError("days beside dates with a time of day")
    if pa.types.is_timestamp(array.type):
        if len({getattr(value, "tzinfo", None) is None for value in column.dropna()}) > 1:
            raise pa.ArrowTypeError("dates with a time zone beside dates without one")
        if any(getattr(value, "nanosecond", 0) > 0 for value in column):
            return pa.Array.from_pandas(column, type=pa.timestamp("ns", array.type.tz))
    return array


def in_unit(ticks: NDArray[np.int64], unit: str, wanted: str, *, cut: bool = False) -> NDArray[np.int64] | None:
    """Ticks of one unit as those of another; None where they do not fit in 64 bits, or are no whole number there.

    Args:
        cut: drop what is finer than the unit that is wanted.
    """
    if TICKS_PER_SECOND[wanted] < TICKS_PER_SECOND[unit]:
        ratio = TICKS_PER_SECOND[unit] // TICKS_PER_SECOND[wanted]
        return None if (ticks % ratio).any() and not cut else ticks // ratio
    ratio = TICKS_PER_SECOND[wanted] // TICKS_PER_SECOND[unit]
    return None if (ticks > np.iinfo(np.int64).max // ratio).any() else ticks * ratio


def guessed_unit(latest: int) -> str:
    """The unit in which a date of our time is such a number: in seconds it has ten digits.

    >>> guessed_unit(1_700_000_000), guessed_unit(1_700_000_000_000)
    ('s', 'ms')
    """
    return next((unit for unit, ticks in TICKS_PER_SECOND.items() if latest < 1e11 * ticks), "ns")


def check_unit(times: NDArray[np.int64], own: str, source: str, *, stacklevel: int) -> None:
    """Hold whole numbers against the unit of the dates that a model was trained on.

    Those that are dates of our time in a coarser unit lie in early 1970 in the model's, which some data do on purpose:
    a warning says so.

    Args:
        stacklevel: 1 for the function that calls this one.

    Raises:
        UserError: they are dates of our time in a finer unit alone.
    """
    latest = int(times.max(initial=0))
    unit = guessed_unit(latest)
    if TICKS_PER_SECOND[unit] > TICKS_PER_SECOND[own]:
        raise UserError(
            f"the times of {source} are whole numbers up to {latest}, which are dates in {unit}, and the model reads "
            f"them in {own}, as of its training data; give dates, or numbers in {own}"
        )
    if unit != own and latest >= 10**9 * TICKS_PER_SECOND[unit]:  # a date since 2001
        warnings.warn(
            f"the times of {source} are whole numbers up to {latest}, which look like dates in {unit}, but the model "
            f"reads them in {own}, as of its training data, where they are dates of 1970; give dates, or numbers in "
            f"{own}",
            stacklevel=stacklevel + 1,
        )


def check_columns(names: Sequence[str], wanted: Sequence[str], source: str) -> None:
    """Refuse a wanted column that is missing (with the nearest name and the whole list) or that occurs twice."""
    for column in wanted:
        if column not in names:
            if not names:
                raise UserError(f"{source}: no column {column!r}; there is no column at all")
            mark = next((mark for mark in ";|\t," if mark in names[0]), None) if len(names) == 1 else None
            if mark is not None:
                atomic = source.endswith(".inter")  # which has no other separator
                advice = "write the file with tabs there" if atomic else "give it as separator"
                raise UserError(
                    f"{source}: no column {column!r}; there is one column, {names[0]!r}: if {mark!r} stands between "
                    f"its fields, {advice}"
                )
            hint = did_you_mean(column, names, listed_as="columns")
            raise UserError(f"{source}: no column {column!r}; {hint}")
        if list(names).count(column) > 1:
            raise UserError(f"{source}: column {column!r} occurs {list(names).count(column)} times; rename all but one")


def flat(table: Any, name: str) -> Any:
    """One column as one array, dictionaries (pandas categories) decoded."""
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        kind = pa.large_string() if is_text(column.type.value_type) else column.type.value_type
        # A cast of the column itself does not know text views, which polars gives.
        decoded = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
        column = pa.chunked_array(decoded, type=kind)
    if is_text(column.type):
        column = column.cast(pa.large_string())  # 64-bit offsets: joining chunks cannot overflow
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def is_text(kind: Any) -> bool:
    """Whether an arrow type is one of the text types."""
    return str(kind) in ("string", "large_string", "string_view")


def as_floats(column: Any) -> NDArray[np.float64] | None:
    """A column of numbers as float64, NaN where blank; None where its type has no number, as dates."""
    try:
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _refuse(mask: Any, column: Any, name: str, source: str, complaint: str) -> None:
    """Raise for the first row where ``mask`` is true; ``complaint`` says what the value is not."""
    row = pc.index(mask, True).as_py()
    if row >= 0:
        value = column[row].as_py()
        shown = "nothing" if value is None else repr(value)
        raise UserError(f"{source}: row {row + 1}: column {name!r} holds {shown}, {complaint}")


def _is_blank(column: Any) -> Any:
    """A mask of what is null or no number; in half precision arrow 18 does not know the latter."""
    whole = column.cast(pa.float32()) if pa.types.is_float16(column.type) else column
    return pc.is_null(whole, nan_is_null=True)


def _ids(column: Any, name: str, source: str) -> Any:
    kind = column.type
    blank = "but an id may not be blank; fill it in or drop the row"
    _refuse(_is_blank(column), column, name, source, blank)
    if is_text(kind):
        _check_utf8(column, name, source)
        _refuse(pc.equal(pc.utf8_trim_whitespace(column), ""), column, name, source, blank)
        return column
    if pa.types.is_floating(kind):
        return pa.array(_whole_numbers_from_floats(column, name, source, "but an id must be a whole number or a text"))
    if pa.types.is_uint64(kind) and len(column) and pc.max(column).as_py() > np.iinfo(np.int64).max:
        return column.cast(pa.large_string())  # hashes of 64 bits: same canonical text, no overflow
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if len(column) == 0:
        return column.cast(pa.int64()) if pa.types.is_null(kind) else column
    advice = "make it text (in pandas: .astype(str))"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        advice = "make it text (in pandas: .str.decode('utf-8'))"
    elif pa.types.is_struct(kind):
        advice = "give what is the id in it a column of its own"
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        advice = f"give a row for each event (in pandas: frame.explode({name!r}))"
    raise UserError(f"{source}: column {name!r} has type {kind}, but ids must be whole numbers or text; {advice}")


def _check_utf8(column: Any, name: str, source: str) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for row, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                message = f"{source}: row {row + 1}: column {name!r} holds {value!r}, which is not UTF-8"
                raise UserError(f"{message}; save the text as UTF-8") from None
        raise


def _whole_numbers_from_floats(column: Any, name: str, source: str, not_whole: str) -> NDArray[np.int64]:
    """Floats without blanks as integers; refuses what is not whole and what may have been another number."""
    bits = column.type.bit_width
    numbers: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    endless = "but a number must be finite; correct it, or leave the row out"
    _refuse(pa.array(np.isinf(numbers)), column, name, source, endless)
    inexact = f"but whole numbers above 2**{FLOAT_DIGITS[bits]} are not exact as float{bits}; store integers"
    _refuse(pa.array(~(np.abs(numbers) <= largest_exact(bits))), column, name, source, inexact)
    _refuse(pa.array(numbers != np.round(numbers)), column, name, source, not_whole)
    return numbers.astype(np.int64)


BLANK_TIME = "but a time may not be blank; fill it in, drop the row, or name no time column to use the row order"
NOT_WHOLE = (
    "but a time must be a whole number or a date; where seconds have a fraction, give whole milliseconds (times 1000) "
    "or round them"
)
NO_TIME = (
    "but a time must be a whole number or a date; write numbers with digits alone, and dates as 2024-01-31 or "
    "2024-01-31 12:30:00"
)
NEGATIVE = "but a time must be >= 0"
BEFORE_1970 = "but a date must not lie before 1970; correct it, drop the row, or name no time column"
MAX_DIGITS = 19  # of an int64
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,4})?$")


def _times(column: Any, name: str, source: str) -> tuple[NDArray[np.int64], str | None]:
    kind = column.type
    _refuse(_is_blank(column), column, name, source, BLANK_TIME)
    unit = None
    if is_text(kind) and dates.are_dates(column):
        text = pc.utf8_trim_whitespace(column)
        _refuse(stands_for_nothing(text), column, name, source, BLANK_TIME)
        numbers, unit = _ticks(dates.timestamps(text, name, source))
    elif is_text(kind):
        numbers = _whole_numbers_from_text(column, name, source)
    elif pa.types.is_floating(kind):
        numbers = _whole_numbers_from_floats(column, name, source, NOT_WHOLE)
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        numbers, unit = _ticks(column)
    elif pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        try:
            numbers = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:  # as text the row at fault is found
            numbers = _whole_numbers_from_text(column.cast(pa.large_string()), name, source)
    else:
        raise UserError(f"{source}: column {name!r} has type {kind}, but times must be whole numbers or dates")
    _refuse(pa.array(numbers < 0), column, name, source, NEGATIVE if unit is None else BEFORE_1970)
    return np.array(numbers, dtype=np.int64), unit  # a copy: arrow's memory is read-only


def _whole_numbers_from_text(column: Any, name: str, source: str) -> NDArray[np.int64]:
    text = pc.ascii_trim_whitespace(column)
    plain = pc.match_substring_regex(text, r"^\d{1,18}(\.0*)?$").to_numpy(zero_copy_only=False)
    numbers = np.zeros(len(column), dtype=np.int64)
    digits = pc.replace_substring_regex(text.filter(pa.array(plain)), r"\..*$", "")
    numbers[plain] = digits.cast(pa.int64()).to_numpy(zero_copy_only=False)
    _warn_if_rounded(text.filter(pa.array(~plain)), name, source)
    for row in np.flatnonzero(~plain):  # rare spellings such as 9.78E8, or the value to refuse
        numbers[row] = _whole_number(text[int(row)].as_py(), f"{source}: row {row + 1}: column {name!r} holds ")
    return numbers


def _warn_if_rounded(text: Any, name: str, source: str) -> None:
    rounded = text.filter(pc.match_substring_regex(text, SPREADSHEET_NUMBER))
    if len(rounded):
        warnings.warn(
            f"{source}: column {name!r} holds {rounded[0].as_py()!r} and the like in {len(rounded):,} rows, which look "
            "like numbers that a spreadsheet has rounded, so that their order is lost; export the column as text",
            stacklevel=6,
        )


def _whole_number(text: str, prefix: str) -> int:
    if text.lower() in MISSING_WORDS:
        raise UserError(f"{prefix}{text!r}, {BLANK_TIME}")
    if not _NUMBER.match(text):
        raise UserError(f"{prefix}{text!r}, {NO_TIME}")
    number = Decimal(text)
    if number.adjusted() < MAX_DIGITS and number != number.to_integral_value():
        raise UserError(f"{prefix}{text!r}, {NOT_WHOLE}")
    if number < 0:
        raise UserError(f"{prefix}{text!r}, {NEGATIVE}")
    if number > np.iinfo(np.int64).max:
        raise UserError(f"{prefix}{text!r}, but a time must fit in 64 bits")
    return int(number)


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
