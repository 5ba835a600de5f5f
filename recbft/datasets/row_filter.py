"""A row filter: conditions on columns, joined by ``and`` or ``&&``, that a row must satisfy all.

    COLUMN >= VALUE         also >, <, <=, = or ==, !=
    COLUMN in (VALUE, ...)  also not in

    rating >= 4 and year > 2000        event in (buy, 'add to cart')        time >= 2024-01-01 and time < 2024-02-01

A value is a number, a date of ISO 8601 or a text; one in quotes is a text. Texts are equal or not, letter by letter but
for spaces around them. A date without a time of day is the whole day, so that ``time <= 2024-01-31`` keeps that day; it
is compared with dates, and with numbers that count seconds (milliseconds, ...) since 1970. A row whose value is blank,
or a word such as NULL in a column of text, satisfies no condition on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import as_floats, is_blank, is_text, refuse_first, stands_for_nothing
from recbft.datasets.events import TICKS_PER_SECOND, are_dates, guessed_unit, read_times
from recbft.errors import UserError

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    "=": np.equal,
    ">": np.greater,
    "<": np.less,
}
# Where a value stands for all times from ``first`` up to ``end``, which is none of them.
_TIMES: dict[str, Callable[[Any, int, int], Any]] = {
    ">=": lambda ticks, first, end: ticks >= first,
    "<=": lambda ticks, first, end: ticks < end,
    "=": lambda ticks, first, end: (first <= ticks) & (ticks < end),
    ">": lambda ticks, first, end: ticks >= end,
    "<": lambda ticks, first, end: ticks < first,
}
_QUOTED = r""""[^"]*"|'[^']*'"""
_CONDITION = re.compile(
    rf"""\s*(?P<column>{_QUOTED}|`[^`]+`|[^<>=!"'`]+?)
    (?:\s*(?P<sign>>=|<=|==|!=|>|<|=)|\s+(?P<word>(?:not\s+)?in)(?=\s*\())
    \s*(?P<value>\((?:{_QUOTED}|[^()"'])*\)|{_QUOTED}|[^<>=!()"']+?)
    \s*(?P<end>$|&&?|(?<=[\s"')])and\s+)""",
    re.VERBOSE | re.IGNORECASE,
)
_PART = re.compile(rf"\s*({_QUOTED}|[^,]*?)\s*(?:,|$)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)? ?(Z|UTC|[+-]\d\d(:?\d\d)?)?)?")
_NEEDS = "but the row filter compares it with a number"


class Value(NamedTuple):
    """What a column is compared with."""

    text: str
    number: int | float | None = None  # a whole one exactly: floats round those beyond 2**53
    span: tuple[int, int] | None = None  # of a date: from its first nanosecond since 1970 up to that after its last


class Condition(NamedTuple):
    """A comparison ``sign`` (>= <= = > <) with any of the ``values``; ``negated``, with none of them."""

    column: str
    sign: str
    values: tuple[Value, ...]
    negated: bool


def conditions_of(where: str) -> list[Condition]:
    """The conditions of a row filter.

    Raises:
        UserError: it cannot be read.

    >>> [(one.column, one.sign, one.values[0].text) for one in conditions_of("a >= 4 and b in ('x', y)")]
    [('a', '>=', '4'), ('b', '=', 'x')]
    """
    found: list[Condition] = []
    place = 0
    while place < len(where) or not found:
        match = _CONDITION.match(where, place)
        values = [] if match is None else _values(match, where)
        if match is None or not values or (match["end"] and match.end() == len(where)):
            raise UserError(
                f"row filter {where!r} cannot be read at {where[place:]!r}; write conditions such as rating >= 4, "
                "event = buy, event in (buy, cart) or time >= 2024-01-01, joined by 'and', and a text of several words "
                "in quotes"
            )
        sign, word = match["sign"], (match["word"] or "").lower()
        negated = sign == "!=" or word.startswith("not")
        sign = "=" if word or sign in ("==", "!=") else sign
        found.append(Condition(_bare(match["column"], "\"'`"), sign, tuple(values), negated))
        place = match.end()
    return found


def _values(match: re.Match[str], where: str) -> list[Value]:
    """What stands behind a comparison; nothing where it cannot stand there."""
    text = match["value"]
    if (match["word"] is None) == text.startswith("("):
        return []
    parts = [part for part in (_PART.findall(text[1:-1]) if match["word"] else [text.strip()]) if part]
    if any(part[0] not in "\"'" and re.search(r"\s(or|and)(\s|$)", part) for part in parts):
        return []
    return [_value(part, where) for part in parts]


def _value(written: str, where: str) -> Value:
    if written[0] in "\"'":
        return Value(written[1:-1])
    if _NUMBER.fullmatch(written):
        return Value(written, number=(int if re.fullmatch(r"[-+]?\d+", written) else float)(written))
    if not _DATE.fullmatch(written):
        return Value(written)
    try:
        stamp = pd.Timestamp(written)
    except ValueError as error:
        raise UserError(f"row filter {where!r}: {written} is no date ({error}); correct it") from None
    first = (stamp if stamp.tzinfo is None else stamp.tz_convert(None)).as_unit("ns").value
    return Value(written, span=(first, first + (86_400 * 10**9 if len(written) == 10 else 1)))


