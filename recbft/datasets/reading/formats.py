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

import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from recbft.datasets.events import check_columns
from recbft.datasets.reading.delimited import header, read_delimited, separator_of
from recbft.datasets.reading.opening import (
    BYTE_ORDER_MARK,
    EMPTY,
    is_gzip,
    one_line,
    open_bytes,
    reading,
    refuse_packed,
)
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
        return read_delimited(path, wanted, kind, separator, columns)


def column_names(path: str | Path, separator: str | None = None) -> list[str]:
    """The names a file gives its columns; none for formats without names (or whose first line cannot be read).

    Args:
        separator: as in ``read_table``.
    """
    path = atomic_file(Path(path))
    if not path.is_file():
        return []
    with suppress(UserError), reading(path):
        kind = file_format(path, delimited=separator is not None)
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "json lines":
            return list(_first_object(path))
        if kind in ("inter", "csv", "tsv"):
            names = header(path, separator_of(kind, separator, path), kind)
            return [name.rpartition(":")[0] or name for name in names] if kind == "inter" else names
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
    end = ending(path)
    kind = FORMATS.get(end)
    if delimited:
        if kind in ("inter", "parquet", "json lines"):
            raise UserError(f"{path}: separator and column names are for delimited files, not {end}; leave them out")
        return kind if kind == "tsv" else "csv"
    if kind is None:
        if path.is_file():
            with reading(path), open_bytes(path) as file:
                refuse_packed(path, file.read(5))
        known = ", ".join(FORMATS)
        raise UserError(
            f"{path}: unknown file ending {end!r}; known are {known} (each text format also with .gz); "
            "for another delimited file give its separator or its column names"
        )
    return kind


def ending(path: Path) -> str:
    """What the name ends in, ``.gz`` left out, in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else "".join(suffixes[-1:])


def _read_parquet(path: Path, wanted: Sequence[str]) -> Any:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:  # the latter of a column's name
        if is_gzip(path):
            raise UserError(f"{path}: is a gzipped Parquet file; unpack it, Parquet is compressed by itself") from None
        raise UserError(f"{path}: is not a whole Parquet file ({one_line(error)}); fetch or write it again") from None
    check_columns(schema.names, wanted, str(path))
    return pq.ParquetFile(path).read(columns=list(dict.fromkeys(wanted)))


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
    check_columns(list(first), wanted, f"{path}: line 1")  # others may have more
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
    if any(value != value for value in values):  # NaN, as Python writes what is missing
        return _from_python([None if value != value else value for value in values], name, source)
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return pa.array([None if value is None else str(value) for value in values], pa.large_string())
    if kinds == {int, float}:
        with suppress(OverflowError):
            return pa.array([None if value is None else float(value) for value in values])
    first = type(next(value for value in values if value is not None))
    if len(kinds) == 1:
        raise UserError(f"{source}: column {name!r} holds {_a(first)} in each row; give numbers or text")
    row = next(i for i, value in enumerate(values) if value is not None and type(value) is not first)
    raise UserError(
        f"{source}: row {row + 1}: column {name!r} holds {values[row]!r}, but row 1 holds {_a(first)}; "
        "use one type per column"
    )


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


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
        mark = next((mark for mark in ",;|" if mark in user), None)
        advice = "write 'user item' or 'user item1 item2 ...'"
        if mark is not None:
            advice = f"if {mark!r} stands between its fields, give it as separator"
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
