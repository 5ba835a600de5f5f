"""Delimited text: CSV, TSV, RecBole's atomic files, and any other separator.

Arrow reads it, in blocks; what it cannot read is read again to name the line or row at fault.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from recbft.datasets.events import check_columns
from recbft.datasets.reading.opening import BYTE_ORDER_MARK, EMPTY, is_gzip, open_bytes
from recbft.errors import UserError

ATOMIC_TYPES = ("token", "token_seq", "float", "float_seq")
UNIT_SEPARATOR = "\x1f"  # stands for a separator that is not one ASCII character while arrow reads
NO_ROWS = "the file has a header but no rows"
LONGEST_ROW = 2**28  # bytes; arrow's own blocks hold rows of 1 MiB


def read_delimited(
    path: Path, wanted: Sequence[str], kind: str, separator: str | None, columns: Sequence[str] | None
) -> Any:
    """The wanted columns as text; ``kind`` is inter, csv or tsv, the rest as in ``readers.read_table``."""
    separator = separator_of(kind, separator, path)
    quoted = _is_quoted(kind, separator)
    raw_names = list(columns) if columns is not None else header(path, separator, kind)
    names = [_untyped(name, path) for name in raw_names] if kind == "inter" else raw_names
    if columns is None:
        _refuse_row_as_header(names, wanted, path)
    check_columns(names, wanted, str(path))
    chosen = {f"c{names.index(name)}": name for name in wanted}
    unique = [f"c{index}" for index in range(len(names))]
    source = _arrow_source(path, separator)
    delimiter = separator if _arrow_takes(separator) else UNIT_SEPARATOR
    first_row = 1 if columns is None else 0

    def parse(handler: Any = None, block_size: int | None = None) -> Any:
        return pa_csv.read_csv(
            source(),
            # On one thread, which is as fast and counts rows: before arrow 23, after a row that is longer than a
            # block, a read on several could leave the next one waiting for ever.
            pa_csv.ReadOptions(column_names=unique, skip_rows=first_row, use_threads=False, block_size=block_size),
            pa_csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if quoted else False,
                newlines_in_values=quoted,
                invalid_row_handler=handler,
            ),
            pa_csv.ConvertOptions(
                include_columns=list(chosen),
                column_types=dict.fromkeys(chosen, pa.large_string()),
                strings_can_be_null=False,
            ),
        )

    try:
        table = parse()
    except pa.ArrowInvalid:
        if quoted:
            _refuse_open_quotes(path, separator)
        table = _parse_or_say_why(parse, path, len(names), first_row)
    else:
        if quoted and _may_have_open_quotes(path, first_row + table.num_rows):
            _refuse_open_quotes(path, separator)
    if table.num_rows == 0:
        raise UserError(f"{path}: {NO_ROWS}")
    return table.rename_columns([chosen[name] for name in table.column_names])


def _parse_or_say_why(parse: Any, path: Path, num_columns: int, first_row: int) -> Any:
    """The table of a file with long rows; for any other, what is wrong with it."""
    try:
        return parse(block_size=LONGEST_ROW)
    except pa.ArrowInvalid as error:
        if "Could not skip" in str(error):
            raise UserError(f"{path}: {NO_ROWS}") from None
        if "block size" in str(error):
            raise UserError(
                f"{path}: a row is longer than {LONGEST_ROW >> 20} MiB; leave its long values out"
            ) from None
        if "columns, got" not in str(error):
            raise
    with open_bytes(path) as file, io.TextIOWrapper(file, "utf-8") as text:  # arrow prints what the handler cannot read
        for _ in text:
            pass
    bad: list[tuple[int | None, int]] = []

    def remember(row: Any) -> str:
        bad.append((row.number, row.actual_columns))
        return "skip"

    parse(remember, LONGEST_ROW)
    number, actual = bad[0]
    place = "" if number is None else f"row {number - first_row}: "
    advice = "that row, the separator and the column names"
    raise UserError(f"{path}: {place}{actual} fields where {num_columns} are expected; check {advice}")


def _may_have_open_quotes(path: Path, num_rows: int) -> bool:
    """Whether a stray quote may have swallowed all rows up to the next one, for values may hold line ends.

    Args:
        num_rows: that arrow found, the header included. Where there are as many lines and every quote has its second,
            no value spans several.
    """
    with open_bytes(path) as file:
        quotes = sum(part.count(b'"') for part in iter(lambda: file.read(2**20), b""))
        if not quotes:
            return False
        file.seek(0)
        text = io.TextIOWrapper(file, "latin-1")  # lines end in CR, LF or both, as arrow takes them
        num_lines = sum(1 for line in text if line.strip())
        text.detach()
    return num_lines > num_rows or quotes % 2 == 1


def _refuse_open_quotes(path: Path, separator: str) -> None:
    with open_bytes(path) as file:
        limit, begins = csv.field_size_limit(2**31 - 1), 0
        text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
        lines = csv.reader(text, delimiter=separator, strict=True)
        try:
            for _ in lines:
                begins = lines.line_num
        except csv.Error:
            raise UserError(
                f"{path}: line {begins + 1}: a quote is opened and not closed before the next separator or line; "
                "write a quote within a value twice, and the value in quotes"
            ) from None
        finally:
            csv.field_size_limit(limit)


def _arrow_takes(separator: str) -> bool:
    return len(separator) == 1 and separator.isascii()


def _arrow_source(path: Path, separator: str) -> Callable[[], Any]:
    """Opens what arrow reads: the file, or its bytes with one character in place of a separator arrow does not take."""
    if _arrow_takes(separator):
        return lambda: pa.input_stream(str(path), compression="gzip" if is_gzip(path) else None)
    with open_bytes(path) as file:
        content = file.read()
    if UNIT_SEPARATOR.encode() in content:
        raise UserError(f"{path}: holds the character 0x1f, so separator {separator!r} cannot be used; replace either")
    content = content.removeprefix(BYTE_ORDER_MARK).replace(separator.encode(), UNIT_SEPARATOR.encode())
    return lambda: pa.BufferReader(content)


def separator_of(kind: str, given: str | None, path: Path) -> str:
    """What stands between the fields: what is given, or what is usual in files of this kind."""
    separator = {"csv": ",", "tsv": "\t", "inter": "\t"}[kind] if given is None else given.replace("\\t", "\t")
    if separator in ("", "\n", "\r", "\0"):
        said = repr(separator) if separator else "empty"
        raise UserError(f"{path}: the separator is {said}; give the text between two fields, such as ',' or '::'")
    return separator


def _is_quoted(kind: str, separator: str) -> bool:
    """Whether quotes may stand around a field; RecBole's format knows none: an id may hold one."""
    return kind != "inter" and _arrow_takes(separator)


