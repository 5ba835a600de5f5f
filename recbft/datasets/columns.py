"""Columns of a table as arrow arrays: found by name, and named by row in whatever is wrong with them.

Rows are numbered from 1, the header not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.errors import MissingColumnError, UserError, did_you_mean

# What pandas takes for a missing value.
PANDAS_WORDS = frozenset(
    ",#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null".split(",")  # noqa: SIM905  a table
)
_WORDS = pa.array(sorted({word.lower() for word in PANDAS_WORDS} | {"nat", "\\n", "(null)", "undefined"}))
SPREADSHEET_NUMBER = r"^\s*\d(\.\d+)?E\+\d{2,}\s*$"  # 1.23457E+12, in whose place a spreadsheet shows its first digits
WHOLE_FLOAT = r"^\d+\.0$"  # as pandas writes whole numbers that once stood beside a blank


def check_columns(names: Sequence[str], wanted: Sequence[str], source: str) -> None:
    """Refuse a wanted column that is missing (with the nearest name and the whole list) or that occurs twice."""
    for column in wanted:
        if column not in names:
            hint = did_you_mean(column, names, listed_as="columns")
            mark = next((mark for mark in ";|\t," if mark in names[0]), None) if len(names) == 1 else None
            if mark is not None:
                hint = f"there is one column, {names[0]!r}: if {mark!r} stands between its fields, give it as separator"
            raise MissingColumnError(f"{source}: no column {column!r}; {hint}", column)
        if list(names).count(column) > 1:
            raise UserError(f"{source}: column {column!r} occurs {list(names).count(column)} times; rename all but one")


def as_table(frame: Any, wanted: Sequence[str] | None, name: str) -> Any:
    """A frame as a pyarrow table; a column that arrow cannot hold is refused by name.

    Args:
        wanted: of a pandas frame, the columns; None for all.
    """
    if isinstance(frame, pd.DataFrame):
        frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
        names = list(frame.columns)
        check_columns(names, names if wanted is None else wanted, name)
        chosen = dict.fromkeys(names if wanted is None else wanted)
        return pa.table({column: from_pandas(frame[column], column, name) for column in chosen})
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "__arrow_c_stream__") and hasattr(
        frame, "columns"
    ):  # a single column, which is no table, has none
        return pa.RecordBatchReader.from_stream(frame).read_all()
    raise UserError(f"a {type(frame).__name__} is not a table; give a pandas data frame or a pyarrow table")


def joined_tables(tables: Sequence[Any], wanted: Sequence[str], sources: Sequence[str]) -> Any:
    """The rows of several tables in one of the wanted columns; those of unlike types are joined as text."""
    for table, source in zip(tables, sources, strict=True):
        check_columns(table.column_names, wanted, source)
    made: dict[str, Any] = {}
    for name in dict.fromkeys(wanted):
        parts = [flat(table, name) for table in tables]
        try:
            joined = pa.concat_tables([pa.table({name: part}) for part in parts], promote_options="permissive")
            made[name] = joined.column(name)
        except pa.ArrowException:
            made[name] = pa.chunked_array([part.cast(pa.large_string()) for part in parts])
    return pa.table(made)


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


def from_pandas(column: Any, name: str, source: str) -> Any:
    """A pandas column as an arrow array that has lost nothing of it; whole numbers beyond 64 bits become text.

    In a column of objects arrow would cut off what is finer than a microsecond, and the time of day where a mere day
    stands before it; it would take numbers beside dates for ticks, and dates without a time zone beside others for UTC.
    """
    try:
        array = pa.Array.from_pandas(column)
        if column.dtype != object or not (pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)):
            return array
        if len(_kinds(column)) == 1:
            fine = pa.types.is_timestamp(array.type) and any(getattr(value, "nanosecond", 0) > 0 for value in column)
            return pa.Array.from_pandas(column, type=pa.timestamp("ns", array.type.tz)) if fine else array
    except (pa.ArrowException, OverflowError):
        if column.dtype == object and pd.api.types.infer_dtype(column) == "integer":
            return pa.array([None if pd.isna(value) else str(value) for value in column], pa.large_string())
    kinds = ", ".join(_kinds(column)) if column.dtype == object else column.dtype
    raise UserError(
        f"{source}: column {name!r} holds values of type {kinds}; make it numbers, text or dates of one type"
    )


def _kinds(column: Any) -> list[str]:
    """The types of a column's values in words; a pandas timestamp is a datetime."""
    values = column.dropna()
    zones = ("" if getattr(value, "tzinfo", None) is None else " with a time zone" for value in values)
    names = (type(value).__name__.replace("Timestamp", "datetime") for value in values)
    return sorted({f"{name}{zone}" for name, zone in zip(names, zones, strict=True)})


def is_text(kind: Any) -> bool:
    """Whether an arrow type is one of the text types."""
    return str(kind) in ("string", "large_string", "string_view")


def is_list(kind: Any) -> bool:
    """Whether an arrow type is one of the list types."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_blank(column: Any) -> Any:
    """A mask of what is null or no number; in half precision arrow 18 does not know the latter."""
    whole = column.cast(pa.float32()) if pa.types.is_float16(column.type) else column
    return pc.is_null(whole, nan_is_null=True)


def stands_for_nothing(text: Any) -> Any:
    """A mask of an arrow column of text: which values are blank, or a word for a missing one in any letters."""
    words = pc.ascii_lower(pc.utf8_trim_whitespace(text.cast(pa.large_string())))
    return pc.or_(pc.is_null(words), pc.is_in(words, value_set=_WORDS.cast(pa.large_string())))


def whole_numbers_of(text: Any) -> Any:
    """A column of text as int64 where every value is written as that number is; else as it is.

    >>> whole_numbers_of(pa.array(["7", "-1"])).to_pylist(), whole_numbers_of(pa.array(["7", "007"])).to_pylist()
    ([7, -1], ['7', '007'])
    """
    try:
        numbers = text.cast(pa.int64())
    except pa.ArrowInvalid:
        return text
    return numbers if pc.all(pc.equal(numbers.cast(text.type), text)).as_py() else text


def as_floats(column: Any) -> NDArray[np.float64] | None:
    """A column of numbers as float64, NaN where blank; None where its type has no number, as dates."""
    try:
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def refuse_first(mask: Any, column: Any, name: str, source: str, complaint: str) -> None:
    """UserError for the first row where ``mask`` is true; ``complaint`` says what the value is not."""
    row = pc.index(pa.array(mask) if isinstance(mask, np.ndarray) else mask, True).as_py()
    if row >= 0:
        value = column[row].as_py()
        shown = "nothing" if value is None else repr(value)
        raise UserError(f"{source}: row {row + 1}: column {name!r} holds {shown}, {complaint}")
