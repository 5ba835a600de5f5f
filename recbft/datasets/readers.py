"""Read the named columns of a file: RecBole atomic files, Parquet, CSV and TSV, JSON lines, and plain text histories.

    .inter [.gz]        tab-separated, typed header: user_id:token  item_id:token  timestamp:float (RecBole); a folder
                        that holds one such file stands for the file
    .parquet .pq        typed columns
    .csv .tsv [.gz]     named columns; for a file without a header give its column names, and any separator ("::")
    .json .jsonl .ndjson [.gz]     one object per line
    .txt [.gz]          "user item" on each line, or "user item1 item2 ..." with one line per user

Text is UTF-8, with or without a byte order mark; a line ends in \\n or \\r\\n, outside JSON also in \\r. Ids of text
files are read as text and kept exactly; only plain text histories split at white space. Nothing loops over rows unless
an error has to name one.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from recbft.datasets.events import check_columns
from recbft.datasets.opening import is_gzip, one_line, open_bytes, reading
from recbft.errors import UserError

FORMATS = {
    ".inter": "inter",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json lines",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".txt": "text",
}
ATOMIC_TYPES = ("token", "token_seq", "float", "float_seq")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EMPTY = "the file is empty"
UNIT_SEPARATOR = "\x1f"  # stands for a separator that is not one ASCII character while arrow reads


def read_table(
    path: str | Path, wanted: Sequence[str], *, separator: str | None = None, columns: Sequence[str] | None = None
) -> Any:
    """Read the wanted columns (user and item first) as a pyarrow table; the columns of text files come as text.

    Args:
        path: the file; its ending names the format.
        wanted: column names. A plain text history has no names: its two columns take the first two.
        separator: between the fields of a delimited file (default: comma; tab for ``.tsv``); any text.
        columns: the names of all columns of a delimited file without a header.

    Raises:
        UserError: the file is missing, empty, damaged or not UTF-8, lacks a column, or its format is unknown.
    """
    path = atomic_file(Path(path))
    kind = file_format(path, delimited=separator is not None or columns is not None)
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path")
    with reading(path):
        if path.stat().st_size == 0:
            raise UserError(f"{path}: {EMPTY}")
        if kind == "parquet":
            return _read_parquet(path, wanted)
        if kind == "json lines":
            return _read_json_lines(path, wanted)
        if kind == "text":
            return _read_text(path, wanted)
        return _read_delimited(path, wanted, kind, separator, columns)


def column_names(path: str | Path) -> list[str]:
    """The names a file gives its columns; none for formats without names (or whose first line cannot be read)."""
    path = atomic_file(Path(path))
    if not path.is_file():
        return []
    kind = FORMATS.get(_ending(path))
    with suppress(UserError), reading(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "json lines":
            return list(_first_object(path))
        if kind in ("inter", "csv", "tsv"):
            header = _header(path, "," if kind == "csv" else "\t", quoted=kind != "inter")
            return [name.rpartition(":")[0] or name for name in header] if kind == "inter" else header
    return []


def atomic_file(path: Path) -> Path:
    """For a folder, the RecBole atomic file in it: FOLDER/FOLDER.inter, or the only ``.inter`` file."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.inter")) + sorted(path.glob("*.inter.gz"))
    named = [file for file in found if file.name.partition(".inter")[0] == path.resolve().name]
    if named or len(found) == 1:
        return (named or found)[0]
    if found:
        raise UserError(f"{path}: holds {len(found)} .inter files and none is called {path.name}.inter; name the file")
    raise UserError(f"{path}: is a folder without an .inter file; name a file")


def file_format(path: Path, *, delimited: bool = False) -> str:
    """The format the ending stands for; any ending is a delimited file once its columns or separator are given."""
    ending = _ending(path)
    kind = FORMATS.get(ending)
    if delimited:
        if kind in ("inter", "parquet", "json lines"):
            raise UserError(f"{path}: separator and column names are for delimited files, not {ending}; leave them out")
        return kind if kind == "tsv" else "csv"
    if kind is None:
        known = ", ".join(FORMATS)
        raise UserError(
            f"{path}: unknown file ending {ending!r}; known are {known} (each text format also with .gz); "
            "for another delimited file give its separator or its column names"
        )
    return kind


