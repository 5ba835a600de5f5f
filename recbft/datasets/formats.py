"""Read the named columns of a file: RecBole atomic files, Parquet, CSV and TSV, JSON lines, and plain text histories.

    .inter [.gz]        tab-separated, typed header: user_id:token  item_id:token  timestamp:float (RecBole); a folder
                        that holds one such file stands for the file
    .parquet .pq        typed columns
    .csv .tsv [.gz]     named columns; for a file without a header give its column names, and any separator ("::")
    .json .jsonl .ndjson [.gz]     one object per line
    .item [.gz]         as .inter, for features of items
    .txt [.gz]          "user item" on each line, or "user item1 item2 ..." with one line per user
    folder, pattern     files of one format, such as ``events/`` or ``events/2024-*.parquet``, read one after the other
                        as one table: in the order of their names, numbers in these by size; names that begin with a
                        dot or an underscore are left out

Where nobody says what stands between the fields of a CSV file without commas, it is what its first line shows.
Text is UTF-8, with or without a byte order mark; a line ends in \\n or \\r\\n, outside JSON also in \\r. Columns of
text files are read as text and kept exactly; only plain text histories split at white space. Nothing loops over rows
unless an error has to name one.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from recbft.datasets.columns import check_columns, from_pandas, whole_numbers_of
from recbft.errors import UserError
from recbft.system.files import user_path

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
    ".item": "inter",
}
EVENT_ENDINGS = tuple(end for end in FORMATS if end != ".item")
TEXT_FORMATS = frozenset(("csv", "tsv", "inter", "text"))  # in which a number and its text are one
SEPARATORS = {"csv": ",", "tsv": "\t", "inter": "\t"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"  # begins its files
OTHER_SEPARATORS = ("\t", ";", "|", ",", "::")  # that a first line may show
WORDS = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}  # for what a shell makes hard to write
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_DIGITS = re.compile(r"(\d+)")
UNIT_SEPARATOR = b"\x1f"  # stands for a separator that is not one ASCII character while arrow reads
UNPACKED_RATIO, UNPACKED_AT_LEAST = 500, 2**28  # of a gzip file: times its size, and bytes
BLOCK = 16 << 20  # bytes that arrow reads at once; no row may be longer


def read_table(
    path: str | Path,
    wanted: Sequence[str],
    *,
    ids: Sequence[str] = (),
    separator: str | None = None,
    columns: Sequence[str] | None = None,
) -> Any:
    """Read the wanted columns (user and item first) as a pyarrow table; the columns of text files come as text.

    Args:
        path: the file, a folder of files or a pattern (``*``); the ending names the format.
        wanted: column names. A plain text history has no names: its two columns take the first two.
        ids: those of a text file that come as integers where the whole column is written as such.
        separator: between the fields of a delimited file (default: comma, tab for ``.tsv``, or what the first line
            shows); any text, or "tab", "comma", "semicolon", "pipe" or "space".
        columns: the names of all columns of a delimited file without a header.

    Raises:
        UserError: the file is missing, empty, damaged or not UTF-8, lacks a column, or its format is unknown.
    """
    return read_tables([path], wanted, ids=ids, separator=separator, columns=columns)[0]


def read_tables(
    paths: Sequence[str | Path],
    wanted: Sequence[str],
    *,
    ids: Sequence[str] = (),
    separator: str | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[Any, list[int]]:
    """``read_table`` of several paths, one after the other as one table, and the number of rows that each gives."""
    of_paths = [source_files(path) for path in paths]
    files = [file for own in of_paths for file in own]
    parts = [_read_file(file, wanted, separator, columns) for file in files]
    table = parts[0] if len(files) == 1 else _joined(parts, files)
    if file_format(files[0], delimited=separator is not None or columns is not None) in TEXT_FORMATS:
        for name in ids:
            place = table.column_names.index(name)
            table = table.set_column(place, name, whole_numbers_of(table.column(place)))
    rows = iter([len(part) for part in parts])
    return table, [sum(next(rows) for _ in own) for own in of_paths]


def _read_file(path: Path, wanted: Sequence[str], separator: str | None, columns: Sequence[str] | None) -> Any:
    kind = file_format(path, delimited=separator is not None or columns is not None)
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    with reading(path):
        if kind == "parquet":
            check_columns(pq.read_schema(path).names, wanted, str(path))
            return pq.ParquetFile(path).read(columns=list(dict.fromkeys(wanted)))
        if kind == "json lines":
            return _read_json_lines(path, wanted)
        if kind == "text":
            return _read_text(path, wanted)
        return _read_delimited(path, wanted, kind, separator, columns)


def _joined(parts: Sequence[Any], files: Sequence[Path]) -> Any:
    """The rows of all parts in one table."""
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException:
        for part, file in zip(parts, files, strict=True):
            if unlike := [field for field in part.schema if field.type != parts[0].schema.field(field.name).type]:
                was = parts[0].schema.field(unlike[0].name).type
                raise UserError(
                    f"{file}: column {unlike[0].name!r} has type {unlike[0].type}, and {was} in {files[0]}; write the "
                    "files alike"
                ) from None
        raise


def column_names(path: str | Path, separator: str | None = None) -> list[str]:
    """The names a file gives its columns; none for formats without names (or whose first line cannot be read)."""
    path = next(iter(source_files(path)))
    if not path.is_file():
        return []
    with suppress(UserError), reading(path):
        kind = file_format(path, delimited=separator is not None)
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "json lines":
            return list(_first_object(path))
        if kind != "text":
            return _header(path, _separator(kind, separator, path), kind)
    return []


def source_files(path: str | Path) -> list[Path]:
    """The files that a path stands for, in the order in which they are read: itself, those of a folder or a pattern.

    Raises:
        UserError: a folder or pattern without files, or with files of several formats; an address on the internet.
    """
    path = atomic_file(user_path(path))
    if _ADDRESS.match(str(path)):
        address = str(path).replace(":/", "://", 1)  # which a path has once
        raise UserError(
            f"{address}: is an address, and nothing is downloaded: fetch the file (curl -LO ...) and name it"
        )
    if path.is_dir():
        inside = [file.relative_to(path) for file in path.rglob("*")]
        kept = [path / file for file in inside if not any(part.startswith((".", "_")) for part in file.parts)]
        files = [file for file in kept if file.is_file() and FORMATS.get(ending(file), "inter") != "inter"]
        endings = sorted({ending(file) for file in files})
        if not files:
            raise UserError(f"{path}: the folder holds no file of events ({', '.join(EVENT_ENDINGS)}); name a file")
        if len(endings) > 1:
            raise UserError(
                f"{path}: the folder holds files that end in {', '.join(endings)}; name one kind, such as "
                f"'{path / '*'}{endings[0]}'"
            )
    elif is_pattern(path) and not path.exists():
        files = [Path(name) for name in glob.glob(str(path), recursive=True)]
        files = [file for file in files if file.is_file()]
        if not files:
            raise UserError(f"{path}: no file has such a name; check the pattern")
    else:
        return [path]
    files = [file for file in files if file.stat().st_size > 0] or files  # a part may have got no row
    return sorted(
        files, key=lambda file: [int(part) if part.isdecimal() else part for part in _DIGITS.split(str(file))]
    )


def is_pattern(path: Path) -> bool:
    """Whether a path stands for all that match it."""
    return glob.has_magic(str(path))


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder, or one that a pattern stands for."""
    return path.exists() or (is_pattern(path) and any(glob.iglob(str(path), recursive=True)))