def header(path: Path, separator: str, kind: str) -> list[str]:
    """The column names in the first line; UserError where it is blank or there is none."""
    with open_bytes(path) as file:
        start = file.readline()
    line = re.split(rb"[\r\n]", start, maxsplit=1)[0].decode("utf-8-sig")
    if re.fullmatch('"?sep=.{1,2}', line):
        raise UserError(f"{path}: the first line is {line!r}, for spreadsheets, but must name the columns; delete it")
    if not line.strip():
        raise UserError(f"{path}: {'the first line is blank, but it must name the columns' if start else EMPTY}")
    if _is_quoted(kind, separator):
        return next(csv.reader([line], delimiter=separator))
    return line.split(separator)


def _refuse_row_as_header(names: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    """A name that is a number or a date is none: the first line is an event already."""
    is_row = any(re.match(r"\s*(-?[\d.]+\s*$|\d{4}-\d\d-\d\d)", name) for name in names)
    if len(names) > 1 and not set(names) & set(wanted) and is_row:
        raise UserError(
            f"{path}: the first line must name the columns, and it holds {', '.join(names)}; for a file without a "
            "header give the names of all its columns"
        )


def _untyped(name: str, path: Path) -> str:
    """``user_id:token`` -> ``user_id``."""
    column, _, kind = name.rpartition(":")
    if not column or kind not in ATOMIC_TYPES:
        advice = f"write NAME:TYPE, such as 'user_id:token' (types: {', '.join(ATOMIC_TYPES)})"
        raise UserError(f"{path}: header field {name!r} has no type; {advice}")
    return column
