"""What is known of items: columns of a table beside their ids, each read as one of five kinds.

    category   one of several values            text, whole numbers      red
    set        several of them                  lists, or text cut at a separator      Comedy|Drama
    number     a quantity                       numbers, dates
    words      free text                        Princess Bride, The (1987)
    vector     an embedding made elsewhere      lists of as many numbers each, or the rows of a .npy file

A column's kind is guessed from its type unless it is named. In a RecBole ``.item`` file the header names it: ``token``
is a category, ``token_seq`` a set, ``float`` a number, ``float_seq`` a vector, values of the last two kinds of column
separated by spaces. In place of a kind, ``id`` marks the column with the item ids and ``skip`` leaves a column out;
``set:|`` says at what text is cut into a set.

A value that is blank, NaN, a word for a missing value or an empty list is missing. Two values are equal when their
canonical texts are, as ids: a category 7 equals the text ``7``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import (
    as_floats,
    as_table,
    check_columns,
    flat,
    is_list,
    is_text,
    refuse_first,
    stands_for_nothing,
)
from recbft.datasets.events import read_ids
from recbft.datasets.formats import (
    column_names,
    column_types,
    ending,
    is_there,
    read_table,
    reading,
    source_files,
    whole_path,
)
from recbft.datasets.hashing import sha256_of, text_parts
from recbft.datasets.vocabulary import Vocabulary, canonical_text
from recbft.errors import UserError, did_you_mean
from recbft.system.files import user_path, write_parquet

Kind = Literal["category", "set", "number", "words", "vector"]
KINDS: tuple[Kind, ...] = get_args(Kind)
USUAL_ITEM = "item_id"
TYPED_HEADER = {"token": "category", "token_seq": "set: ", "float": "number", "float_seq": "vector"}
_SEPARATORS = ("|", ";")  # at which text is cut into sets without being told so; a comma stands in titles too


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ItemFeatures:
    """Feature columns, a row per item; those of a data set have its items' rows in the order of their indices.

    ``table`` holds a column of a category or of words as text, of a set as a sorted list of texts, of numbers as
    float64, of vectors as lists of float32; null is missing.
    """

    ids: NDArray[Any]  # (N,) raw ids: int64, or object holding str
    table: Any  # pyarrow, N rows
    kinds: dict[str, Kind]
    separators: dict[str, str] = field(default_factory=dict)  # at which the texts of a set were cut
    source: str = "items"
    files: tuple[str, ...] = ()  # that it was read from; none of a frame
    named: dict[str, str] = field(default_factory=dict)  # the kinds that were asked for, column -> kind
    id_column: str = USUAL_ITEM  # the column that held ``ids``

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items())
        return f"<ItemFeatures of {len(self):,} items: {columns or 'no columns'}>"

    @classmethod
    def of(cls, given: Any, **how: Any) -> ItemFeatures:
        """Features as given, or of a frame (``from_frame``), a file or several (``read``)."""
        if isinstance(given, ItemFeatures):
            return given
        if isinstance(given, (str, Path, list, tuple)):
            return cls.read(given, **how)
        return cls.from_frame(given, **{name: value for name, value in how.items() if name != "data_root"})

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        item: str | None = None,
        kinds: Mapping[str, str] | None = None,
        source: str = "items",
        vectors: Mapping[str, NDArray[Any]] | None = None,
        just: bool = False,
    ) -> ItemFeatures:
        """Features of a table with one row per item.

        Args:
            frame: a pandas data frame, a pyarrow table, or any table that speaks arrow.
            item: the column with raw ids, if it is not ``item_id`` and ``kinds`` does not mark it.
            kinds: column -> a kind, ``set:SEPARATOR``, ``id`` or ``skip``; of other columns the kind is guessed.
            vectors: further columns, (rows, width) each.
            just: take the columns of ``kinds`` alone, as far as they are there.

        Raises:
            UserError: a column or kind is unknown; an id is blank or stands twice; a value does not fit its kind.

        >>> frame = pd.DataFrame({"item_id": [1, 2], "year": [1995, 1996], "genres": [["Comedy"], ["Drama", "War"]]})
        >>> ItemFeatures.from_frame(frame)
        <ItemFeatures of 2 items: year (number), genres (set)>
        """
        table = as_table(frame, None, source)
        named = _named(kinds, [*table.column_names, *(vectors or {})], source, just)
        id_column = _id_column(named, item, table.column_names, source, just)
        check_columns(table.column_names, [id_column], source)
        ids = _distinct_ids(flat(table, id_column), id_column, source)
        columns: dict[str, Any] = {}
        found: dict[str, Any] = {}
        separators = {}
        for name in table.column_names:
            if name in ("", id_column) or named.get(name, "skip" if just else "") == "skip":
                continue
            check_columns(table.column_names, [name], source)
            is_dictionary = pa.types.is_dictionary(table.column(name).type)
            values = flat(table, name)
            kind, _, separator = (named.get(name) or _guess(values, name, source, is_dictionary)).partition(":")
            if kind == "set" and is_text(values.type):
                separators[name] = separator = separator or _likely_separator(values)
            columns[name], found[name] = _CANONICAL[kind](values, name, source, separator), kind
        for name, rows in (vectors or {}).items():
            if named.get(name, "skip" if just else "") != "skip":
                columns[name], found[name] = _vectors_of(rows, len(ids), name, source), "vector"
        if not columns:
            raise UserError(
                f"{source}: there is no column beside the item ids, {id_column!r}; give columns of features"
            )
        return cls(
            ids=ids,
            table=pa.table(columns),
            kinds=found,
            separators=separators,
            source=source,
            named=named,
            id_column=id_column,
        )

    @classmethod
    def read(
        cls,
        files: str | Path | Sequence[str | Path],
        *,
        item: str | None = None,
        kinds: Mapping[str, str] | None = None,
        data_root: str | Path | None = None,
        just: bool = False,
    ) -> ItemFeatures:
        """Features of a file of any format that events have, or of a RecBole ``.item`` file.

        Args:
            files: the file, and after it any number of ``.npy`` files with a vector for each of its rows, whose columns
                are called as the files.
            data_root: where a relative path is looked for that is not there from here.
        """
        given = [files] if isinstance(files, (str, Path)) else list(files)
        paths = [_found(file, data_root) for file in given]
        tables = [path for path in paths if ending(path) != ".npy"]
        if len(tables) != 1:
            raise UserError(
                f"items are {', '.join(map(str, given)) or 'no file'}; give one table with item ids, and beside it any "
                "number of .npy files with a vector for each of its rows"
            )
        path = tables[0]
        if not source_files(path)[0].is_file():
            raise UserError(f"{path}: no such file; check the path")
        typed = {name: TYPED_HEADER.get(kind, "category") for name, kind in column_types(path).items()}
        names = [name for name in column_names(path) if name]
        named = _named(kinds, [*names, *(other.stem for other in paths if other != path)], str(path), just)
        id_column = _id_column(named, item, names, str(path), just)
        others = {other.stem: other for other in paths if other != path}
        skipped = {
            id_column, *(name for name in (*names, *others) if named.get(name, "skip" if just else "") == "skip")
        }  # fmt: skip
        kept = [name for name in dict.fromkeys(names) if name not in skipped]
        known = {**({} if just else typed), **named}
        made = cls.from_frame(
            read_table(path, [id_column, *kept], ids=[id_column]),
            kinds={name: kind for name, kind in known.items() if name not in skipped} | {id_column: "id"},
            source=str(path),
            vectors={name: _read_npy(other) for name, other in others.items() if name not in skipped},
            just=just,
        )
        return replace(made, files=tuple(whole_path(file) for file in given), named=named)

    def aligned(self, ids: NDArray[Any]) -> ItemFeatures:
        """The features of items with these raw ids, in their order; an item without a row has every value missing."""
        rows = Vocabulary(self.ids).encode(ids) - 1
        return replace(self, ids=ids, table=self.table.take(pa.array(rows, mask=rows < 0)))

    def save(self, path: str | Path) -> None:
        """Write a Parquet file that ``read`` reads the same from with ``kinds_to_read``."""
        columns = {name: self.table.column(name) for name in self.table.column_names}
        write_parquet(user_path(path), pa.table({self.id_column: pa.array(self.ids), **columns}))

    @property
    def kinds_to_read(self) -> dict[str, str]:
        """Column -> kind, the ids among them, so that nothing is guessed."""
        return {self.id_column: "id", **self.kinds}

    def only(self, columns: Sequence[str]) -> ItemFeatures:
        """Some of the columns."""
        check_columns(self.table.column_names, columns, self.source)
        chosen: dict[str, Any] = {
            name: {column: value for column, value in getattr(self, name).items() if column in columns}
            for name in ("kinds", "separators")
        }
        return replace(self, table=self.table.select(list(columns)), **chosen)

    def telling(self) -> ItemFeatures:
        """Without the columns that tell no item from another; a warning names these."""
        useless = {}
        for column in self.describe():
            if column.num_distinct == 0:
                useless[column.name] = "no value"
            elif column.num_distinct == 1:
                useless[column.name] = f"the same value, {column.example!r}, in every row that has one"
            elif column.kind == "category" and column.num_distinct == column.num_known:
                useless[column.name] = "a different value in every row"
        if useless:
            said = "; ".join(f"column {name!r} holds {what}" for name, what in useless.items())
            warnings.warn(
                f"{self.source}: {said}: left out, since that says nothing of an item (name the kind that the "
                "column has, if it has another, or skip)",
                stacklevel=4,
            )
        kept = [name for name in self.table.column_names if name not in useless]
        if not kept:
            raise UserError(f"{self.source}: no column tells one item from another; give other features")
        return self.only(kept)

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """(N,) which items have a value in any column."""
        found = np.zeros(len(self), dtype=bool)
        for column in self.table.columns:
            found |= column.is_valid().to_numpy()
        return found

    @cached_property
    def hash(self) -> str:
        """SHA-256 of kinds and values of the items that have any.

        The order of rows and columns does not enter, nor do the names of files, nor the types of ids and categories.
        """
        texts = pa.array(self.ids).cast(pa.large_string()) if len(self) else pa.array([], pa.large_string())
        rows = pc.sort_indices(texts)
        rows = rows.filter(pa.array(self.covered).take(rows))
        parts: list[Any] = ["recbft item features 1", *text_parts(texts.take(rows))]
        for name in sorted(self.table.column_names):
            column = flat(self.table, name).take(rows)
            parts += [name, self.kinds[name], column.is_valid().to_numpy(zero_copy_only=False)]
            values = column.drop_null()
            if pa.types.is_large_list(values.type):
                parts.append(pc.list_value_length(values).to_numpy(zero_copy_only=False))
                values = values.flatten()
            parts += text_parts(values) if is_text(values.type) else [values.to_numpy(zero_copy_only=False)]
        return sha256_of(*parts)

    def describe(self) -> list[Column]:
        """What each column holds."""
        return [self._describe(name) for name in self.table.column_names]

    def _describe(self, name: str) -> Column:
        values = flat(self.table, name).drop_null()
        example = values[0].as_py() if len(values) else None
        if self.kinds[name] == "vector":
            rows = pd.Series([row.tobytes() for row in vectors(values)], dtype=object)
            distinct, width = rows.nunique(), 0 if example is None else len(example)
            example = None if example is None else f"{width} numbers, {', '.join(f'{x:.3g}' for x in example[:3])}, ..."
        else:
            distinct = len((values.flatten() if self.kinds[name] == "set" else values).unique())
        if isinstance(example, list):
            example = ", ".join(example)
        return Column(name, self.kinds[name], len(values), distinct, example if example is None else str(example))


class Column(NamedTuple):
    """A feature column in figures."""

    name: str
    kind: Kind
    num_known: int  # items that have a value
    num_distinct: int  # values; of sets, their members
    example: str | None


def vectors(values: Any) -> NDArray[np.float32]:
    """An arrow column of lists of one length, without nulls, as (rows, width)."""
    flattened = values.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flattened, dtype=np.float32).reshape(len(values), -1 if len(values) else 0)


def kinds_in(texts: Sequence[str]) -> dict[str, str]:
    """What texts such as ``title=words`` say, column -> kind.

    >>> kinds_in(["title=words", "genres=set:|"])
    {'title': 'words', 'genres': 'set:|'}
    """
    found = {}
    for text in texts:
        column, equals, kind = text.partition("=")
        if not (column and equals and kind):
            raise UserError(f"item kind {text!r} cannot be read; write COLUMN=KIND, such as title=words")
        found[column] = kind
    return found


def _named(kinds: Mapping[str, str] | None, columns: Sequence[str], source: str, just: bool) -> dict[str, str]:
    """The kinds that are asked for, checked."""
    named = {str(column): str(kind) for column, kind in (kinds or {}).items() if column in columns or not just}
    if just and not named:
        raise UserError(f"{source}: none of the columns {', '.join(kinds or ())}; columns are {', '.join(columns)}")
    for column, kind in named.items():
        if column not in columns:
            raise UserError(f"{source}: no column {column!r}; {did_you_mean(column, columns, listed_as='columns')}")
        word, colon, separator = kind.partition(":")
        if word not in (*KINDS, "id", "skip") or (colon and (word != "set" or not separator)):
            wanted = f"{', '.join(KINDS)}, set:SEPARATOR, id (the item ids) or skip"
            raise UserError(f"{source}: the kind of column {column!r} is {kind!r}; choose one of {wanted}")
    return named


def _id_column(named: Mapping[str, str], item: str | None, columns: Sequence[str], source: str, just: bool) -> str:
    """The column with the item ids: the one marked so, else that of the events, else the usual one."""
    marked = [column for column, kind in named.items() if kind == "id"]
    if len(marked) > 1:
        raise UserError(f"{source}: columns {', '.join(marked)} are all said to hold the item ids; mark one")
    found = marked or [column for column in (item or USUAL_ITEM, USUAL_ITEM) if column in columns]
    if not found:
        wanted = " or ".join(dict.fromkeys(repr(column) for column in (item or USUAL_ITEM, USUAL_ITEM)))
        mark = "mark it with the kind id: item_kinds={'COLUMN': 'id'} in Python, --item-kind COLUMN=id in a shell"
        raise UserError(
            f"{source}: no column {wanted} with the item ids; {'rename it' if just else mark}; columns are "
            f"{', '.join(columns)}"
        )
    return found[0]


def _distinct_ids(column: Any, name: str, source: str) -> NDArray[Any]:
    ids = read_ids(column, name, source)
    if len(ids) == 0:
        raise UserError(f"{source}: there are no rows; give one per item")
    encoded = ids.dictionary_encode()
    if len(encoded.dictionary) < len(ids):
        codes = pd.Series(encoded.indices.to_numpy(zero_copy_only=False))
        again = codes.duplicated()
        second = int(again.to_numpy().argmax())
        first = int((codes == codes[second]).to_numpy().argmax())
        raise UserError(
            f"{source}: item {ids[second].as_py()!r} stands in rows {first + 1} and {second + 1} ({again.sum():,} rows "
            "repeat an item); keep one row per item (in pandas: .drop_duplicates with the id column)"
        )
    return np.array(ids.to_numpy(zero_copy_only=False), dtype=object if is_text(ids.type) else np.int64)


def _found(file: str | Path, data_root: str | Path | None) -> Path:
    path = user_path(file)
    if is_there(path) or path.is_absolute() or not data_root:
        return path
    below = user_path(data_root) / path
    return below if is_there(below) else path


def _read_npy(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path")
    try:
        with reading(path):
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise UserError(f"{path}: is not an array of numbers ({error}); save one with numpy.save") from None


# Guessing


def _guess(column: Any, name: str, source: str, is_dictionary: bool) -> str:
    kind = column.type
    if is_dictionary or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return "category"
    if is_list(kind):
        return "vector" if pa.types.is_floating(kind.value_type) else "set"
    if is_text(kind):
        return _guess_text(column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or _is_date(kind):
        return "number"
    raise UserError(
        f"{source}: column {name!r} has type {kind}, which is no feature; make it text, numbers or lists of these, or "
        f"leave it out with kind skip ({name}=skip)"
    )


def _guess_text(column: Any) -> str:
    texts = _texts(column, "", "").drop_null()
    if len(texts) == 0:
        return "category"
    numbers = pd.to_numeric(texts.to_pandas(), errors="coerce")
    if numbers.notna().all() and not pc.any(pc.match_substring_regex(texts, "^0[0-9]")).as_py():
        return "number"
    if pc.all(pc.match_substring_regex(texts, _IN_BRACKETS)).as_py():
        return "vector" if pc.all(pc.match_substring_regex(texts, _NUMBERS_IN_BRACKETS)).as_py() else "set:,"
    for separator in _SEPARATORS:
        parts = pc.split_pattern(texts, separator).flatten()
        several = pc.mean(pc.match_substring(texts, separator)).as_py()
        if several >= 0.1 and 2 * len(parts.unique()) <= len(parts):
            return f"set:{separator}"
    several = pc.mean(pc.match_substring_regex(texts, r"\S\s+\S")).as_py()
    return "words" if several >= 0.5 and 2 * len(texts.unique()) >= len(texts) else "category"


# Lists as pandas and numpy write them into text: "['tea', 'cups']", and of numbers "[0.5, -1.0]" or "[ 0.5 -1. ]".
_IN_BRACKETS = r"^\[.*\]$"
_NUMBERS_IN_BRACKETS = r"^\[[-+0-9eE,;\s]*[0-9]\.[-+0-9.eE,;\s]*\]$"


def _likely_separator(column: Any) -> str:
    """Of a column of text that is said to hold sets."""
    return next((mark for mark in "|;," if pc.any(pc.match_substring(column, mark)).as_py()), "|")


# Canonical columns

# How pandas writes values of other types into a text file, and their text where a frame or Parquet holds them.
_WRITTEN_BY_PANDAS = ((r"^True$", "true"), (r"^False$", "false"), (r"^(-?[0-9]+)\.0$", r"\1"))


def _texts(column: Any, name: str, source: str, separator: str = "") -> Any:
    """As text without spaces around it, as whichever file or frame has it; blanks and words for nothing are null."""
    if not is_text(column.type):
        if pa.types.is_floating(column.type):
            wide = column.cast(pa.float64())
            return pa.array([canonical_text(value) for value in wide.to_pylist()], pa.large_string())
        try:
            column = column.cast(pa.large_string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(
                f"{source}: column {name!r} has type {column.type}, which is no text; name another kind, or skip"
            ) from None
    trimmed = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    for pattern, same in _WRITTEN_BY_PANDAS:
        trimmed = pc.replace_substring_regex(trimmed, pattern, same)
    return pc.if_else(stands_for_nothing(trimmed), pa.scalar(None, pa.large_string()), trimmed)


def _sets(column: Any, name: str, source: str, separator: str) -> Any:
    """As lists of texts in order, each once; a list without any is null."""
    if is_text(column.type):
        texts = _texts(column, name, source)
        is_space = separator.isspace()
        if in_brackets := bool(pc.all(pc.match_substring_regex(texts, _IN_BRACKETS)).as_py()):
            texts = pc.utf8_slice_codeunits(texts, 1, -1)
        lists = pc.utf8_split_whitespace(texts) if is_space else pc.split_pattern(texts, separator)
    elif is_list(column.type):
        lists, in_brackets = _variable(column), False
    else:
        raise UserError(f"{source}: column {name!r} has type {column.type}, but a set is a list or a text")
    # Not arrow's parent indices: behind a missing list of a fixed size these count values that flattening drops.
    rows = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False))
    members = _texts(pc.list_flatten(lists), name, source)
    if in_brackets:
        members = _texts(pc.replace_substring_regex(members, r"^'(.*)'$|^\"(.*)\"$", r"\1\2"), name, source)
    frame = pd.DataFrame({"row": rows, "member": members.to_pandas()}).dropna().drop_duplicates()
    frame = frame.sort_values(["row", "member"], kind="stable")
    return _lists(frame["row"].to_numpy(), pa.array(frame["member"], pa.large_string()), len(column))


def _numbers(column: Any, name: str, source: str, separator: str) -> Any:
    if is_text(column.type):
        texts = _texts(column, name, source)
        read = pd.to_numeric(texts.to_pandas(), errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        wrong = np.isnan(read) & texts.is_valid().to_numpy(zero_copy_only=False)
        refuse_first(wrong, column, name, source, "which is no number; name another kind for the column")
    else:
        of_dates = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()) if _is_date(column.type) else column
        found = as_floats(of_dates)
        if found is None:
            raise UserError(
                f"{source}: column {name!r} has type {column.type}, which holds no numbers; name another kind"
            )
        read = found
    refuse_first(
        np.isinf(read), column, name, source, "but a number must be finite; leave it blank where it is unknown"
    )
    return pa.array(read + 0.0, mask=np.isnan(read))


def _vectors(column: Any, name: str, source: str, separator: str) -> Any:
    """As lists of float32 of one length; a list without any number is null."""
    if is_text(column.type):
        bare = pc.utf8_trim_whitespace(pc.replace_substring_regex(_texts(column, name, source), r"[\[\]()\s,;]+", " "))
        lists = pc.utf8_split_whitespace(bare)
    elif is_list(column.type):
        lists = _variable(column)
    else:
        raise UserError(f"{source}: column {name!r} has type {column.type}, but a vector is a list of numbers")
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    usual = int(np.bincount(lengths[lengths > 0]).argmax()) if (lengths > 0).any() else 0
    odd = np.flatnonzero((lengths != usual) & (lengths > 0))
    if len(odd):
        raise UserError(
            f"{source}: row {odd[0] + 1}: column {name!r} holds {lengths[odd[0]]} numbers and others {usual} "
            f"({len(odd):,} rows differ); give vectors of one length, or call the column a set"
        )
    try:
        values = pc.list_flatten(lists).cast(pa.float64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{source}: column {name!r} holds no vectors: {error}") from None
    rows = np.full((len(column), usual), np.nan)
    rows[lengths > 0] = values.reshape(-1, max(usual, 1))[:, :usual]
    return _vectors_of(rows, len(column), name, source)


def _vectors_of(rows: NDArray[Any], num_items: int, name: str, source: str) -> Any:
    """An array of vectors as a column; a row of NaN alone is missing."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        raise UserError(
            f"{source}: vectors {name!r} have shape {rows.shape} of {rows.dtype}; give numbers, (items, width)"
        )
    if len(rows) != num_items:
        raise UserError(
            f"{source}: vectors {name!r} have {len(rows):,} rows and the items {num_items:,}; give one row per item, "
            "in the same order"
        )
    values = np.ascontiguousarray(rows, dtype=np.float32)
    missing = np.isnan(values).all(axis=1)
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1) & ~missing)
    if len(broken):
        raise UserError(
            f"{source}: row {broken[0] + 1}: vector {name!r} holds NaN or infinity beside numbers ({len(broken):,} "
            "such rows); leave the whole vector blank, or all NaN, where it is unknown"
        )
    width = values.shape[1]
    return _lists(np.repeat(np.flatnonzero(~missing), width), pa.array((values[~missing] + 0).ravel()), num_items)


def _lists(rows: NDArray[np.int64], values: Any, num_rows: int) -> Any:
    """Values by row, rows in order, as a column of lists; a row without any is null."""
    lengths = np.bincount(rows, minlength=num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets, mask=np.append(lengths == 0, False)), values)


def _variable(column: Any) -> Any:
    """A column of lists of any type as one of lists that differ in length."""
    return column.cast(pa.large_list(column.type.value_type))


def _is_date(kind: Any) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


_CANONICAL: dict[str, Any] = {
    "category": _texts,
    "words": _texts,
    "set": _sets,
    "number": _numbers,
    "vector": _vectors,
}
