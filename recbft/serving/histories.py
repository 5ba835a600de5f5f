"""Histories of raw ids, in any form or from a file, and as a model reads them: item indices side by side.

Shapes: S histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.datasets.columns import check_columns, flat, from_pandas
from recbft.datasets.event_numbers import read_reliabilities
from recbft.datasets.events import USUAL_TIME, check_unit, in_unit, read_times
from recbft.datasets.loading import CardFile, by_session, read_events
from recbft.datasets.prepare import Preparation, kept_rows
from recbft.datasets.row_order import steps_back, time_columns, warn_if_out_of_order
from recbft.datasets.vocabulary import Vocabulary, canonical_text, shown_id
from recbft.errors import ColdStartError, UserError, shown
from recbft.models.contract import SequenceModel

RELIABILITY = "reliability"  # the column of histories that holds it
Histories = Mapping[Any, Sequence[Any]] | Iterable[Sequence[Any]] | pd.Series | pd.DataFrame


class Users(list[Any]):
    """Raw ids in a table's ``attrs``, which pandas deep-copies into every part of it: a copy is the list itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Users:
        return self


class Encoded(NamedTuple):
    """Histories of item indices, those without a known item left out unless they are asked for."""

    users: list[Any]  # (S,) raw ids as they were given
    items: NDArray[np.int64]  # known items side by side
    offsets: NDArray[np.int64]  # (S + 1,)
    times: NDArray[np.int64] | None  # of the items, for models that read times
    unknown_events: int
    skipped_users: Users
    reliability: NDArray[np.float64] | None = None  # of the items, NaN where it is missing


def histories_from_file(
    path: str | Path,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    reliability: str | None = None,
    session: str | None = None,
    separator: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    deduplicate: Literal["first", "last"] | None = None,
) -> pd.DataFrame:
    """The events of each user, oldest first, as ``Recommender.recommend`` takes them; none dropped unless asked.

    Args:
        path: any form that ``recbft.datasets.read_table`` knows.
        user, item: the columns with raw ids; default ``user_id`` and ``item_id``.
        time: the column that orders a user's events (a stable sort); without it the row order is the order.
        reliability, session: as in ``Dataset.from_frame``.
        separator, columns: for delimited files, as in ``recbft.datasets.read_table``.
        where, deduplicate: as in ``Preparation``.

    Returns:
        Columns user_id, item_id and, where ``time`` is given, timestamp (int64, or dates where the file holds dates),
        and so reliability; ids as the file has them. ``attrs`` counts the events left out: ``filtered_out`` by
        ``where``, ``repeated`` by ``deduplicate``.
    """
    chosen = Preparation(where=where, deduplicate=deduplicate)
    usual = CardFile(time=time, separator=separator, columns=columns, preparation=chosen)
    who = by_session({"user": user, "session": session})
    own = {"user": who["user"] or usual.user, "session": who["session"], "item": item or usual.item}
    how = replace(usual, **own, reliability=reliability)
    events = read_events(Path(path), how)
    frame: pd.DataFrame = pd.DataFrame({"user_id": events.user.to_pandas(), "item_id": events.item.to_pandas()})
    if events.reliability is not None:
        frame = frame.assign(**{RELIABILITY: events.reliability})
    rows = np.flatnonzero(kept_rows(events, chosen))
    if events.time is not None:
        times = events.time if events.time_unit is None else events.time.astype(f"datetime64[{events.time_unit}]")
        frame = frame.assign(timestamp=times)
        rows = rows[np.argsort(events.time[rows], kind="stable")]  # ties keep the row order
    if events.time is not None or where is not None:
        frame = frame.iloc[rows].reset_index(drop=True)
    if deduplicate is not None:
        frame = frame.drop_duplicates(["user_id", "item_id"], keep=deduplicate, ignore_index=True)
    frame.attrs = {"filtered_out": len(events) - len(rows), "repeated": len(rows) - len(frame)}
    return frame