def whole_path(path: str | Path) -> str:
    """A path that leads there from any folder; as it is where nothing is there, as of what lies in a data root."""
    found = user_path(path)
    return os.path.abspath(found) if is_there(found) else str(path)


def column_types(path: str | Path) -> dict[str, str]:
    """The types in the header of a RecBole atomic file, such as ``token_seq``; none in other files."""
    path = source_files(path)[0]
    with suppress(UserError), reading(path):
        if path.is_file() and file_format(path) == "inter":
            fields = (field.rpartition(":") for field in _first_line(path).split(SEPARATORS["inter"]))
            return {name: kind for name, _, kind in fields if name}
    return {}


def atomic_file(path: Path) -> Path:
    """For a folder with RecBole atomic files, the one that it stands for: FOLDER/FOLDER.inter, or the only one."""
    found = [*sorted(path.glob("*.inter")), *sorted(path.glob("*.inter.gz"))] if path.is_dir() else []
    if not found:
        return path
    named = [file for file in found if file.name.partition(".inter")[0] == path.resolve().name]
    if named or len(found) == 1:
        return (named or found)[0]
    raise UserError(f"{path}: holds {len(found)} .inter files, and none is called {path.name}.inter; name a file")


def file_format(path: Path, *, delimited: bool = False) -> str:
    """The format the ending stands for; any ending is a delimited file once its columns or separator are given."""
    end = ending(path)
    kind = FORMATS.get(end)
    if delimited:
        if kind in ("inter", "parquet", "json lines"):
            raise UserError(f"{path}: separator and column names are for delimited files, not {end}; leave them out")
        return kind if kind == "tsv" else "csv"
    if kind is None:
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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in whatever goes wrong while it is read."""
    try:
        yield
    except (UnicodeDecodeError, pa.ArrowException, OSError, EOFError, zlib.error, csv.Error) as error:
        said = " ".join(str(error).split())[:300]
        advice = "check that the file is whole, may be read and is UTF-8 (a gzipped file's name must end in .gz)"
        raise UserError(f"{path}: cannot be read: {said}; {advice}") from None


def is_gzip(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix.lower() == ".gz"


def open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    """The content, unpacked as it is read."""
    return _Unpacked(path) if is_gzip(path) else path.open("rb")


class _Unpacked(gzip.GzipFile):
    """A gzip file that is refused where it unpacks to what no log does: a small one could fill the memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.allowed = max(UNPACKED_AT_LEAST, UNPACKED_RATIO * path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size >= 0:
            return self._counted(super().read(size))
        return b"".join(iter(lambda: self._counted(gzip.GzipFile.read(self, BLOCK)), b""))

    def read1(self, size: int = -1) -> bytes:
        return self._counted(super().read1(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._counted(super().readline(size))

    def _counted(self, data: bytes) -> bytes:
        if self.tell() > self.allowed:
            raise UserError(
                f"{self.name} unpacks to more than {self.allowed / 2**30:.1f} GiB, {UNPACKED_RATIO} times its size, "
                "which no log of events does; unpack it yourself if it is one"
            )
        return data


# Delimited text


def _read_delimited(
    path: Path, wanted: Sequence[str], kind: str, separator: str | None, columns: Sequence[str] | None
) -> Any:
    separator = _separator(kind, separator, path, columns)
    names = list(columns) if columns is not None else _header(path, separator, kind)
    try:
        check_columns(names, wanted, str(path))
    except UserError as error:
        if columns is not None or not any(re.fullmatch(r"[-\d.:T ]+Z?", name) for name in names):
            raise
        raise UserError(f"{error}; for a file without a header give the names of all its columns") from None
    chosen = {f"c{names.index(name)}": name for name in wanted}
    quoted, delimiter = _is_quoted(kind, separator), separator
    source = pa.PythonFile(open_bytes(path), "r") if is_gzip(path) else pa.input_stream(str(path))
    if not _arrow_takes(separator):
        source, delimiter = pa.BufferReader(_with_unit_separators(path, separator)), UNIT_SEPARATOR.decode()
    first_row = 1 if columns is None else 0
    try:
        table = pa_csv.read_csv(
            source,
            # On one thread, which is as fast and counts rows: before arrow 23, after a row that is longer than a
            # block, a read on several could leave the next one waiting for ever.
            pa_csv.ReadOptions(
                column_names=[f"c{index}" for index in range(len(names))],
                skip_rows=first_row,
                use_threads=False,
                block_size=BLOCK,
            ),
            pa_csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted),
            pa_csv.ConvertOptions(
                include_columns=list(chosen),
                column_types=dict.fromkeys(chosen, pa.large_string()),
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid:
        if quoted:
            _refuse_open_quotes(path, separator)
        raise
    if quoted and _may_have_open_quotes(path, first_row + table.num_rows):
        _refuse_open_quotes(path, separator)
    return table.rename_columns([chosen[name] for name in table.column_names])


def _separator(kind: str, given: str | None, path: Path, columns: Sequence[str] | None = None) -> str:
    """What stands between the fields: what is given, what is usual in files of this kind, or what the first line shows.

    The line shows it by its number of fields: that of the ``columns``, or any above one.
    """
    if given is None:
        usual, line = SEPARATORS[kind], _first_line(path)
        others = () if kind == "inter" else OTHER_SEPARATORS if columns is None else (*OTHER_SEPARATORS, " ")
        return next((one for one in (usual, *others) if _fits(fields_of(line, one, kind), columns)), usual)
    separator = WORDS.get(given.lower(), given.replace("\\t", "\t"))
    if separator in ("", "\n", "\r"):
        raise UserError(
            f"{path}: the separator is {separator!r}; give the text between two fields, such as ',' or '::'"
        )
    return separator


def _fits(fields: Sequence[str], columns: Sequence[str] | None) -> bool:
    return len(fields) > 1 if columns is None else len(fields) == len(columns)


def _arrow_takes(separator: str) -> bool:
    return len(separator) == 1 and separator.isascii()


def _is_quoted(kind: str, separator: str) -> bool:
    """Whether quotes may stand around a field; RecBole's format knows none: an id may hold one."""
    return kind != "inter" and _arrow_takes(separator)


def _header(path: Path, separator: str, kind: str) -> list[str]:
    """The column names in the first line, without their types where it is an atomic file's (``user_id:token``)."""
    line = _first_line(path)
    if not line.strip():
        raise UserError(f"{path}: the first line is blank, but it must name the columns")
    names = fields_of(line, separator, kind)
    return [name.rpartition(":")[0] or name for name in names] if kind == "inter" else names


def _first_line(path: Path) -> str:
    with open_bytes(path) as file:
        return re.split(rb"[\r\n]", file.readline(), maxsplit=1)[0].decode("utf-8-sig")


def fields_of(line: str, separator: str, kind: str) -> list[str]:
    """What a line holds between separators."""
    return next(csv.reader([line], delimiter=separator), []) if _is_quoted(kind, separator) else line.split(separator)


def _with_unit_separators(path: Path, separator: str) -> bytes:
    """The file with one character in place of a separator that arrow does not take."""
    with open_bytes(path) as file:
        content = file.read()
    return content.removeprefix(BYTE_ORDER_MARK).replace(separator.encode(), UNIT_SEPARATOR)


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
    limit, begins = csv.field_size_limit(2**31 - 1), 0
    with open_bytes(path) as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8-sig", "replace", ""), delimiter=separator, strict=True)
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


# JSON lines


def _first_object(path: Path) -> dict[str, Any]:
    with open_bytes(path) as file:
        content = next((text for text in file if text.removeprefix(BYTE_ORDER_MARK).strip()), b"")
    return _json_object(content.decode("utf-8-sig").strip(), path, 1)


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}: line {number}: is not JSON ({error}); write one object per line") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: line {number}: is not a JSON object; write one object per line")
    return value


def _read_json_lines(path: Path, wanted: Sequence[str]) -> Any:
    first = _first_object(path)
    if first and any(all(isinstance(value, kind) for value in first.values()) for kind in (dict, list)):
        raise UserError(
            f"{path}: line 1 holds whole columns; write one row per line (in pandas: frame.to_json(path, "
            "orient='records', lines=True))"
        )
    check_columns(list(first), wanted, f"{path}: line 1")  # others may have more
    # the first line fixes the types: left to itself arrow would turn an id that looks like a date into a date
    arrow_types = {str: pa.large_string(), int: pa.int64(), float: pa.float64()}
    types = {name: arrow_types.get(type(first[name])) for name in wanted}
    if None not in types.values():
        options = pa_json.ParseOptions(
            explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore"
        )
        with suppress(pa.ArrowInvalid), open_bytes(path) as file:
            file.seek(3 if file.read(3) == BYTE_ORDER_MARK else 0)
            return pa_json.read_json(file, pa_json.ReadOptions(block_size=BLOCK), options)
    # One line after the other: for mixed number types, and to name the line at fault.
    columns: dict[str, list[Any]] = {name: [] for name in types}
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                row = _json_object(text, path, number)
                for name, values in columns.items():
                    values.append(row.get(name))
    return pa.table({name: from_pandas(pd.Series(values, dtype=object), name, str(path))
                     for name, values in columns.items()})  # fmt: skip


# Plain text histories


def _read_text(path: Path, wanted: Sequence[str]) -> Any:
    if len(wanted) > 2:
        advice = "give separator and column names to read one"
        raise UserError(f"{path}: a plain text history has no column {wanted[2]!r}; {advice}")
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        content = text.read()  # every line ends in \n, whatever it ends in on disk
    lines = pc.ascii_trim_whitespace(pa.array(content.split("\n"), pa.large_string()))
    numbers = np.flatnonzero(pc.not_equal(lines, "").to_numpy(zero_copy_only=False)) + 1
    if len(numbers) == 0:
        raise UserError(f"{path}: the file is empty")
    fields = pc.ascii_split_whitespace(lines.take(pa.array(numbers - 1)))
    counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False).astype(np.int64)
    flat, starts = pc.list_flatten(fields), np.concatenate([[0], np.cumsum(counts)[:-1]])
    lonely = np.flatnonzero(counts < 2)
    if len(lonely):
        user = flat[int(starts[lonely[0]])].as_py()
        advice = "write 'user item' or 'user item1 item2 ...', or give what stands between the fields as separator"
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
