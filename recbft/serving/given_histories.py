"""Histories as they are given, of raw ids in any form, and as a model reads them: item indices side by side.

Shapes: S histories.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.datasets.events import check_columns, check_unit, from_pandas, in_unit, read_times
from recbft.datasets.preparing.row_order import time_columns, warn_if_out_of_order
from recbft.datasets.reading.opening import one_line
from recbft.datasets.vocabulary import Vocabulary, shown_id
from recbft.errors import ColdStartError, UserError

Histories = Mapping[Any, Sequence[Any]] | Iterable[Sequence[Any]] | pd.Series | pd.DataFrame


class Users(list[Any]):
    """Raw ids in a table's ``attrs``, which pandas deep-copies into every part of it: a copy is the list itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Users:
        return self


class Encoded(NamedTuple):
    """Histories of item indices, those without a known item left out."""

    users: pd.Series[Any]  # (S,) raw ids as they were given
    items: NDArray[np.int64]  # known items side by side
    offsets: NDArray[np.int64]  # (S + 1,)
    times: NDArray[np.int64] | None  # of the items, for models that read times
    unknown_events: int
    skipped_users: Users


def encode(histories: Any, vocabulary: Vocabulary, *, reads_times: bool, time_unit: str | None) -> Encoded:
    """Raw histories as item indices, unknown items left out and counted.

    Warns where the rows of a frame go back in time, and where its times are whole numbers that look like those of
    another unit; the warnings point at the program that called recbft.

    Raises:
        ColdStartError: no history holds an item of the vocabulary.
        UserError: as ``recbft.serving.lists.recommend``, of histories.
    """
    histories = as_frame(histories)
    users, lengths, raw = _flatten(histories)
    times = _times(histories, time_unit) if reads_times else None
    if not users:
        raise UserError("there is no history to recommend for; give at least one user with items")
    if not len(raw):
        raise ColdStartError("the histories hold no item; give at least one of them its item ids, oldest first")
    items = vocabulary.encode(raw)
    known = items > 0
    kept = np.bincount(np.repeat(np.arange(len(users)), lengths)[known], minlength=len(users))
    if not kept.any():
        raise ColdStartError(
            f"none of the {len(raw):,} items in the histories is in the model's vocabulary "
            f"(such as {shown_id(next(iter(raw)))}, while the model knows {vocabulary.example!r}); check that the ids "
            "are those of the training data"
        )
    _warn_if_out_of_order(histories)
    skipped = [user for user, count in zip(users, kept, strict=True) if not count]
    return Encoded(
        users=_column([user for user, count in zip(users, kept, strict=True) if count]),
        items=items[known],
        offsets=np.concatenate([[0], np.cumsum(kept[kept > 0])]).astype(np.int64),
        times=None if times is None else times[known],
        unknown_events=int((~known).sum()),
        skipped_users=Users(_column(skipped).tolist()),
    )


def as_frame(histories: Any) -> Any:
    """A table of another library (polars, pyarrow) as a data frame; what is no table is returned as it is.

    Raises:
        UserError: it is one that arrow or pandas cannot hold.
    """
    if isinstance(histories, (pd.DataFrame, pd.Series)) or not hasattr(histories, "__arrow_c_stream__"):
        return histories
    try:
        return pa.RecordBatchReader.from_stream(histories).read_all().to_pandas(integer_object_nulls=True)
    except (pa.ArrowException, ValueError) as error:
        if not hasattr(histories, "columns"):  # a column, which is a sequence
            return histories
        raise UserError(
            f"the histories are a table ({type(histories).__name__}) that cannot be read ({one_line(error)}); give its "
            "columns user_id and item_id alone, as whole numbers or text"
        ) from None


def is_listed(value: Any) -> bool:
    """Whether a loop gives the parts of a value, and not the letters of a text.

    An array or tensor without a dimension says that it can be looped over, and cannot.
    """
    text = isinstance(value, (str, bytes, bytearray))
    return isinstance(value, Iterable) and not text and getattr(value, "ndim", 1) != 0


def numbered(users: pd.Series[Any]) -> tuple[NDArray[np.int64], pd.Index[Any]]:
    """The number of each row's user (-1 for a blank), and the users by number.

    Raises:
        UserError: a user is a list or the like, of which nobody can say whether it is another's.
    """
    try:
        return pd.factorize(users)
    except (TypeError, pa.ArrowException):
        first = next((user for user in users if not isinstance(user, Hashable)), users.iloc[0])
        raise UserError(
            f"column 'user_id' of the histories holds {first!r}; give ids that are whole numbers or text, one per event"
        ) from None