def encode(
    histories: Any, vocabulary: Vocabulary, model: SequenceModel, *, time_unit: str | None, keep_empty: bool = False
) -> Encoded:
    """Raw histories as item indices, unknown items left out and counted, with what the model reads of events.

    Warns where the rows of a frame go back in time, and where its times are whole numbers that look like those of
    another unit; the warnings point at the program that called recbft. ``keep_empty`` keeps users without a known item.
    """
    histories = as_frame(histories)
    users, lengths, raw = _flatten(histories)
    times = _times(histories, time_unit) if model.reads_times else None
    reliability = _reliability(histories) if model.reads_reliability else None
    if not users:
        raise UserError("there is no history to recommend for; give at least one user with items")
    if not len(raw) and not keep_empty:
        raise ColdStartError("the histories hold no item; give at least one of them its item ids, oldest first")
    items = vocabulary.encode(raw)
    known = items > 0
    kept = np.bincount(np.repeat(np.arange(len(users)), lengths)[known], minlength=len(users))
    if not (keep_empty or kept.any()):
        raise ColdStartError(
            f"none of the {len(raw):,} items in the histories is in the model's vocabulary "
            f"(such as {shown_id(next(iter(raw)))}, while the model knows {vocabulary.example!r}); check that the ids "
            "are those of the training data"
        )
    _warn_if_out_of_order(histories)
    skipped: list[Any] = []
    if not keep_empty and not kept.all():
        skipped = [user for user, count in zip(users, kept, strict=True) if not count]
        users, kept = [user for user, count in zip(users, kept, strict=True) if count], kept[kept > 0]
    return Encoded(
        users=users,
        items=items[known],
        offsets=np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        times=None if times is None else times[known],
        unknown_events=int((~known).sum()),
        skipped_users=Users(column_of(skipped).tolist() if skipped else ()),
        reliability=None if reliability is None else reliability[known],
    )


def as_frame(histories: Any) -> Any:
    """A table of another library (polars, pyarrow) as a data frame; anything else is returned unchanged."""
    is_table = hasattr(histories, "__arrow_c_stream__") and hasattr(histories, "columns")  # a column has none
    if isinstance(histories, pd.DataFrame) or not is_table:
        return histories
    return pa.RecordBatchReader.from_stream(histories).read_all().to_pandas(integer_object_nulls=True)


def in_usual_columns(
    histories: Any,
    user: str | None,
    item: str | None,
    time: str | None,
    session: str | None = None,
    reliability: str | None = None,
) -> Any:
    """A table whose columns have the names of a run's own data, with the usual names; any other is unchanged.

    Each user's rows are sorted by the run's column of times where the table has it, equal times in row order.
    """
    histories = as_frame(histories)
    if not isinstance(histories, pd.DataFrame):
        return histories
    there, is_timed = set(histories.columns), int((histories.columns == time).sum()) == 1
    who = by_session({"user": user, "session": session})
    own = {"user_id": who["user"] or "user_id", "item_id": item or "item_id"}
    for usual, name in ((RELIABILITY, reliability), (USUAL_TIME, time)):
        if name in there and name != usual:
            histories = histories.assign(**{usual: histories[name]})
            there.add(usual)
    is_usual = session is None and set(own) == set(own.values())
    if not is_usual and set(own.values()) <= there:
        taken = own | {RELIABILITY: RELIABILITY, USUAL_TIME: USUAL_TIME}
        named = histories[[name for name in taken.values() if name in there]].rename(
            columns={name: usual for usual, name in taken.items()}
        )
        if who["session"] in there:  # as ``Events`` call the users
            parts = (own["user_id"], who["session"])
            texts = [histories[name].map(partial(canonical_text, name=name)) for name in parts]
            named = named.assign(user_id=texts[0].str.cat(texts[1], sep="/"))
        histories = named
    return _in_time_order(histories) if is_timed and "user_id" in histories else histories