def _bare(column: str, quotes: str) -> str:
    column = column.strip()
    return column[1:-1] if column[0] in quotes and column[-1] == column[0] else column


def satisfying(
    columns: dict[str, Any], conditions: Sequence[Condition], num_rows: int, source: str
) -> NDArray[np.bool_]:
    """Which rows satisfy all conditions.

    Args:
        columns: an arrow array of ``num_rows`` values for each column of the conditions.

    Raises:
        UserError: a column holds what cannot be compared with the values.
    """
    keep = np.ones(num_rows, dtype=bool)
    for condition in conditions:
        column = columns[condition.column]
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8()) if _are_numbers(condition) else column.cast(pa.large_string())
        blank = _blank(column)
        found = np.zeros(num_rows, dtype=bool)
        if blank.all():
            keep[:] = False
            continue
        for compare in _comparisons(column, blank, condition, source):
            found |= compare
        keep &= (found != condition.negated) & ~blank
    return keep


def _are_numbers(condition: Condition) -> bool:
    return all(value.number is not None for value in condition.values)


def _blank(column: Any) -> NDArray[np.bool_]:
    mask = stands_for_nothing(column) if is_text(column.type) else is_blank(column)
    found: NDArray[np.bool_] = mask.to_numpy(zero_copy_only=False)
    return found


def _comparisons(column: Any, blank: NDArray[np.bool_], condition: Condition, source: str) -> list[NDArray[np.bool_]]:
    """Which rows each of the values is found in."""
    name, sign, values = condition.column, condition.sign, condition.values
    if all(value.span is not None for value in values) and not _is_plain_text(column, blank):
        ticks, own = read_times(_filled(column, blank), name, source)
        size = 10**9 // TICKS_PER_SECOND[own or guessed_unit(int(ticks.max()))]
        spans = [value.span for value in values if value.span is not None]
        return [_TIMES[sign](ticks, -(-first // size), -(-end // size)) for first, end in spans]
    if is_text(column.type):
        numbers = _numbers_in(column, blank) if _are_numbers(condition) else None
        if numbers is not None:
            return [_COMPARISONS[sign](numbers, value.number) for value in values]
        if sign != "=":
            needed = _NEEDS if _are_numbers(condition) else f"but {sign} compares numbers or dates"
            mask = np.isnan(_coerced(column, blank)) & ~blank
            refuse_first(mask if mask.any() else ~blank, column, name, source, needed)
        texts = [value.text.strip() for value in values]
        trimmed = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        return [pc.is_in(trimmed, value_set=pa.array(texts, pa.large_string())).to_numpy(zero_copy_only=False)]
    held = column.fill_null(0).to_numpy(zero_copy_only=False) if pa.types.is_integer(column.type) else as_floats(column)
    wanted = [value.number if value.number is not None else _number_of(value.text) for value in values]
    if held is None or None in wanted:
        kind = "dates: compare it with one such as 2024-01-31" if held is None else "numbers: compare it with one"
        raise UserError(
            f"{source}: column {name!r} has type {column.type}, and the row filter {_shown(values)}; {kind}"
        )
    return [_COMPARISONS[sign](held, _as_held(number, column.type)) for number in wanted]


def _shown(values: Sequence[Value]) -> str:
    return "asks for " + ", ".join(repr(value.text) for value in values)[:100]


def _number_of(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else None


def _is_plain_text(column: Any, blank: NDArray[np.bool_]) -> bool:
    """Whether a column of text holds neither dates nor numbers."""
    if not is_text(column.type):
        return False
    known = pc.utf8_trim_whitespace(column.filter(pa.array(~blank)).cast(pa.large_string()))
    return not are_dates(known) and _numbers_in(column, blank) is None


def _filled(column: Any, blank: NDArray[np.bool_]) -> Any:
    """A column in which a value of its own stands in the place of a blank, so that rows keep their numbers."""
    return pc.if_else(pa.array(blank), column[int(blank.argmin())], column) if blank.any() else column


def _as_held(number: Any, kind: Any) -> Any:
    """A number of a row filter as a column holds it: 4.1 in single precision is another number than in double."""
    if isinstance(number, float) and (pa.types.is_float32(kind) or pa.types.is_float16(kind)):
        with np.errstate(over="ignore"):  # infinity then, which is larger too
            return np.dtype(kind.to_pandas_dtype()).type(number)
    return number


def _coerced(column: Any, blank: NDArray[np.bool_]) -> NDArray[Any]:
    """The numbers of a column of text, integers where it holds nothing else, NaN where there is none, 0 where blank."""
    text = pc.if_else(pa.array(blank), "0", pc.ascii_lower(pc.utf8_trim_whitespace(column.cast(pa.large_string()))))
    return np.asarray(pd.to_numeric(text.to_pandas(), errors="coerce"))


def _numbers_in(column: Any, blank: NDArray[np.bool_]) -> NDArray[Any] | None:
    """``_coerced`` where every value is a number, else None."""
    numbers = _coerced(column, blank)
    return None if np.isnan(numbers).any() else numbers
