"""Look at a file of events that nobody has described: its form, which column holds what, and the settings that read it.

Everything is guessed from the first rows: what separates the fields from their number per line; whether the first line
names the columns from what stands below it; users, items and sessions from the columns' names, else from their places;
times from names and values, the finest column first. The whole file is then read with these settings, so that what is
printed is what training gets.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from recbft.datasets.columns import from_pandas, is_text
from recbft.datasets.config import DataConfig
from recbft.datasets.dataset import Dataset
from recbft.datasets.events import DATE, UNITS, are_dates, are_of_our_time, read_times
from recbft.datasets.formats import (
    FORMATS,
    OTHER_SEPARATORS,
    SEPARATORS,
    WORDS,
    column_names,
    ending,
    fields_of,
    open_bytes,
    reading,
    source_files,
)
from recbft.datasets.row_order import time_columns
from recbft.errors import UserError

SAMPLE = 1000  # rows
ALIKE = 0.9  # of lines: some hold line ends within quotes
FEW = 20  # values of a column that tells kinds of events
# Names of columns in small letters and digits alone.
_ROLES = {
    "user": r"""(user|customer|visitor|member|account|client|reviewer|profile|person|reader|listener|player)
        (id|idx|no|number|name|key)? | uid | u | userhash""",
    "item": r"""(item|product|movie|film|article|song|track|artist|book|business|game|video|news|content|venue|poi|anime
        |recipe|show|course|ad|offer|listing|job|app)(id|idx|no|number|code|key)?
        | iid | i | asin | parentasin | isbn | sku | stockcode""",
    "session": r"(session|visit|basket)(id|idx|no|number|key)? | sid",
    "event": r"(event|action|behaviou?r|interaction|activity)(type|name|kind)? | type | kind",
}
_SOME_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{2,4}\b")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


class Look(NamedTuple):
    """What a file seems to be."""

    config: DataConfig  # that reads it
    form: str  # in words
    sample: pd.DataFrame  # the first rows, with all columns
    notes: list[str]  # what is worth knowing, a line each
    dataset: Dataset | None  # that the settings give; None where they give none
    problem: str | None  # why not

    def command(self) -> str:
        """The line that trains on it."""
        values = {name: getattr(self.config, name) for name in ("user", "item", "time", "session", "separator")}
        values["separator"] = next(
            (word for word, sign in WORDS.items() if sign == values["separator"]), values["separator"]
        )
        values["columns"] = None if self.config.columns is None else ",".join(self.config.columns)
        options = ((f"--{name}", value) for name, value in values.items() if value is not None)
        words = ["recbft", "train", "-d", str(self.config.dataset)]
        return shlex.join([*words, *itertools.chain.from_iterable(options)])


class _Form(NamedTuple):
    """How a file is written, with its first rows; settings None where the file says it itself."""

    words: str
    sample: pd.DataFrame
    separator: str | None = None
    columns: tuple[str, ...] | None = None
    named: bool = True  # the columns, by the file


def look(path: str | Path) -> Look:
    """Guess how a file, a folder of parts or a pattern is read, and read it.

    Raises:
        UserError: there is no such file, it is empty or damaged, or it has no two columns.
    """
    files = source_files(path)
    if not files[0].is_file():
        raise UserError(f"{files[0]}: no such file; check the path")
    with reading(files[0]):
        form = _form(files[0])
    names = list(map(str, form.sample.columns))
    alone = [name.strip() != "" and names.count(name) == 1 for name in names]  # a spreadsheet may leave blank ones
    form = form._replace(sample=form.sample.loc[:, alone])
    if sum(alone) < 2:
        raise UserError(
            f"{files[0]}: its columns are {', '.join(names)}, and a file of events has one of users and one of items, "
            "each under a name of its own"
        )
    roles, notes = _roles(form)
    usual = {"user": "user_id", "item": "item_id"}
    told = {role: name for role, name in roles.items() if name not in (None, usual.get(role))}
    config = DataConfig(dataset=str(path), separator=form.separator, columns=form.columns, **told)  # type: ignore[arg-type]
    dataset, problem = None, None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            dataset = config.load()
        except UserError as error:
            problem = str(error)
    if dataset is not None and dataset.num_events == dataset.num_items:
        notes.append("no item stands in two rows: a table of items is given with --items FILE, beside a file of events")
    notes += [" ".join(str(one.message).split()) for one in said]
    parts = f"{len(files):,} files, " if len(files) > 1 else ""
    return Look(config, f"{parts}{form.words}", form.sample.head(10), notes, dataset, problem)


def _form(path: Path) -> _Form:
    end = ending(path)
    kind = FORMATS.get(end)
    if kind == "parquet":
        batch = next(pq.ParquetFile(path).iter_batches(batch_size=SAMPLE), None)
        sample = pq.read_schema(path).empty_table().to_pandas() if batch is None else batch.to_pandas()
        return _Form("Parquet", sample)
    lines = _first_lines(path)
    if not lines:
        raise UserError(f"{path}: the file is empty")
    if kind == "json lines":
        rows = []
        for line in lines:
            with suppress(ValueError):
                rows.append(json.loads(line))
        objects = [row for row in rows if isinstance(row, dict)]
        if not objects:
            raise UserError(
                f"{path}: none of its first lines is a JSON object; write one object per line, an event each"
            )
        return _Form("JSON, an object per line", pd.DataFrame(objects))
    if kind == "inter":
        table = [line.split("\t") for line in lines]
        return _Form("RecBole's atomic file", pd.DataFrame(table[1:], columns=column_names(path)))
    separator = _separator(lines, SEPARATORS.get(kind or "", ","))
    table = [_fields(line, separator) for line in lines]
    width = len(table[0])
    if kind == "text" and separator == " " and (width == 2 or len(set(map(len, table))) > 1):
        pairs = [(row[0], item) for row in table for item in row[1:]]
        return _Form("plain text, a user and items per line", pd.DataFrame(pairs, columns=["user_id", "item_id"]))
    table = [row for row in table if len(row) == width]
    word = next((word for word, sign in WORDS.items() if sign == separator), repr(separator))
    header = _has_header(table)
    given = None if separator == SEPARATORS.get(kind or "") else separator
    if header:
        return _Form(f"text, {word} between the fields", pd.DataFrame(table[1:], columns=table[0]), given)
    names = _made_up_names(pd.DataFrame(table))
    words = f"text without a header, {word} between the fields"
    return _Form(words, pd.DataFrame(table, columns=names), given, tuple(names), named=False)


def _first_lines(path: Path) -> list[str]:
    with open_bytes(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline=None) as text:
        lines = [line.rstrip("\n") for line in itertools.islice(text, SAMPLE)]
    return [line for line in lines if line.strip()]


def _separator(lines: Sequence[str], usual: str) -> str:
    """What gives nearly all lines the number of fields of the first, the most of them; else white space."""

    def number(separator: str) -> int:
        counts = [len(_fields(line, separator)) for line in lines]
        usual = max(set(counts), key=counts.count)
        return usual if counts.count(usual) >= ALIKE * len(counts) and counts[0] == usual else 0

    # The usual one first, which a tie goes to; a space may stand in any value.
    best = max((usual, *OTHER_SEPARATORS), key=number)
    return best if number(best) > 1 or usual in lines[0] else " "


def _fields(line: str, separator: str) -> list[str]:
    if separator == " ":
        return line.split()
    return fields_of(line, separator, "csv")


def _has_header(table: Sequence[Sequence[str]]) -> bool:
    """Whether the first line names the columns: none of it is a number, and it is unlike what stands below."""
    first, below = table[0], table[1:]
    if any(_NUMBER.fullmatch(field) or _is_time([field]) for field in first):
        return False
    if any(_role_of(name) or time_columns([name]) for name in first):
        return True
    columns = list(zip(*below, strict=True))
    if any(_NUMBER.fullmatch(values[0]) for values in columns):
        return True
    return not any(name in values for name, values in zip(first, columns, strict=False))


def _made_up_names(sample: pd.DataFrame) -> list[str]:
    """Names for the columns of a file without a header: user, item, then what the values look like."""
    names = ["user_id", "item_id"]
    for place in range(2, sample.shape[1]):
        values = sample[place].tolist()
        if _is_time(values) and "timestamp" not in names:
            names.append("timestamp")
        elif all(_NUMBER.fullmatch(value) for value in values) and "rating" not in names:
            names.append("rating")
        else:
            names.append(f"column_{place + 1}")
    return names


def _role_of(name: str) -> str | None:
    plain = re.sub(r"[\W_]", "", str(name).lower())
    return next((role for role, pattern in _ROLES.items() if re.fullmatch(pattern, plain, re.VERBOSE)), None)


def _roles(form: _Form) -> tuple[dict[str, str | None], list[str]]:
    """The columns of users, items, times and sessions, and remarks on how they were found."""
    notes: list[str] = []
    sample = form.sample
    names = [str(name) for name in sample.columns]
    found: dict[str, str | None] = {"user": None, "item": None, "session": None}
    for role in found:
        exact = [name for name in names if name == f"{role}_id"]
        likely = exact + [name for name in names if _role_of(name) == role]
        repeated = [name for name in likely if sample[name].map(str).duplicated().any()]  # a row's own number is none
        found[role] = next(iter(repeated + likely), None)
    times = _time_candidates(sample, names, notes)
    found["time"] = times[0] if times else None
    if found["user"] is not None:
        if found["session"] is not None:
            notes.append(
                f"column {found['session']!r} holds sessions: add --session {found['session']} to train on these"
            )
        found["session"] = None
    free = [
        name for name in names if name not in found.values() and name not in times and _may_be_ids(name, sample[name])
    ]
    for role in ("user", "item"):
        if found[role] is None and not (role == "user" and found["session"] is not None):
            if not free:
                notes.append(f"no column looks like that of the {role}s: name it with --{role} NAME")
                continue
            found[role] = free.pop(0)
            if form.named:
                notes.append(f"column {found[role]!r} is taken for the {role}s by its place alone")
    for name in names:
        kinds = sorted({str(value) for value in sample[name].dropna().map(str)}) if _role_of(name) == "event" else []
        if 1 < len(kinds) <= FEW:
            where = shlex.quote(f"where={name} = {kinds[0]}")
            notes.append(f"column {name!r} holds {', '.join(kinds)}: to train on one of these add --set {where}")
    return found, notes


def _time_candidates(sample: pd.DataFrame, names: Sequence[str], notes: list[str]) -> list[str]:
    """The columns of times, the finest first: those that can be read, and those with a few faults, which reading names.

    Of others that look like times a note says why they are left out.
    """
    by_name = time_columns(names)
    found = []
    for name in [*by_name, *(name for name in names if name not in by_name and not _role_of(name))]:
        values = [value for value in sample[name].dropna().tolist() if str(value).strip()]
        if _is_time(values, any_number=name in by_name) or _mostly(DATE, values):
            found.append(name)
        elif name in by_name or _mostly(_SOME_DATE, values):
            unread = next((value for value in values if not _is_time([value], any_number=True)), None)
            said = "is called as one of times" if name in by_name else "looks like one of times"
            notes.append(
                f"column {name!r} {said}, and {unread!r} is not read as one; write it like 2024-01-31 12:30:00 to "
                "order by it"
            )
    return sorted(found, key=lambda name: -sample[name].map(str).nunique())


def _mostly(pattern: re.Pattern[str], values: Sequence[Any]) -> bool:
    return 2 * sum(pattern.match(str(value).strip()) is not None for value in values) > len(values)


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_time(values: Sequence[Any], *, any_number: bool = False) -> bool:
    """Whether all values are times: dates, or numbers that are dates of our time, or ``any_number``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            column = from_pandas(pd.Series(values), "", "")
            ticks, unit = read_times(column, "", "")
    except (UserError, pa.ArrowException):
        return False
    if len(ticks) == 0 or any_number or not (is_text(column.type) or _is_number(column.type)):
        return len(ticks) > 0
    if is_text(column.type) and are_dates(column):
        return True
    return any(are_of_our_time(ticks, one).all() for one in (UNITS if unit is None else (unit,)))


def _may_be_ids(name: str, column: Any) -> bool:
    """Whether a column holds whole numbers or texts, and neither measures nor kinds of events."""
    if _role_of(name) == "event" or "rating" in name.lower():
        return False
    texts = column.dropna().map(str)
    numbers = [text for text in texts if _NUMBER.fullmatch(text)]
    return len(texts) > 0 and not any("." in text and not text.endswith(".0") for text in numbers)