def _in_time_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows user by user, if any has an earlier time than the one before; unchanged where a time cannot be read."""
    with suppress(UserError):
        users = pd.factorize(frame["user_id"])[0]
        if steps_back(users, column := _as_array(frame, USUAL_TIME)):
            ticks, _ = read_times(column, USUAL_TIME, "the histories")
            frame = frame.iloc[np.lexsort((ticks, users))]
    return frame


def as_list(
    value: Any, what: str, wanted: str = "a list of item ids, oldest first", *, ordered: bool = True
) -> list[Any]:
    """The parts of a value that is a list, and no text, table or single number, whose parts are no ids.

    Args:
        what, wanted: the beginning of a message, such as "exclude is", and what the value should be.
        ordered: refuse a set or mapping too.
    """
    other = (str, bytes, bytearray, *((set, frozenset, Mapping) if ordered else ()))
    single = getattr(value, "ndim", 1) == 0  # which says that it can be looped over, and cannot
    if not isinstance(value, Iterable) or isinstance(value, other) or hasattr(value, "columns") or single:
        raise UserError(f"{what} {shown(value)} ({type(value).__name__}); give {wanted}")
    return list(value)


def _flatten(histories: Any) -> tuple[list[Any], Sequence[int] | NDArray[np.int64], Any]:
    """Users, the length of each history, and all items side by side."""
    if isinstance(histories, pd.DataFrame):
        check_columns([str(column) for column in histories.columns], ["user_id", "item_id"], "the histories")
        if (blank := histories["user_id"].isna().to_numpy()).any():
            raise UserError(
                f"row {int(blank.argmax()) + 1} of the histories has a blank user_id; fill it in or leave it out"
            )
        codes, distinct = pd.factorize(histories["user_id"])
        order = np.argsort(codes, kind="stable")
        return distinct.tolist(), np.bincount(codes, minlength=len(distinct)), histories["item_id"].iloc[order]
    if isinstance(histories, pd.Series):  # of lists, by user
        users, sequences = histories.index.tolist(), histories.tolist()
    elif isinstance(histories, Mapping):
        users, sequences = list(histories), list(histories.values())
    else:
        sequences = as_list(
            histories,
            "the histories are",
            "lists of item ids by user (a mapping), a list of such lists, or a data frame with columns user_id and "
            "item_id",
        )
        users = list(range(len(sequences)))
    if len(set(users)) < len(users):
        twice = next(user for user in users if users.count(user) > 1)
        raise UserError(f"user {twice!r} occurs twice in the histories; give each user one list")
    for number, user in enumerate(users, start=1):
        if user is None or user is pd.NA or user != user:
            raise UserError(f"user {number} of the histories is blank ({user!r}); fill the id in or leave the user out")
    lists = [as_list(items, f"the history of user {user!r} is") for user, items in zip(users, sequences, strict=True)]
    return users, [len(items) for items in lists], [item for items in lists for item in items]


def column_of(users: list[Any]) -> pd.Series[Any]:
    """The users as they were given: whole numbers beside others do not become floats."""
    mixed = pd.api.types.infer_dtype(users, skipna=False).startswith("mixed")
    try:
        column: pd.Series[Any] = pd.Series(users, dtype=object if mixed else None)
    except UnicodeEncodeError:  # a text without UTF-8, which a column of text cannot hold
        column = pd.Series(users, dtype=object)
    return column


def _times(histories: Any, unit: str | None) -> NDArray[np.int64] | None:
    """The times of all events in the order of ``_flatten``, in ``unit``; None without a column of them."""
    if not isinstance(histories, pd.DataFrame) or USUAL_TIME not in histories.columns:
        return None
    check_columns([str(name) for name in histories.columns], [USUAL_TIME], "the histories")
    times, own = read_times(_as_array(histories, USUAL_TIME), USUAL_TIME, "the histories")
    if own is not None:
        converted = None if unit is None else in_unit(times, own, unit, cut=True)
        if converted is None:
            learned = unit or "whole numbers of an unknown unit"
            raise UserError(
                f"column {USUAL_TIME!r} of the histories holds dates or fractions of seconds, which cannot be "
                f"converted to the times of the training data ({learned}); give whole numbers in that unit"
            )
        times = converted
    elif unit is not None:
        check_unit(times, unit, "the histories", stacklevel=5)
    return times[np.argsort(pd.factorize(histories["user_id"])[0], kind="stable")]


def _reliability(histories: Any) -> NDArray[np.float64] | None:
    """That of all events in the order of ``_flatten``; None without a column of it."""
    if not isinstance(histories, pd.DataFrame) or RELIABILITY not in histories.columns:
        return None
    values = read_reliabilities(_as_array(histories, RELIABILITY), RELIABILITY, "the histories")
    return values[np.argsort(pd.factorize(histories["user_id"])[0], kind="stable")]


def _warn_if_out_of_order(histories: Any) -> None:
    """The row order is taken as it is: say so where the times contradict it, read or not."""
    if not isinstance(histories, pd.DataFrame):
        return
    columns = {}
    for name in time_columns([name for name in histories.columns if isinstance(name, str)]):
        with suppress(UserError):  # a column that nobody named may hold anything
            columns[name] = _as_array(histories, name)
    if columns:
        users, advice = pd.factorize(histories["user_id"])[0], "sort the frame by it"
        warn_if_out_of_order("the histories", users, columns, order="the frame's", advice=advice, stacklevel=5)


def _as_array(histories: pd.DataFrame, name: str) -> Any:
    """A column as an arrow array with categories decoded."""
    return flat(pa.table({name: from_pandas(histories[name], name, "the histories")}), name)