def _ending(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else "".join(suffixes[-1:])


# Parquet ---------------------------------------------------------------------------------------------


def _read_parquet(path: Path, wanted: Sequence[str]) -> Any:
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: is not a whole Parquet file ({one_line(error)}); fetch or write it again") from None
    check_columns(schema.names, wanted, str(path))
    return pq.ParquetFile(path).read(columns=list(dict.fromkeys(wanted)))


# Delimited text --------------------------------------------------------------------------------------


def _read_delimited(
    path: Path, wanted: Sequence[str], kind: str, separator: str | None, columns: Sequence[str] | None
) -> Any:
    separator = {"csv": ",", "tsv": "\t", "inter": "\t"}[kind] if separator is None else separator.replace("\\t", "\t")
    if separator in ("", "\n", "\r", "\0"):
        said = repr(separator) if separator else "empty"
        raise UserError(f"{path}: the separator is {said}; give the text between two fields, such as ',' or '::'")
    quoted = kind != "inter" and _arrow_takes(separator)  # RecBole's format knows no quotes: an id may hold one
    raw_names = list(columns) if columns is not None else _header(path, separator, quoted=quoted)
    names = [_untyped(name, path) for name in raw_names] if kind == "inter" else raw_names
    check_columns(names, wanted, str(path))
    chosen = {f"c{names.index(name)}": name for name in wanted}
    unique = [f"c{index}" for index in range(len(names))]
    source = _arrow_source(path, separator)
    delimiter = separator if _arrow_takes(separator) else UNIT_SEPARATOR
    first_row = 1 if columns is None else 0

    def parse(handler: Any = None) -> Any:
        return pa_csv.read_csv(
            source(),
            pa_csv.ReadOptions(column_names=unique, skip_rows=first_row, use_threads=handler is None),
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

    table = _parse_or_name_the_row(parse, path, len(names), first_row)
    if quoted:
        _refuse_open_quotes(path, separator, first_row + table.num_rows)
    if table.num_rows == 0:
        raise UserError(f"{path}: the file has a header but no rows")
    return table.rename_columns([chosen[name] for name in table.column_names])


def _parse_or_name_the_row(parse: Any, path: Path, num_columns: int, first_row: int) -> Any:
    try:
        return parse()
    except pa.ArrowInvalid as error:
        if "columns, got" not in str(error):
            raise
    bad: list[tuple[int | None, int]] = []

    def remember(row: Any) -> str:
        bad.append((row.number, row.actual_columns))
        return "skip"

    parse(remember)  # again, on one thread: only then does arrow count rows
    number, actual = bad[0]
    place = "" if number is None else f"row {number - first_row}: "
    raise UserError(
        f"{path}: {place}{actual} fields where {num_columns} are expected; check the separator and the column names"
    )


def _refuse_open_quotes(path: Path, separator: str, num_rows: int) -> None:
    """Refuse a stray quote, which arrow lets swallow all rows up to the next one; values may hold line ends.

    Args:
        num_rows: that arrow found, the header included. Where there are as many lines and every quote has its second,
            no value spans several.
    """
    with open_bytes(path) as file:
        quotes = sum(part.count(b'"') for part in iter(lambda: file.read(2**20), b""))
        if not quotes:
            return
        file.seek(0)
        text = io.TextIOWrapper(file, "latin-1")  # lines end in CR, LF or both, as arrow takes them
        num_lines = sum(1 for line in text if line.strip())
        text.detach()
        if num_lines <= num_rows and quotes % 2 == 0:
            return
        file.seek(0)
        limit, begins = csv.field_size_limit(2**31 - 1), 0
        lines = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=separator, strict=True)
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
        return lambda: pa.input_stream(str(path), compression="gzip" if is_gzip(path) else "detect")
    with open_bytes(path) as file:
        content = file.read()
    if UNIT_SEPARATOR.encode() in content:
        raise UserError(f"{path}: holds the character 0x1f, so separator {separator!r} cannot be used; replace either")
    content = content.removeprefix(BYTE_ORDER_MARK).replace(separator.encode(), UNIT_SEPARATOR.encode())
    return lambda: pa.BufferReader(content)


def _header(path: Path, separator: str, *, quoted: bool) -> list[str]:
    with open_bytes(path) as file:
        start = file.readline()
    line = re.split(rb"[\r\n]", start, maxsplit=1)[0].decode("utf-8-sig")
    if not line.strip():
        raise UserError(f"{path}: {'the first line is blank, but it must name the columns' if start else EMPTY}")
    if quoted:
        return next(csv.reader([line], delimiter=separator))
    return line.split(separator)


def _untyped(name: str, path: Path) -> str:
    """``user_id:token`` -> ``user_id``."""
    column, _, kind = name.rpartition(":")
    if not column or kind not in ATOMIC_TYPES:
        advice = f"write NAME:TYPE, such as 'user_id:token' (types: {', '.join(ATOMIC_TYPES)})"
        raise UserError(f"{path}: header field {name!r} has no type; {advice}")
    return column


# JSON lines ------------------------------------------------------------------------------------------


def _first_object(path: Path) -> dict[str, Any]:
    with open_bytes(path) as file:
        content = next((text for text in file if text.removeprefix(BYTE_ORDER_MARK).strip()), b"")
    line = content.decode("utf-8-sig").strip()
    if not line:
        raise UserError(f"{path}: {EMPTY}")
    if line.startswith("["):
        raise UserError(f"{path}: starts a JSON list; write one object per line instead")
    return _json_object(line, path, 1)


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number too long or a list too deep"
        raise UserError(f"{path}: line {number}: is not JSON ({reason}); write one object per line") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: line {number}: is not a JSON object; write one object per line")
    return value


def _read_json_lines(path: Path, wanted: Sequence[str]) -> Any:
    first = _first_object(path)
    check_columns(list(first), wanted, str(path))
    # the first line fixes the types: left to itself arrow would turn an id that looks like a date into a date
    arrow_types = {str: pa.large_string(), int: pa.int64(), float: pa.float64()}
    types = {name: arrow_types.get(type(first[name])) for name in dict.fromkeys(wanted)}
    if None not in types.values():
        schema = pa.schema(list(types.items()))
        options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        try:
            with open_bytes(path) as file:
                file.seek(3 if file.read(3) == BYTE_ORDER_MARK else 0)
                return pa_json.read_json(file, pa_json.ReadOptions(block_size=16 << 20), options)
        except pa.ArrowInvalid:
            pass
    return _read_json_slowly(path, list(types))


def _read_json_slowly(path: Path, wanted: Sequence[str]) -> Any:
    """One line after the other: for mixed number types, and to name the line at fault."""
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                row = _json_object(text, path, number)
                for name in wanted:
                    columns[name].append(row.get(name))
    return pa.table({name: _from_python(values, name, str(path)) for name, values in columns.items()})


def _from_python(values: list[Any], name: str, source: str) -> Any:
    """A column of Python values of one type; whole numbers and floats may mix, and beyond 64 bits text is kept."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        pass
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return pa.array([None if value is None else str(value) for value in values], pa.large_string())
    if kinds == {int, float}:
        with suppress(OverflowError):
            return pa.array([None if value is None else float(value) for value in values])
    first = type(next(value for value in values if value is not None))
    if len(kinds) == 1:
        raise UserError(f"{source}: column {name!r} holds a {first.__name__} in each row; give numbers or text")
    row = next(i for i, value in enumerate(values) if value is not None and type(value) is not first)
    raise UserError(
        f"{source}: row {row + 1}: column {name!r} holds {values[row]!r}, but row 1 holds a {first.__name__}; "
        "use one type per column"
    )


# Plain text histories --------------------------------------------------------------------------------


def _read_text(path: Path, wanted: Sequence[str]) -> Any:
    if len(wanted) > 2:
        advice = "give separator and column names to read one"
        raise UserError(f"{path}: a plain text history has no column {wanted[2]!r}; {advice}")
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        content = text.read()  # every line ends in \n, whatever it ends in on disk
    lines = pc.ascii_trim_whitespace(pa.array(content.split("\n"), pa.large_string()))
    numbers = np.flatnonzero(pc.not_equal(lines, "").to_numpy(zero_copy_only=False)) + 1
    if len(numbers) == 0:
        raise UserError(f"{path}: {EMPTY}")
    fields = pc.ascii_split_whitespace(lines.take(pa.array(numbers - 1)))
    counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False).astype(np.int64)
    flat, starts = pc.list_flatten(fields), np.concatenate([[0], np.cumsum(counts)[:-1]])
    lonely = np.flatnonzero(counts < 2)
    if len(lonely):
        user = flat[int(starts[lonely[0]])].as_py()
        advice = "write 'user item' or 'user item1 item2 ...'"
        raise UserError(f"{path}: line {numbers[lonely[0]]}: user {user!r} has no item; {advice}")
    users = flat.take(pa.array(starts))
    if counts.max() > 2:
        _refuse_repeated_users(users, numbers, path)
    is_item = np.ones(len(flat), dtype=bool)
    is_item[starts] = False
    owner = pa.array(np.repeat(np.arange(len(users)), counts - 1))
    return pa.table({wanted[0]: users.take(owner), wanted[1]: flat.filter(pa.array(is_item))})


def _refuse_repeated_users(users: Any, numbers: Any, path: Path) -> None:
    codes = users.dictionary_encode().indices.to_numpy()
    _, first = np.unique(codes, return_index=True)
    if len(first) < len(users):
        again = int(np.setdiff1d(np.arange(len(users)), first)[0])
        raise UserError(
            f"{path}: line {numbers[again]}: user {users[again].as_py()!r} has a line already; a file "
            "'user item1 item2 ...' has one line per user (for 'user item time' give separator and column names)"
        )