def _flatten(histories: Histories) -> tuple[list[Any], Sequence[int] | NDArray[np.int64], Any]:
    """Users, the length of each history, and all items side by side."""
    if isinstance(histories, pd.DataFrame):
        check_columns([str(column) for column in histories.columns], ["user_id", "item_id"], "the histories")
        if (blank := histories["user_id"].isna().to_numpy()).any():
            raise UserError(
                f"row {int(blank.argmax()) + 1} of the histories has a blank user_id; fill it in or leave it out"
            )
        codes, distinct = numbered(histories["user_id"])
        order = np.argsort(codes, kind="stable")
        return distinct.tolist(), np.bincount(codes, minlength=len(distinct)), histories["item_id"].iloc[order]
    if isinstance(histories, pd.Series):  # of lists, by user
        if (twice := histories.index.duplicated()).any():
            raise UserError(
                f"user {histories.index[twice][0]!r} occurs twice in the histories; give each user one list"
            )
        users, sequences = histories.index.tolist(), histories.tolist()
    elif isinstance(histories, Mapping):
        users, sequences = list(histories), list(histories.values())
    elif is_listed(histories):
        sequences = list(histories)
        users = list(range(len(sequences)))
    else:
        raise UserError(
            f"the histories are {histories!r}; give lists of item ids by user (a mapping), a list of such lists, or a "
            "data frame with columns user_id and item_id"
        )
    for number, (user, items) in enumerate(zip(users, sequences, strict=True), start=1):
        if user is None or user is pd.NA or user != user:
            raise UserError(f"user {number} of the histories is blank ({user!r}); fill the id in or leave the user out")
        if hasattr(items, "columns"):  # of which a loop would give the names
            raise UserError(
                f"the history of user {user!r} is a table ({type(items).__name__}); give its column of item ids"
            )
        if not is_listed(items):
            such = "[]" if items is None else f"[{items!r}]"
            raise UserError(f"the history of user {user!r} is {items!r}; give a list of item ids, such as {such}")
        if isinstance(items, (set, frozenset, Mapping)):
            raise UserError(f"the history of user {user!r} is a {type(items).__name__}; give a list, oldest item first")
    lists = [list(items) for items in sequences]
    return users, [len(items) for items in lists], [item for items in lists for item in items]


def _column(users: list[Any]) -> pd.Series[Any]:
    """The users as they were given: whole numbers beside others do not become floats."""
    mixed = pd.api.types.infer_dtype(users, skipna=False).startswith("mixed")
    try:
        column: pd.Series[Any] = pd.Series(users, dtype=object if mixed else None)
    except UnicodeEncodeError:  # a text without UTF-8, which a column of text cannot hold
        column = pd.Series(users, dtype=object)
    return column


def _times(histories: Histories, unit: str | None) -> NDArray[np.int64] | None:
    """The times of all events in the order of ``_flatten``, in ``unit``; None without a column of them."""
    if not isinstance(histories, pd.DataFrame) or not {"timestamp", "user_id"} <= set(histories.columns):
        return None
    check_columns([str(name) for name in histories.columns], ["user_id", "timestamp"], "the histories")
    column = histories["timestamp"]
    if (blank := column.isna().to_numpy()).any():
        raise UserError(
            f"row {int(blank.argmax()) + 1} of the histories has a blank timestamp; fill it in or leave it out"
        )
    array = _as_array(column)
    if array is None:
        raise UserError(
            f"column 'timestamp' of the histories has type {column.dtype}; give dates, or whole numbers in the unit of "
            "the training data"
        )
    times, own = read_times(array, "timestamp", "the histories")
    if own is not None:
        times = _converted(times, own, unit)
    elif unit is not None:
        check_unit(times, unit, "the histories", stacklevel=5)
    return times[np.argsort(numbered(histories["user_id"])[0], kind="stable")]


def _converted(times: NDArray[np.int64], own: str, unit: str | None) -> NDArray[np.int64]:
    """The ticks of dates in the unit of the training data."""
    if unit is None:
        raise UserError(
            "column 'timestamp' of the histories holds dates, and the training data held whole numbers of a unit "
            "that it does not say; give whole numbers in that unit"
        )
    converted = in_unit(times, own, unit, cut=True)
    if converted is None:
        raise UserError(
            f"column 'timestamp' of the histories holds dates up to {times.max()} {own} after 1970, which do not fit "
            f"in 64 bits in {unit}, the unit of the training data; give dates that do"
        )
    return converted


def _warn_if_out_of_order(histories: Histories) -> None:
    """The row order is taken as it is: say so where the times contradict it, read or not."""
    if not isinstance(histories, pd.DataFrame):
        return
    names = time_columns([name for name in histories.columns if isinstance(name, str)])
    arrays = {name: _as_array(histories[name]) for name in names}
    columns = {name: array for name, array in arrays.items() if array is not None}
    if columns:
        users, advice = numbered(histories["user_id"])[0], "sort the frame by it"
        warn_if_out_of_order("the histories", users, columns, order="the frame's", advice=advice, stacklevel=5)


def _as_array(column: pd.Series[Any]) -> Any:
    """A column as an arrow array with categories decoded; None where arrow has no type for it."""
    try:
        array = from_pandas(column)
        return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None
